#pragma once
// New keys and values into a paged cache on a device: what Plan::write_kv of a CUDA backend launches.
#include <memory>
#include <string_view>

#include "cuda/module.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

// The kernel for a spec with blocks; one for its q_dtype and kv_dtype, head dimensions and block_size.
KernelKey write_kv_key(std::string_view arch, const AttentionSpec&);

class WriteKv {
 public:
  WriteKv(const std::shared_ptr<const Context>&, std::string_view arch, const AttentionSpec&);

  // k [>= num_tokens, num_kv_heads, head_dim_qk] and v in q_dtype (converted) or kv_dtype (copied), slots i64 [>= num_tokens] with -1
  // for tokens that are not written; all on the device, like the cache. Values are divided by the scale of an fp8 cache.
  // In the stream's order; the list of slots is read by the device, so a captured graph takes new ones from the same place.
  // The context must be current. Errors write_kv.*, kv_cache.*; slots are not checked here.
  void run(const KvCache&, const TensorView& k, const TensorView& v, const TensorView& slots, int num_tokens, CUstream) const;

 private:
  AttentionSpec spec_;
  Device device_;
  std::shared_ptr<const Module> module_;
  Kernel convert_, convert_strided_, copy_, copy_strided_;
};

}  // namespace imbrex::cuda
