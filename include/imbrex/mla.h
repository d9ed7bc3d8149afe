#pragma once
// Multi-head latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, LongCat), a family whose cache has one latent vector for each
// token instead of keys and values of every head: kv_lora_rank elements c, and qk_rope_dim elements r with a position. With the weight W of
// kv_b_proj, of which W_UK(h) are the first qk_nope_dim rows of head h and W_UV(h) the v_dim rows behind them,
//   key(h, j) = [W_UK(h) c(j), r(j)],  value(h, j) = W_UV(h) c(j),  out(t, h) = softmax over j of (scale * q(t, h) . key(h, j)) value(h,
//   j).
// A plan computes that in one of two ways, which differ in rounding alone. In latent space (few queries): q W_UK attends to the latents as
// one kv head, and W_UV is applied to what comes out. Expanded (many queries): keys and values of all heads are made from the latents, in
// chunks, and the partial results of the chunks are merged.
#include <cstdint>
#include <string>

#include "imbrex/attention.h"

namespace imbrex {

struct MlaSpec {
  int num_heads = 0;                      // query heads; under tensor parallelism those of the rank
  int kv_lora_rank = 512;                 // dimensions are multiples of 8; this one and qk_rope_dim together at most 576
  int qk_nope_dim = 128;                  // of a query and key, without a position
  int qk_rope_dim = 64;                   // with a position; 0: no part of a key has one (NoPE)
  int v_dim = 128;                        // of a head's value
  DType dtype = DType::bf16;              // of queries, weights and outputs: f32, bf16 or f16
  DType kv_dtype = DType::bf16;           // f32, bf16, f16, fp8_e4m3, fp8_e5m2
  KvFormat kv_format = KvFormat::latent;  // a format whose values are a part of its keys
  int block_size = 16;                    // tokens in a block (page)
  Mask mask;
  float scale = 0.f;      // multiplies q.k; 0 means 1 / sqrt(qk_nope_dim + qk_rope_dim)
  bool sinks = false;     // MlaInputs::sinks[head] is one more logit, with value 0
  bool absorbed = false;  // the caller applies both parts of kv_b_proj: queries and outputs are in latent space

  int qk_dim() const { return qk_nope_dim + qk_rope_dim; }
  int latent_dim() const { return kv_lora_rank + qk_rope_dim; }
  int q_dim() const { return absorbed ? latent_dim() : qk_dim(); }  // of a row of MlaInputs::q
  int out_dim() const { return absorbed ? kv_lora_rank : v_dim; }   // of a row of MlaOutputs::out
  float logit_scale() const;                                        // scale, or 1 / sqrt(qk_dim()) where that is 0
  // Attention in latent space: num_heads q heads share one kv head, whose values are the first kv_lora_rank elements of its keys.
  AttentionSpec latent_spec() const;
  // Attention to expanded keys and values: num_heads kv heads, in no blocks.
  AttentionSpec expanded_spec() const;
  int64_t kv_bytes_per_token() const { return latent_spec().kv_bytes_per_token(); }
  void validate() const;    // Error mla.*, and spec.* of latent_spec() and expanded_spec()
  std::string str() const;  // "mla q128 latent512 nope128 rope64 v128 bf16 block16 causal"
  friend bool operator==(const MlaSpec&, const MlaSpec&) = default;
};

struct MlaInputs {
  TensorView q;     // dtype [>= num_tokens, num_heads, q_dim()], innermost stride 1: the part without a position, then the rotated one
  TensorView kv_b;  // dtype [num_heads, qk_nope_dim + v_dim, kv_lora_rank], innermost stride 1: the weight of kv_b_proj as checkpoints have
                    // it, W_UK over W_UV in each head. Empty where the spec is `absorbed`
  KvCache kv;       // this layer's pages, as of latent_spec(). All keys are read from it, those of this step too: write_kv() comes first
  TensorView sinks;  // f32 [num_heads]; only with MlaSpec::sinks
};

struct MlaOutputs {
  TensorView out;  // dtype or f32 [>= num_tokens, num_heads, out_dim()], innermost stride 1
  TensorView lse;  // optional f32 [>= num_tokens, num_heads], as of AttentionOutputs
};

// update() reads what attention reads (batch.h). Which of the two ways computes a request, and how its keys are cut into chunks, depends on
// that request alone, so that other requests, their order and threads change no bit of a result. How a prompt is cut into steps may change
// rounding. update_on_device() is for plans on GPUs whose limits keep every request in latent space, as those of decode do.
class MlaPlan : public BasicPlan {
 public:
  // Writes this step's latents [num_tokens, kv_lora_rank] and the rotated parts of their keys [num_tokens, qk_rope_dim] (both kv_dtype or
  // dtype) to the slots of slot_mapping. `rope` is empty where qk_rope_dim is 0. Errors mla.write_kv.*, write_kv.*, kv_cache.*
  virtual void write_kv(const KvCache&, const TensorView& latent, const TensorView& rope, Stream = nullptr) const = 0;
  // Allocates nothing. Errors mla.run.*, run.*, kv_cache.*
  virtual void run(const MlaInputs&, const MlaOutputs&, Stream = nullptr) const = 0;
  // Whether the step's request is computed with expanded keys. A plan that has one way alone says no, and so does a step whose lengths are
  // on the device.
  virtual bool expands(int /*request*/) const { return false; }
};

struct MlaFamily {
  static constexpr std::string_view name = "mla";
  using Spec = MlaSpec;
  using Plan = MlaPlan;
};

}  // namespace imbrex
