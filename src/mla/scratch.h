#pragma once
// The memory that a plan of MLA computes in: its size depends on the spec, the limits of a step's tokens and the keys of a chunk, but not
// on how long requests are.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "imbrex/mla.h"

namespace imbrex {

// Views of one piece of memory. Those of the two ways lie in the same place, since one computes after the other.
class MlaScratch {
 public:
  MlaScratch(const MlaScratch&) = delete;
  MlaScratch(const MlaSpec& spec, int64_t tokens, int64_t keys, DType latent_type, DType output_type) {
    const int64_t heads = spec.num_heads;
    if (!spec.absorbed) {
      take(latent_q, spec.dtype, tokens, heads, spec.latent_dim());
      take(latent_out, output_type, tokens, heads, spec.kv_lora_rank);
      take(latent_lse, DType::f32, tokens, heads, 0);
      int64_t most = bytes_;
      bytes_ = 0;
      take(latents, latent_type, keys, 1, spec.kv_lora_rank);
      take(k, spec.dtype, keys, heads, spec.qk_dim());
      take(v, spec.dtype, keys, heads, spec.v_dim);
      take(q, spec.dtype, tokens, heads, spec.qk_dim());
      for (TensorView* out : {&part_out, &sum_out}) take(*out, DType::f32, tokens, heads, spec.v_dim);
      for (TensorView* lse : {&part_lse, &sum_lse}) take(*lse, DType::f32, tokens, heads, 0);
      bytes_ = std::max(bytes_, most);
    }
    memory_ = std::make_unique_for_overwrite<std::byte[]>(size_t(bytes_));
    for (const auto& [view, begin] : places_) view->data = memory_.get() + begin;
  }

  int64_t bytes() const { return bytes_; }

  TensorView latent_q, latent_out, latent_lse;  // rows are tokens of the requests in latent space
  TensorView latents, k, v;                     // rows are keys of a round
  TensorView q, part_out, part_lse;             // rows are those of a round
  TensorView sum_out, sum_lse;                  // rows are tokens of the batch: the pieces of a request so far

 private:
  // Gives a tensor of that many rows its place; dim 0: without that dimension.
  void take(TensorView& t, DType dtype, int64_t rows, int64_t heads, int64_t dim) {
    t = dim > 0 ? TensorView::contiguous(nullptr, dtype, {rows, heads, dim}) : TensorView::contiguous(nullptr, dtype, {rows, heads});
    places_.emplace_back(&t, bytes_);
    const int64_t size = checked_mul("mla.scratch", checked_mul("mla.scratch", rows, heads), std::max<int64_t>(dim, 1) * size_of(dtype));
    check(!__builtin_add_overflow(bytes_, size / 64 * 64 + 64, &bytes_), "mla.scratch", "{} and {} bytes do not fit 63 bits", bytes_, size);
  }

  int64_t bytes_ = 0;
  std::vector<std::pair<TensorView*, int64_t>> places_;  // of the views, in the memory
  std::unique_ptr<std::byte[]> memory_;                  // pages that are never touched cost nothing
};

}  // namespace imbrex
