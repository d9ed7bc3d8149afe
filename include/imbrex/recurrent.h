#pragma once
// Layers that keep a matrix of state S for each request and value head, instead of keys of every token: linear attention with decay
// (lightning attention), Mamba2 (SSD) and Mamba1, gated delta nets (GDN), and Kimi delta attention (KDA). For each token, with the key
// head of the value head's group (num_v_heads / num_k_heads of them share one):
//   S = diag(exp(g)) S              decay: g <= 0, one number for a head or one for each key channel
//   u = beta (v - S^T k)            with the delta rule: what S has for k already is taken off v; u = v without it
//   S = S + k u^T
//   out = scale S^T q  (+ skip v)   the token's own write included
// What models have behind it, a norm of the outputs and a gate z, may be part of the layer: OutputNorm and OutputGate.
// S is [head_dim_k, head_dim_v], zero before a request's first token. All is computed in float or better. Sources: the definitions of
// FLA's naive recurrences, vLLM's Mamba and GDN layers, and the KDA report.
#include <cstdint>
#include <string>

#include "imbrex/family.h"

namespace imbrex {

// How a token's decay g is made of RecurrentInputs::gate (x), rates (A) and gate_bias (b).
enum class RecurrentGate : uint8_t {
  fixed,     // g = -A: of a head, whatever the token; A >= 0 (lightning attention: the slope)
  log,       // g = x
  softplus,  // g = -exp(A) s with s = softplus(x + b), cut to [gate_min, gate_max] (GDN, KDA; Mamba: s is the step dt, A is A_log)
  sigmoid    // g = gate_min sigmoid(exp(A) (x + b)), with gate_min < 0 (KDA with a lower bound)
};

// Which dimension of a state comes first in memory.
enum class StateLayout : uint8_t {
  k_first,  // [head_dim_k, head_dim_v] (FLA)
  v_first   // [head_dim_v, head_dim_k] (vLLM, FlashInfer, Mamba)
};

// What outputs are multiplied by, of RecurrentInputs::z.
enum class OutputGate : uint8_t {
  none,
  silu,    // z / (1 + exp(-z)) (GDN, Mamba)
  sigmoid  // 1 / (1 + exp(-z)) (KDA, lightning attention)
};

// Which root mean square outputs are divided by, over the value heads of a group: x / sqrt(mean of x^2 + norm_eps), and then multiplied by
// RecurrentInputs::norm_weight. Outputs may be rounded to dtype in front of it, as they are where the norm is a layer of its own.
enum class OutputNorm : uint8_t {
  none,
  before_gate,  // out = norm(x) weight gate(z) (GDN, KDA, lightning attention)
  after_gate    // out = norm(x gate(z)) weight (Mamba2)
};

// Whether q, k and v are what a causal convolution makes of RecurrentInputs::input, channel by channel (short_conv.h, its plain form);
// and in which order their channels are.
enum class RecurrentConv : uint8_t {
  none,  // q, k and v are given
  qkv,   // GDN, KDA
  vkq    // Mamba2: x, B and C
};

const char* to_string(RecurrentGate);
const char* to_string(RecurrentConv);
const char* to_string(OutputGate);
const char* to_string(OutputNorm);
const char* to_string(StateLayout);

struct RecurrentSpec {
  int num_k_heads = 0;  // of q and k (Mamba2: groups); under tensor parallelism those of the rank
  int num_v_heads = 0;  // of v, out and state: a multiple of num_k_heads
  int head_dim_k = 0;   // Mamba: d_state; at most 256
  int head_dim_v = 0;   // Mamba1: 1; at most 256
  RecurrentGate gate = RecurrentGate::softplus;
  bool channel_gate = false;             // gate and gate_bias have a number for each key channel of a head (KDA)
  bool channel_rates = false;            // and so have rates (Mamba1)
  float gate_min = 0.f, gate_max = 0.f;  // as RecurrentGate says; softplus: gate_max 0 is no limit (Mamba2: time_step_limit)
  bool delta = false;                    // the delta rule, with RecurrentInputs::beta
  bool sigmoid_beta = false;             // beta is the sigmoid of what is given, else what is given
  float beta_scale = 1.f;                // times this (2: negative eigenvalues)
  bool scaled_values = false;            // v is multiplied by s of the gate softplus first, but not for `skip` (Mamba: the step)
  bool qk_norm = false;                  // q and k are divided by sqrt(sum of squares + 1e-6) first
  bool skip = false;                     // out has skip v added (Mamba: D)
  float scale = 0.f;                     // of q; 0: 1 / sqrt(head_dim_k)
  DType dtype = DType::bf16;             // of q, k, v and outputs: f32, bf16 or f16
  DType state_dtype = DType::f32;        // f32, bf16 or f16
  StateLayout layout = StateLayout::v_first;
  int num_drafts = 0;  // how many drafts of a step a later one may take back (Batch::num_drafts), at most 64
  OutputGate out_gate = OutputGate::none;
  OutputNorm out_norm = OutputNorm::none;
  int norm_groups = 0;     // that the value heads are divided into; 0: the norm is over each head (Mamba2: n_groups)
  float norm_eps = 1e-6f;  // of the norm
  RecurrentConv conv = RecurrentConv::none;
  int conv_width = 4;      // tokens of a sum, its own included: 2 to 8
  bool conv_bias = false;  // RecurrentInputs::conv_bias is added to the sum
  bool conv_silu = true;   // and SiLU follows
  // Drafts of a step may be a tree (Batch::draft_parents), each computed from the state behind the token that it follows, as its row keeps
  // it: of fewer bits than a float it is rounded behind each draft, also in a chain.
  bool tree_drafts = false;

  int64_t conv_channels() const { return int64_t(2) * num_k_heads * head_dim_k + int64_t(num_v_heads) * head_dim_v; }
  int conv_state_rows() const { return tree_drafts ? (conv_width - 1) * (1 + num_drafts) : conv_width - 1 + num_drafts; }
  bool has_output_stage() const { return out_gate != OutputGate::none || out_norm != OutputNorm::none; }
  int norm_heads() const { return norm_groups > 0 ? num_v_heads / norm_groups : 1; }  // value heads of a group
  int state_rows() const { return 1 + num_drafts; }
  int64_t state_bytes() const;  // of a slot of one layer
  float query_scale() const;    // `scale`, or what it stands for
  void validate() const;        // Error recurrent.*
  std::string str() const;      // "recurrent q16 v32 k128 v128 softplus delta qk_norm bf16 state f32 v_first"
  friend bool operator==(const RecurrentSpec&, const RecurrentSpec&) = default;
};

// Innermost strides are 1. `gate` and `beta` are of dtype or of f32.
struct RecurrentInputs {
  TensorView q, k;       // dtype [>= num_tokens, num_k_heads, head_dim_k]
  TensorView v;          // dtype [>= num_tokens, num_v_heads, head_dim_v]
  TensorView gate;       // [>= num_tokens, num_v_heads], or [.., num_v_heads, head_dim_k] with channel_gate; not with RecurrentGate::fixed
  TensorView beta;       // [>= num_tokens, num_v_heads]; with the delta rule alone
  TensorView rates;      // f32 [num_v_heads], or [num_v_heads, head_dim_k] with channel_rates; not with RecurrentGate::log
  TensorView gate_bias;  // f32 [num_v_heads], or [num_v_heads, head_dim_k] with channel_gate; empty: zeros
  TensorView skip;       // f32 [num_v_heads]; with RecurrentSpec::skip alone
  // state_dtype [slots, state_rows, num_v_heads, head_dim_k, head_dim_v], or with head_dim_v in front of head_dim_k; a head's numbers are
  // contiguous. Read and written by run(). A request reads row accepted_drafts of its source slot, and nothing where it has no earlier
  // token; then it writes rows [0, num_drafts of the request] of its slot: row 0 is the state in front of the first draft, row i that
  // behind the i-th draft. Other rows and slots do not change.
  TensorView state;
  TensorView z;            // dtype [>= num_tokens, num_v_heads, head_dim_v]; with RecurrentSpec::out_gate alone
  TensorView norm_weight;  // dtype or f32 [num_v_heads, head_dim_v], or [head_dim_v] for all heads; with RecurrentSpec::out_norm alone
  // With RecurrentSpec::conv, which has no q, k and v: all of dtype, innermost strides 1. `conv_state` is as ShortConvInputs::state, of the
  // request's slot (Batch::state_slots).
  TensorView input;        // [>= num_tokens, conv_channels]; tokens may be any distance apart
  TensorView conv_weight;  // [conv_channels, conv_width]
  TensorView conv_bias;    // [conv_channels]; with RecurrentSpec::conv_bias alone
  TensorView conv_state;   // [slots, conv_state_rows, conv_channels], read and written
};

struct RecurrentOutputs {
  TensorView out;  // dtype [>= num_tokens, num_v_heads, head_dim_v], innermost stride 1
};

// update() reads Batch::query_start_loc, seq_lens, state_slots, source_slots and pad_slot, and where there are drafts num_drafts,
// accepted_drafts and draft_parents. No two requests with tokens have the same slot, but for padding. Other requests, threads and slots
// change no bit of a result. How a prompt is cut into steps changes none where the state is f32 and steps end at multiples of
// RecurrentPlan::step_tokens() of a request's tokens; elsewhere results agree as far as the types of the state allow.
class RecurrentPlan : public BasicPlan {
 public:
  // Allocates nothing. Errors recurrent.run.*
  virtual void run(const RecurrentInputs&, const RecurrentOutputs&, Stream = nullptr) const = 0;
  // 0: any cut of a prompt may change bits, as where long requests come in segments that are computed beside each other. Segments follow
  // from how many tokens a request has in a step; with PlanOptions::balanced from the step's other requests too.
  virtual int step_tokens() const { return 1; }
  // Whether prompts come in chunks of tokens by products whose factors are rounded to dtype: then results are as exact as such products
  // are, and not as float arithmetic is.
  virtual bool rounded_products() const { return false; }
};

struct RecurrentFamily {
  static constexpr std::string_view name = "recurrent";
  using Spec = RecurrentSpec;
  using Plan = RecurrentPlan;
};

}  // namespace imbrex
