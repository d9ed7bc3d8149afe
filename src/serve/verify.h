#pragma once
// Recomputes sampled outputs of a replay with the reference backend of their family, or with a recurrence in double precision, from the
// synthetic definition of the request's own tokens: nothing is read from caches, so a wrong block, slot, shared prefix, stale page or stale
// state shows.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "imbrex/layer_spec.h"
#include "serve/synthetic.h"
#include "serve/trace.h"

namespace imbrex::serve {

// The part of a token's output in a layer that is recomputed.
struct AttentionTarget {  // the q heads of one kv head
  const AttentionSpec* spec = nullptr;
  const LayerParameters* parameters = nullptr;
  int kv_head = 0;
};
struct ShortConvTarget {  // all channels
  const ShortConvSpec* spec = nullptr;
  const ShortConvParameters* parameters = nullptr;
};
struct MlaTarget {  // one head
  const MlaSpec* spec = nullptr;
  const MlaParameters* parameters = nullptr;
  int head = 0;
};
struct RecurrentTarget {  // some value heads that share a key head, or all that a norm of outputs is over
  const RecurrentSpec* spec = nullptr;
  const RecurrentParameters* parameters = nullptr;
  int first_head = 0;
  bool rounded_products = false;              // as the plan says
  static int heads_of(const RecurrentSpec&);  // how many
};
using VerifyTarget = std::variant<AttentionTarget, ShortConvTarget, MlaTarget, RecurrentTarget>;

// A token in a layer, and what the backend made of it.
struct VerifySample {
  int request = 0;  // for messages and token identities
  const TraceRequest* trace = nullptr;
  int position = 0;  // of the token
  // The token_key of the last tokens of its path, the token's own last, where these are drafts: they stand for those of the request.
  std::vector<uint64_t> drafts = {};
  int layer = 0;          // index into ModelSpec::layers: what synthesis depends on
  std::string_view name;  // of that layer
  VerifyTarget target;
  // Behind the token, where the target checks it: of a recurrent layer [heads, two dimensions] of state_dtype, and of the convolution in
  // front of it [width - 1, channels of these heads] of bf16; of a short convolution [width - 1, dim] of bf16.
  std::vector<char> state;
  // bf16 [group_size, head_dim_v]; [v_dim] of latent attention, [dim] of a short convolution, [heads, head_dim_v] of a recurrent layer.
  std::vector<uint16_t> actual = {};
};

struct VerifySummary {
  int64_t outputs = 0, values = 0;  // outputs: of a q head, or of a token where a layer has no heads
  int64_t states = 0;               // of a value head, or of a short convolution
  double max_error = 0, max_ratio = 0;
};

class Verifier {
 public:
  // Error replay.verify.head_dim_v for specs whose values are too long to be measured beside their noise.
  Verifier(const Synthetic&, uint64_t seed, int prefix_block, DType kv_dtype, const ParallelFor&);
  ~Verifier();

  static void check_spec(const LayerSpec&);
  // Recomputes all samples in parallel. Error replay.verify for the first one, in order, that differs by more than its bound:
  //   |actual - expected| <= 2^-8 |expected| + 4 * 2^-8 sqrt(sum p_i^2 v_i^2) + 1e-6
  // The first term is twice the rounding of the output to bf16. The second bounds what rounding every probability to bf16 (2^-9)
  // does: such errors are independent, so they add up by their squares, and the root is their scale for this very output. It is
  // measured: extra value columns carry the same values with a random sign per key. The bound shrinks with the context like the
  // outputs do, so that one wrong page among thousands of keys is seen; the conformance bound, made for short cases, has a floor
  // that would hide it.
  // Of latent attention the query is absorbed in double precision. A plan of it rounds keys and values, or absorbed queries, to bf16, which
  // moves logits by about as much as rounding moves probabilities: the bound holds for it too.
  // Of a short convolution:
  //   |actual - expected| <= 2^-7 |expected| + 2^-20 |C| (|bias| + sum |weight h|) + 1e-6
  // The first term is a step of bf16, since both are rounded to it; the second bounds what sums in floats lose when their parts cancel.
  // Its state is what was convolved, rounded once: every bit has to be the same.
  // Of a recurrent layer the recurrence is computed again from the request's first token on, in double precision; the bound is that of its
  // conformance tests (conformance/recurrent/judge.h): how far float arithmetic may have taken the state, and the rounding of the output.
  // The state behind the token is compared too, where the sample has it, and bit for bit what a convolution in front has kept.
  void run(const std::vector<VerifySample>&);
  const VerifySummary& summary() const { return summary_; }

 private:
  struct Worker;
  struct HeadCall;
  struct Outcome {
    double max_error = 0, max_ratio = 0;
    double expected = 0, actual = 0, bound = 0;  // of the worst value
    int head = -1, element = 0;                  // where it is; -1: no heads
    bool of_state = false;                       // else of the output
    void add(double expected, double actual, double bound, int head, int element, bool of_state = false);
  };
  Outcome recompute(const VerifySample&, const AttentionTarget&, Worker&) const;
  Outcome recompute(const VerifySample&, const ShortConvTarget&, Worker&) const;
  Outcome recompute(const VerifySample&, const MlaTarget&, Worker&) const;
  Outcome recompute(const VerifySample&, const RecurrentTarget&, Worker&) const;
  static void compare(const uint16_t* actual, std::span<const double> expected, double noise, int room, int head, Outcome&);
  static void attend(const HeadCall&, Worker&);
  uint64_t key_of(const VerifySample&, int position) const;

  const Synthetic& synthetic_;
  uint64_t seed_;
  int prefix_block_;
  DType kv_dtype_;
  ParallelFor threads_;
  std::vector<char> pool_, negative_pool_;  // Synthetic::pool as the cache stores it, and with the other sign
  std::vector<std::unique_ptr<Worker>> workers_;
  VerifySummary summary_;
};

}  // namespace imbrex::serve
