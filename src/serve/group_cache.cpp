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

StateAllocation make_states(std::span<const StateAllocation::Part> parts, int num_layers, int num_slots, const DeviceStream& stream,
                            const ParallelFor& threads) {
  StateAllocation cache(parts, num_layers, num_slots, stream);
  for (size_t part = 0; !stream.asynchronous() && part < cache.num_parts(); ++part)
    touch_pages(cache.all(part).data, cache.all(part).num_elements() * size_of(cache.all(part).dtype), threads);
  return cache;
}

}  // namespace

StateAllocation::StateAllocation(std::span<const Part> parts, int num_layers, int num_slots, const DeviceStream& stream) {
  for (const Part& part : parts) memory_.push_back(stream.tensor(part.dtype, {num_layers, num_slots, part.slot_elements}));
}

int64_t StateAllocation::bytes() const {
  int64_t sum = 0;
  for (const DeviceTensor& part : memory_) sum += part.view.num_elements() * size_of(part.view.dtype);
  return sum;
}

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
  const StateAllocation::Part part{spec.dtype, spec.state_bytes() / size_of(spec.dtype)};
  return make_states({&part, 1}, num_layers, num_slots, stream, threads);
}

GroupCache make_cache(const MlaSpec& spec, int num_layers, int num_blocks, const DeviceStream& stream, const ParallelFor& threads) {
  return make_cache(spec.latent_spec(), num_layers, num_blocks, stream, threads);
}

GroupCache make_cache(const RecurrentSpec& spec, int num_layers, int num_slots, const DeviceStream& stream, const ParallelFor& threads) {
  std::vector<StateAllocation::Part> parts{{spec.state_dtype, spec.state_bytes() / size_of(spec.state_dtype)}};
  if (spec.conv != RecurrentConv::none) parts.push_back({spec.dtype, spec.conv_state_rows() * spec.conv_channels()});
  return make_states(parts, num_layers, num_slots, stream, threads);
}

}  // namespace imbrex::serve
