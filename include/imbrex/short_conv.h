#pragma once
// Causal convolutions of a few tokens, channel by channel: a family whose cache is a few rows of state for each request instead of keys of
// every token. What is convolved is called h, and there are two forms of a layer:
//   gated  h[t] = B[t] * x[t],  y[t] = C[t] * (bias + sum of weight[:, i] * h[t - width + 1 + i] over i in [0, width)): LFM2's layers
//   plain  h[t] = x[t],  y[t] = activation(bias + the same sum): causal_conv1d, in front of the recurrence of Mamba, GDN and KDA
// h is rounded to dtype, as it is kept; sums are floats. Before a request's first token h is zero.
#include <cstdint>
#include <string>

#include "imbrex/family.h"

namespace imbrex {

enum class ShortConvForm : uint8_t { gated, plain };
enum class ShortConvActivation : uint8_t {
  none,
  silu  // s / (1 + exp(-s)) of a sum s
};

const char* to_string(ShortConvForm);
const char* to_string(ShortConvActivation);

struct ShortConvSpec {
  int dim = 0;                // channels; under tensor parallelism those of the rank
  int width = 3;              // tokens that a sum is over, its own included (conv_L_cache, d_conv): 2 to 8
  bool bias = false;          // ShortConvInputs::bias is added to the sum
  DType dtype = DType::bf16;  // of inputs, outputs, weights and state: f32, bf16 or f16
  int num_drafts = 0;         // how many drafts of a step a later one may take back (Batch::num_drafts), at most 64
  ShortConvForm form = ShortConvForm::gated;
  ShortConvActivation activation = ShortConvActivation::none;  // of the plain form alone
  bool tree_drafts = false;  // drafts of a step may be a tree (Batch::draft_parents): a sum is over the path to the draft

  int input_channels() const { return form == ShortConvForm::gated ? 3 * dim : dim; }
  int state_rows() const { return tree_drafts ? (width - 1) * (1 + num_drafts) : width - 1 + num_drafts; }
  int64_t state_bytes() const { return int64_t(state_rows()) * dim * size_of(dtype); }  // of a slot of one layer
  void validate() const;                                                                // Error short_conv.*
  std::string str() const;  // "short_conv d2048 w3 bf16 bias drafts4", "short_conv d8192 w4 bf16 plain silu"
  friend bool operator==(const ShortConvSpec&, const ShortConvSpec&) = default;
};

struct ShortConvInputs {
  // dtype [>= num_tokens, input_channels()], innermost stride 1. Gated: B, C and x of a token after one another, as in_proj gives them;
  // plain: x. Tokens may be any distance apart, as they are where this is a part of a wider projection.
  TensorView input;
  TensorView weight;  // dtype [dim, width]; weight[:, width - 1] is of the current token
  TensorView bias;    // dtype [dim], contiguous; only with ShortConvSpec::bias
  // dtype [slots, state_rows, dim], innermost stride 1: h of earlier tokens, oldest first. Read and written by run(). A request reads rows
  // [accepted_drafts, accepted_drafts + width - 1) of its source slot, and nothing where it has no earlier token; then it writes rows
  // [0, width - 1 + num_drafts of the request) of its slot. With tree_drafts a row is instead width - 1 rows: the i-th of these, from 0 on,
  // are h of the last tokens on the path to the i-th draft, its own included, and the 0-th those in front of the first draft. Number
  // accepted_drafts is read, and numbers [0, num_drafts of the request] are written. Other rows and slots do not change.
  TensorView state;
};

struct ShortConvOutputs {
  // dtype [>= num_tokens, dim], innermost stride 1. Not in the place of the input: a request's tokens are computed side by side, and each
  // reads those in front of it.
  TensorView out;
};

// update() reads Batch::query_start_loc, seq_lens, state_slots, source_slots and pad_slot, and where there are drafts num_drafts,
// accepted_drafts and draft_parents. No two requests with tokens have the same slot, but for padding. How a prompt is cut into steps
// changes no bit of outputs and state, nor do other requests and threads. update_on_device() reads DeviceBatch::state_slots and the drafts
// too. There a request whose slot is outside of the state, or which has the slot of another one, is left out of run(), and
// device_problems() reports it. It is for GPUs: a plan of a CPU, where lengths are on the host anyway, refuses it.
class ShortConvPlan : public BasicPlan {
 public:
  // Allocates nothing. Errors short_conv.run.*, tensor.*
  virtual void run(const ShortConvInputs&, const ShortConvOutputs&, Stream = nullptr) const = 0;
};

// Plans of the built-in backends need no scratch: BackendOf::workspace_bytes() is 0, and PlanOptions::workspace is taken but not used.
struct ShortConvFamily {
  static constexpr std::string_view name = "short_conv";
  using Spec = ShortConvSpec;
  using Plan = ShortConvPlan;
};

}  // namespace imbrex
