// See cache_rows.h.
#include "mla/cache_rows.h"

#include <array>
#include <cstring>

#include "core/float_types.h"
#include "core/run_parallel.h"

namespace imbrex {
namespace {

constexpr int kSerialTokens = 32;  // below this, waking other threads costs more than the copy

// Whether the numbers of a record lie side by side in k, and new ones are copied there bit by bit.
bool copies_rows(const AttentionSpec& spec, const KvCache& cache, DType dtype) {
  return codec_of(spec).strided && cache.v.empty() && dtype == spec.kv_dtype && cache.k.stride(cache.k.rank - 1) == 1;
}

}  // namespace

void write_latents(const AttentionSpec& spec, const KvCache& cache, const TensorView& latent, const TensorView& rope,
                   const TensorView& slot_mapping, int num_tokens, const ParallelFor& threads) {
  const KvCodec& codec = codec_of(spec);
  const int64_t size = size_of(latent.dtype), rank = spec.head_dim_v, with_position = spec.head_dim_qk - rank;
  const bool copies = copies_rows(spec, cache, latent.dtype);
  const auto write = [&](int64_t t) {
    const int64_t slot = slot_mapping.as<const int64_t>()[t * slot_mapping.stride(0)];
    if (slot == -1) return;
    const KvPlace place{.block = slot / spec.block_size, .offset = slot % spec.block_size, .head = 0};
    std::array<std::byte, AttentionSpec::kMaxHeadDim * sizeof(float)> joined;
    std::byte* const to =
        copies ? cache.k.as<std::byte>() + (place.block * cache.k.stride(0) + place.offset * cache.k.stride(1)) * size : joined.data();
    std::memcpy(to, latent.as<const std::byte>() + t * latent.stride(0) * size, size_t(rank * size));
    if (with_position > 0)
      std::memcpy(to + rank * size, rope.as<const std::byte>() + t * rope.stride(0) * size, size_t(with_position * size));
    if (!copies) codec.encode(spec, cache, KvPart::k, place, {.data = joined.data(), .dtype = latent.dtype});
  };
  const int workers = num_tokens < kSerialTokens ? 1 : threads.num_workers;
  const auto work = [&](int worker) {
    for (int64_t t = int64_t(num_tokens) * worker / workers; t < int64_t(num_tokens) * (worker + 1) / workers; ++t) write(t);
  };
  workers == 1 ? work(0) : run_parallel(threads, work);
}

}  // namespace imbrex
