#pragma once
// The recurrence of a value head over many tokens in double precision, with the bound of conformance/recurrent/judge.h beside it: the same
// sums as the judge's, for states of floats that begin at zero, in loops that use the vectors of the machine. A request of a hundred
// thousand tokens is recomputed in a second.
#include <cstdint>
#include <vector>

#include "imbrex/recurrent.h"

namespace imbrex::serve {

// What a convolution in front makes of some channels of up to so many tokens, and how far a backend's rounding may be from it.
class ChannelScan {
 public:
  // `weights`: [width, channels], `bias`: [channels] or empty. Channels are a multiple of 8.
  ChannelScan(std::vector<double> weights, std::vector<double> bias, int width, bool silu);
  int width() const { return width_; }
  // `rows`: [width - 1 + tokens, channels]; `out` and `off`: [tokens, channels], numbers of bf16 and what they may be off by.
  void run(const double* rows, int tokens, double* out, double* off) const;

 private:
  std::vector<double> weights_, bias_;
  int width_, channels_;
  bool silu_;
};

// Tokens of a value head.
struct HeadRows {
  static constexpr int kMost = 16;
  HeadRows(int dim_k, int dim_v);
  int count = 0;
  std::vector<double> keys, keys_off;      // [kMost, dim_k]
  std::vector<double> decays, log_decays;  // [kMost, dim_k]
  std::vector<double> values, values_off;  // [kMost, dim_v], times the step where it scales them
  std::vector<double> shares, betas;       // [kMost]: share_of_step(), and beta; 1 without the delta rule
};

class HeadScan {
 public:
  // `of_factors`: the rounding of factors of products; 0: there are none.
  HeadScan(int dim_k, int dim_v, bool delta, double of_factors);
  void run(const HeadRows&);
  double number(int k, int v) const { return numbers_[at(k, v)]; }
  double error(int k, int v) const { return errors_[at(k, v)] + spread_[size_t(v)]; }  // how far float arithmetic may have taken it
  double spread(int v) const { return spread_[size_t(v)]; }                            // the part that is of a whole column

  static constexpr int kColumns = 8;  // that are computed together: head_dim_v is a multiple of it

 private:
  size_t at(int k, int v) const { return (size_t(v / kColumns) * size_t(dim_k_) + size_t(k)) * kColumns + size_t(v % kColumns); }

  int dim_k_, dim_v_;
  bool delta_;
  double of_factors_;
  std::vector<double> numbers_, errors_;  // [dim_v / kColumns, dim_k, kColumns]
  std::vector<double> spread_;            // [dim_v]
};

}  // namespace imbrex::serve
