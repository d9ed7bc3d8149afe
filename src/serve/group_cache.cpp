// See group_cache.h.
#include "serve/group_cache.h"

#include "attention/kv_codec.h"
#include "core/run_parallel.h"

namespace imbrex::serve {

namespace {

void touch_pages(void* data, int64_t bytes, const ParallelFor& threads) {
  constexpr int64_t kPage = 4096;
  run_parallel(threads, [&](int worker) {
    const int64_t end = bytes * (worker + 1) / threads.num_workers;
    for (int64_t at = bytes * worker / threads.num_workers; at < end; at += kPage) static_cast<volatile char*>(data)[at] = 0;
  });
}

StateAllocation make_states(DType dtype, int num_layers, int num_slots, int64_t slot_bytes, const DeviceStream& stream,
                            const ParallelFor& threads) {
  StateAllocation cache(dtype, num_layers, num_slots, slot_bytes / size_of(dtype), stream);
  if (!stream.asynchronous()) touch_pages(cache.all().data, cache.bytes(), threads);
  return cache;
}

}  // namespace

StateAllocation::StateAllocation(DType dtype, int num_layers, int num_slots, int64_t slot_elements, const DeviceStream& stream)
    : memory_(stream.tensor(dtype, {num_layers, num_slots, slot_elements})) {}

int64_t bytes_of(const GroupCache& cache) {
  return std::visit([](const auto& allocation) { return allocation.bytes(); }, cache);
}

GroupCache make_cache(const AttentionSpec& spec, int num_layers, int num_blocks, const DeviceStream& stream, const ParallelFor& threads) {
  KvAllocation cache(spec, num_layers, num_blocks, "lbhtd", &stream);
  for (int layer = 0; !stream.asynchronous() && layer < num_layers; ++layer) {
    const KvCache views = cache.layer(layer);
    for (const KvPart part : kKvParts)  // within a layer the block is the outermost dimension
      if (const TensorView& t = part_of(views, part); !t.empty()) touch_pages(t.data, t.size(0) * t.stride(0) * size_of(t.dtype), threads);
  }
  return cache;
}

GroupCache make_cache(const ShortConvSpec& spec, int num_layers, int num_slots, const DeviceStream& stream, const ParallelFor& threads) {
  return make_states(spec.dtype, num_layers, num_slots, spec.state_bytes(), stream, threads);
}

GroupCache make_cache(const MlaSpec& spec, int num_layers, int num_blocks, const DeviceStream& stream, const ParallelFor& threads) {
  return make_cache(spec.latent_spec(), num_layers, num_blocks, stream, threads);
}

GroupCache make_cache(const RecurrentSpec& spec, int num_layers, int num_slots, const DeviceStream& stream, const ParallelFor& threads) {
  return make_states(spec.state_dtype, num_layers, num_slots, spec.state_bytes(), stream, threads);
}

}  // namespace imbrex::serve
