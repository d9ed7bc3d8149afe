// See scratch.h.
#include "cuda/mla/scratch.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/mla/head_products.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kUnit = 256;  // bytes that a tensor's place is a multiple of

class Places {
 public:
  explicit Places(int64_t begin) : bytes_(begin) {}
  // The place of a tensor of so many rows of heads.
  int64_t take(int64_t rows, int64_t heads, int64_t head_bytes) {
    const int64_t begin = bytes_;
    const int64_t size = checked_mul("mla.scratch", checked_mul("mla.scratch", rows, heads), head_bytes);
    check(!__builtin_add_overflow(bytes_, (size / kUnit + 1) * kUnit, &bytes_), "mla.scratch", "{} and {} bytes do not fit 63 bits", begin,
          size);
    return begin;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
};

}  // namespace

MlaDeviceScratch mla_scratch(const MlaSpec& spec, int64_t tokens, int64_t keys, bool may_expand) {
  MlaDeviceScratch s;
  if (spec.absorbed) return s;
  constexpr int64_t kFloat = sizeof(float);
  const int64_t heads = spec.num_heads, size = size_of(spec.dtype);
  Places latent(kProductWorkspaceBytes);
  // Outputs are made when queries are done with; queries' first parts are multiplied before there are outputs in latent space.
  s.latent_q = s.out = latent.take(tokens, heads, std::max(spec.latent_dim() * size, spec.v_dim * kFloat));
  s.latent_out = s.nope = latent.take(tokens, heads, std::max(spec.kv_lora_rank, spec.qk_nope_dim) * size);
  s.latent_lse = latent.take(tokens, heads, kFloat);
  s.bytes = latent.bytes();
  if (!may_expand) return s;
  Places expanded(kProductWorkspaceBytes);
  s.latents = expanded.take(keys, 1, spec.kv_lora_rank * size);
  s.k = expanded.take(keys, heads, spec.qk_dim() * size);
  s.v = expanded.take(keys, heads, spec.v_dim * size);
  s.q = expanded.take(tokens, heads, spec.qk_dim() * size);
  for (int64_t* out : {&s.part_out, &s.sum_out}) *out = expanded.take(tokens, heads, spec.v_dim * kFloat);
  for (int64_t* lse : {&s.part_lse, &s.sum_lse}) *lse = expanded.take(tokens, heads, kFloat);
  s.bytes = std::max(s.bytes, expanded.bytes());
  return s;
}

}  // namespace imbrex::cuda
