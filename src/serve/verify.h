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
  //   |actual - expected| <= u |expected| + 4 u sqrt(sum p_i^2 v_i^2) + 1e-6,  u = 2^-8
  // Rounding to bf16 moves a number x by at most u |x|. The first term is that of the output. The second bounds what rounding every
  // probability does: such errors are independent, so they add up by their squares, and the root is their scale for this very output. An
  // error of up to u |x| with equal chances has a standard deviation of u |x| / sqrt(3), so 4 roots are at least 6.9 standard deviations of
  // the sum. The root is measured: extra value columns carry the same values with a random sign per key. The bound shrinks with the context
  // like the outputs do, so that one wrong page among thousands of keys is seen; the conformance bound, made for short cases, has a floor
  // that would hide it.
  // Of latent attention, with c_i the latent of key i, a = q W_UK the absorbed query, s the scale of logits and w a row of W_UV:
  //   |actual - expected| <= u |expected| + 4 u sqrt(K + A + C) + 1e-6
  //   K = 3 sum p_i^2 v_i^2            expanded: weights, values and keys, the last of which move logits by less than u. In latent space
  //                                    weights alone are rounded
  //   A = sum_d (s a_d cov(c_d, v))^2  in latent space: elements of the absorbed query, where cov is over the keys with their weights
  //   C = sum_d (w_d sum p_i c_i,d)^2  in latent space: elements of the sum of latents, in front of W_UV
  // K becomes less with the number of keys, since each key's roundings are its own. A and C do not: one error of the query is in the
  // logits of all keys, and values are made of the same latents as logits. With random latents of variance 1 the covariance is w_d and
  // the sum s a, so that both are s^2 sum_d (a_d w_d)^2 however many keys there are. With 512 latents, 128 + 64 elements of a query and
  // the weights of a replay they are more than K from about 3000 keys on, and nine tenths of the root's square at 46 thousand. K is
  // measured as above, and A by one more sum, with every element of the query off by u, up or down. The root is one for the values of a
  // head, which have the same scale: it is of the means of the three over them.
  // A wrong page moves all values of a head, and roundings rarely move many of them far. So their root mean square has a bound of its
  // own:
  //   sqrt(mean (actual - expected)^2) <= u sqrt(mean expected^2 + K + A + C) + 1e-6
  // Errors would meet it if each was as large as it can be; they have 0.42 of that, or 0.58 if all mantissas were the worst. So a page
  // of 32 keys that are another request's is seen among 50 thousand keys; among 100 thousand it is less than what roundings do.
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
  static constexpr int kRootMeanSquare = -1;
  struct Outcome {
    double max_error = 0, max_ratio = 0;
    double expected = 0, actual = 0, bound = 0;  // of the worst value
    int head = -1, element = 0;                  // where it is; -1: no heads; kRootMeanSquare: `actual` is that of the head's errors
    bool of_state = false;                       // else of the output
    void add(double expected, double actual, double bound, int head, int element, bool of_state = false);
  };
  Outcome recompute(const VerifySample&, const AttentionTarget&, Worker&) const;
  Outcome recompute(const VerifySample&, const ShortConvTarget&, Worker&) const;
  Outcome recompute(const VerifySample&, const MlaTarget&, Worker&) const;
  Outcome recompute(const VerifySample&, const RecurrentTarget&, Worker&) const;
  static void compare(const uint16_t* actual, std::span<const double> expected, double root, int head, Outcome&);
  static void attend(const HeadCall&, Worker&);
  uint64_t key_of(const VerifySample&, int position) const;
  static int last_key_of(const VerifySample&);  // its position, or that of the last token of its image

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
