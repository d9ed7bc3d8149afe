// See expand.h.
#include "mla/expand.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/kv_codec.h"
#include "core/float_types.h"
#include "core/run_parallel.h"
#include "mla/cache_rows.h"

namespace imbrex {
namespace {

// body(i) for i in [0, count), in as many neighbouring parts as there are threads.
template <class Body>
void over_rows(const ParallelFor& threads, int64_t count, const Body& body) {
  const int64_t workers = std::max(threads.num_workers, 1);
  run_parallel(threads, [&](int worker) {
    for (int64_t i = count * worker / workers; i < count * (worker + 1) / workers; ++i) body(i);
  });
}

std::byte* row_at(const TensorView& t, int64_t row, int64_t head) {
  return t.as<std::byte>() + (row * t.stride(0) + head * t.stride(1)) * size_of(t.dtype);
}

}  // namespace

void read_latents(const MlaSpec& spec, const KvCache& cache, const KeySource& keys, const MlaRound& round, const TensorView& latents,
                  const TensorView& k, const ParallelFor& threads) {
  const AttentionSpec attention = spec.latent_spec();
  const KvCodec& codec = codec_of(attention);
  const int64_t rank = spec.kv_lora_rank, rope = spec.qk_rope_dim, size = size_of(spec.dtype);
  const bool copies = codec.strided && latents.dtype == spec.kv_dtype && spec.dtype == spec.kv_dtype &&
                      cache.k.stride(cache.k.rank - 1) == 1 && cache.v.empty();
  over_rows(threads, round.num_keys(), [&](int64_t row) {
    const size_t i = size_t(std::upper_bound(round.key_start.begin(), round.key_start.end(), row) - round.key_start.begin()) - 1;
    const MlaPiece& piece = round.pieces[i];
    const KvPlace place = place_of(keys, attention, piece.request, piece.key_begin + row - round.key_start[i]);
    std::byte* const first = row_at(k, row, 0) + spec.qk_nope_dim * size;  // where the first head has its rotated part
    if (copies) {
      const std::byte* const record =
          cache.k.as<const std::byte>() + (place.block * cache.k.stride(0) + place.offset * cache.k.stride(1)) * size;
      std::memcpy(row_at(latents, row, 0), record, size_t(rank * size));
      std::memcpy(first, record + rank * size, size_t(rope * size));
    } else {
      std::array<double, AttentionSpec::kMaxHeadDim> record;
      codec.decode(attention, cache, KvPart::k, place, record.data());
      for (int64_t d = 0; d < rank; ++d) store_from_double(row_at(latents, row, 0), latents.dtype, d, record[size_t(d)]);
      for (int64_t d = 0; d < rope; ++d) store_from_double(first, spec.dtype, d, record[size_t(rank + d)]);
    }
    for (int64_t h = 1; rope > 0 && h < spec.num_heads; ++h)
      std::memcpy(row_at(k, row, h) + spec.qk_nope_dim * size, first, size_t(rope * size));
  });
}

void copy_rows(const TensorView& from, const TensorView& to, const ParallelFor& threads) {
  const size_t bytes = size_t(to.size(2) * size_of(to.dtype));
  if (bytes == 0) return;
  const auto copy = [&](int64_t row) {
    for (int64_t h = 0; h < to.size(1); ++h) std::memcpy(row_at(to, row, h), row_at(from, row, h), bytes);
  };
  over_rows(to.size(0) == 1 ? ParallelFor{} : threads, to.size(0), copy);
}

void finish(const PartialResult& result, const TensorView& sinks, const TensorView& out, const TensorView& lse,
            const ParallelFor& threads) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  over_rows(threads, out.size(0), [&](int64_t row) {
    for (int64_t h = 0; h < out.size(1); ++h) {
      float joint = result.lse.as<const float>()[row * result.lse.stride(0) + h * result.lse.stride(1)], share = 1;
      if (!sinks.empty() && joint != kEmpty) {
        const float sink = sinks.as<const float>()[h * sinks.stride(0)], highest = std::max(sink, joint);
        const float with_sink = highest + std::log(std::exp(sink - highest) + std::exp(joint - highest));
        share = std::exp(joint - with_sink);
        joint = with_sink;
      }
      const auto* const from = reinterpret_cast<const float*>(row_at(result.out, row, h));
      std::byte* const to = row_at(out, row, h);
      for (int64_t d = 0; d < out.size(2); ++d) store_from_float(to, out.dtype, d, share * from[d]);
      if (!lse.empty()) lse.as<float>()[row * lse.stride(0) + h * lse.stride(1)] = joint;
    }
  });
}

}  // namespace imbrex
