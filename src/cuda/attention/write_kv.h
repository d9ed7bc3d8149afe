#pragma once
// New keys and values into a paged cache on a device: what AttentionPlan::write_kv of a CUDA backend launches.
#include <memory>
#include <string_view>
#include <vector>

#include "attention/plan_checks.h"
#include "cuda/driver/module.h"
#include "cuda/params.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

// The kernel for a spec with blocks; one for the type that new keys come in and kv_dtype, head dimensions and block_size. Records have a
// text of their own, write_ds_mla.cu.
KernelKey write_kv_key(std::string_view arch, const AttentionSpec&, DType from);
// Of a spec of latents whose rows and rope parts come in two tensors.
KernelKey write_latents_key(std::string_view arch, const AttentionSpec&, DType from);

// The new tokens of a step.
struct NewTokens {
  TensorView slots;  // i64 [>= num_tokens] on the device; -1: not written
  int num_tokens = 0;
  BatchReach reach;          // of the slots, where somebody has looked at them
  int captured_tokens = 0;   // > 0: the launch goes into a graph, or the device knows how many: it serves so many at most,
  const int* now = nullptr;  // as many as it finds here on the device when it runs
};

class WriteKv {
 public:
  // in_parts: for run_latents() instead of run().
  WriteKv(const std::shared_ptr<const Context>&, std::string_view arch, const AttentionSpec&, bool in_parts = false);

  // k [>= num_tokens, num_kv_heads, head_dim_qk] and v (none where values are a part of the keys) in one of new_kv_dtypes() (converted) or
  // kv_dtype (copied), on the device, like the cache. Values are divided by the scale of an fp8 cache. In the stream's order. The context
  // must be current. Errors write_kv.*, kv_cache.*.
  void run(const KvCache&, const TensorView& k, const TensorView& v, const NewTokens&, CUstream) const;
  // latent [>= num_tokens, head_dim_v] and rope [>= num_tokens, head_dim_qk - head_dim_v], or empty where there is none, of one type. The
  // caller has checked them and the cache. Error write_kv.slot_mapping.
  void run_latents(const KvCache&, const TensorView& latent, const TensorView& rope, const NewTokens&, CUstream) const;

 private:
  void launch(WriteKvParams, bool wide, DType type, int64_t room, const NewTokens&, CUstream) const;
  AttentionSpec spec_;
  Device device_;
  struct From {
    DType type;
    std::shared_ptr<const Module> module;
    Kernel convert, convert_strided;
  };
  std::vector<From> from_;
  Kernel copy_, copy_strided_;  // of the first module; records are never copied
};

}  // namespace imbrex::cuda
