#pragma once
// Softmax attention over plain keys and values: the family of layers that an AttentionSpec describes.
#include "imbrex/family.h"
#include "imbrex/kv_cache.h"
#include "imbrex/spec.h"

namespace imbrex {

struct AttentionInputs {
  TensorView q;              // [>= num_tokens, num_q_heads, head_dim_qk], spec.q_dtype, innermost stride 1
  TensorView q_scale;        // f32 [1] or [num_kv_heads], host or device; an fp8 element e of q stands for e * scale. Empty: 1
  KvCache kv;                // this layer's pages
  TensorView sinks;          // f32 [num_q_heads]; only with ScoreMod::sinks
  TensorView alibi_slopes;   // f32 [num_q_heads]; only with ScoreMod::alibi
  TensorView head_scales;    // f32 [num_q_heads]; only with ScoreMod::head_scales
  TensorView relative_bias;  // f32 [relative_buckets, num_q_heads]; only with ScoreMod::relative_buckets
  std::span<const NamedTensor> score_tensors;  // those that AttentionSpec::score_mod reads, by name; others may be among them
};

struct AttentionOutputs {
  TensorView out;  // [>= num_tokens, num_q_heads, head_dim_v], one of spec.out_dtypes(), innermost stride 1
  TensorView lse;  // optional f32 [>= num_tokens, num_q_heads], natural log of the denominator (sink included); -inf and out 0 for
                   // a query that sees no key
};

class AttentionPlan : public BasicPlan {
 public:
  // Writes this step's k [num_tokens, num_kv_heads, head_dim_qk] and v (kv_dtype or one of new_kv_dtypes()) to the slots of slot_mapping.
  virtual void write_kv(const KvCache&, const TensorView& k, const TensorView& v, Stream = nullptr) const = 0;
  // Computes attention of the step's queries. Allocates nothing, compiles nothing.
  virtual void run(const AttentionInputs&, const AttentionOutputs&, Stream = nullptr) const = 0;
};

struct AttentionFamily {
  static constexpr std::string_view name = "attention";
  using Spec = AttentionSpec;
  using Plan = AttentionPlan;
};

}  // namespace imbrex
