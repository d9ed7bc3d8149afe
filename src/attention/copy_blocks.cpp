// copy_blocks(): whole blocks of a paged KV cache from one place to another, in as few and as long pieces as the layout allows.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "attention/block_shape.h"
#include "attention/device_operations.h"
#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/run_parallel.h"
#include "core/tensor_format.h"
#include "imbrex/kv_cache.h"

namespace imbrex {

namespace {

constexpr int64_t kSerialBytes = 64 << 10;  // below this, waking other threads costs more than the copy

}  // namespace

BlockShape block_shape(const TensorView& t) {
  struct Dim {
    int64_t size, stride;
  };
  std::array<Dim, 3> dims{};
  int count = 0;
  const int64_t element = size_of(t.dtype);
  for (int d = 1; d < t.rank; ++d) {
    if (t.size(d) == 1) continue;
    int at = count++;
    for (; at > 0 && dims[at - 1].stride > t.stride(d) * element; --at) dims[at] = dims[at - 1];
    dims[at] = {t.size(d), t.stride(d) * element};  // smallest stride first
  }
  BlockShape shape{.base = t.as<char>(), .block_stride = t.stride(0) * element, .piece = element};
  int loops = 0;
  for (int d = 0; d < count; ++d) {
    if (loops == 0 && dims[d].stride == shape.piece) {
      shape.piece *= dims[d].size;
    } else if (loops > 0 && dims[d].stride == shape.strides[loops - 1] * shape.sizes[loops - 1]) {
      shape.sizes[loops - 1] *= dims[d].size;
    } else {
      shape.sizes[loops] = dims[d].size;
      shape.strides[loops++] = dims[d].stride;
    }
  }
  return shape;
}

std::vector<BlockShape> stored_shapes(const AttentionSpec& spec, const KvCache& cache) {
  std::vector<BlockShape> shapes;
  for (const KvPart part : kKvParts)
    if (codec_of(spec).layout(spec, part)) shapes.push_back(block_shape(part_of(cache, part)));
  return shapes;
}

namespace {

// By copy_piece(to, from, bytes).
template <class CopyPiece>
void copy_block(const BlockShape& shape, BlockCopy copy, const CopyPiece& copy_piece) {
  const char* const from = shape.base + copy.from * shape.block_stride;
  char* const to = shape.base + copy.to * shape.block_stride;
  for (int64_t outer = 0; outer < shape.sizes[2]; ++outer)
    for (int64_t middle = 0; middle < shape.sizes[1]; ++middle)
      for (int64_t inner = 0; inner < shape.sizes[0]; ++inner) {
        const int64_t at = outer * shape.strides[2] + middle * shape.strides[1] + inner * shape.strides[0];
        copy_piece(to + at, from + at, shape.piece);
      }
}

void copy_here(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }

}  // namespace

void check_copies(std::span<const BlockCopy> copies, int64_t num_blocks) {
  std::vector<int32_t> destinations;
  destinations.reserve(copies.size());
  for (const BlockCopy& c : copies) {
    check(c.from >= 0 && c.from < num_blocks, "kv_cache.copy.from", "expected a source from 0 to {}, got {}", num_blocks - 1, c.from);
    check(c.to >= 0 && c.to < num_blocks, "kv_cache.copy.to", "expected a destination from 0 to {}, got {}", num_blocks - 1, c.to);
    destinations.push_back(c.to);
  }
  std::sort(destinations.begin(), destinations.end());
  const auto twice = std::adjacent_find(destinations.begin(), destinations.end());
  check(twice == destinations.end(), "kv_cache.copy.twice", "block {} is the destination of more than one copy",
        twice == destinations.end() ? -1 : *twice);
  for (const BlockCopy& c : copies)
    check(!std::binary_search(destinations.begin(), destinations.end(), c.from), "kv_cache.copy.chained",
          "block {} is the source of one copy and the destination of another", c.from);
}

namespace {

void check_request(const AttentionSpec& spec, const KvCache& cache, std::span<const BlockCopy> copies, const Device& device) {
  check(spec.block_size > 0, "kv_cache.copy.ragged", "a spec without blocks (block_size 0) has none to copy");
  cache.validate(spec);
  check(cache.k.device == device, "kv_cache.copy.device", "expected a cache on {}, got {}", device, cache.k);
  check_copies(copies, cache.num_blocks(spec));
}

}  // namespace

void copy_blocks(const AttentionSpec& spec, const KvCache& cache, std::span<const BlockCopy> copies, const ParallelFor& threads) {
  check_request(spec, cache, copies, {});
  const std::vector<BlockShape> shapes = stored_shapes(spec, cache);
  std::atomic<size_t> next{0};
  // All of a block is one task: v may be a part of k, and two threads may not write the same bytes.
  const auto work = [&](int) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < copies.size();) {
      for (const BlockShape& shape : shapes) copy_block(shape, copies[i], copy_here);
    }
  };
  int64_t bytes = 0;
  for (const BlockShape& shape : shapes) bytes += int64_t(copies.size()) * shape.bytes();
  run_parallel(bytes < kSerialBytes ? ParallelFor{} : threads, work);
}

namespace {

class HostCopier final : public BlockCopier {
 public:
  explicit HostCopier(const ParallelFor& threads) : threads_(threads) {}
  void copy(const AttentionSpec& spec, const KvCache& cache, std::span<const BlockCopy> copies, Stream) const override {
    copy_blocks(spec, cache, copies, threads_);
  }

 private:
  ParallelFor threads_;
};

// On a device that brings no kernel for it: a copy for each piece.
class PieceCopier final : public BlockCopier {
 public:
  explicit PieceCopier(OpenDevicePtr device) : device_(std::move(device)) {}
  void copy(const AttentionSpec& spec, const KvCache& cache, std::span<const BlockCopy> copies, Stream stream) const override {
    check_request(spec, cache, copies, device_->device());
    const auto copy_there = [&](void* to, const void* from, int64_t bytes) { device_->copy(to, from, bytes, stream); };
    for (const BlockShape& shape : stored_shapes(spec, cache))
      for (const BlockCopy& one : copies) copy_block(shape, one, copy_there);
  }

 private:
  OpenDevicePtr device_;
};

}  // namespace

std::unique_ptr<BlockCopier> make_block_copier(const DeviceInfo& device, const ParallelFor& threads) {
  check(device.present, "backend.device_absent", "expected a device of this machine, got {}", device.str());
  if (device.device.type == DeviceType::cpu) return std::make_unique<HostCopier>(threads);
  std::unique_ptr<BlockCopier> copier;
  if (const std::shared_ptr<const DeviceOperations> operations = operations_of(device.device)) copier = operations->block_copier(device);
  return copier != nullptr ? std::move(copier) : std::make_unique<PieceCopier>(open_device(device));
}

}  // namespace imbrex
