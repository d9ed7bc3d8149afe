// Merges partial attention results on the host, in float, in the order given; mergers of other devices are in their folders.
#include "imbrex/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/device_operations.h"
#include "attention/merge_checks.h"
#include "core/check.h"
#include "core/float_types.h"
#include "core/run_parallel.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"

namespace imbrex {

namespace {

bool is_result_dtype(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; }

void check_memory(const TensorView& t, const char* name, Device device) {
  check(t.device == device, "merge.device", "expected memory of {}, got {}", device, t);
  if (t.num_elements() == 0) return;  // strides of nothing mean nothing: NumPy gives 0
  for (int d = 0; d < t.rank; ++d)
    check(t.size(d) >= 0 && (t.size(d) <= 1 || t.stride(d) > 0), "merge.strides", "size {} and stride {} of dimension {} of {}", t.size(d),
          t.stride(d), d, t);
  check_layout(t, name);
}

void check_result(const TensorView& out, const TensorView& lse, const TensorView& like, Device device) {
  check(is_result_dtype(out.dtype), "merge.out.dtype", "expected f32, bf16 or f16, got {}", out);
  check(out.rank == 3, "merge.out.rank", "expected [num_tokens, num_heads, head_dim_v], got {}", out);
  check(lse.dtype == DType::f32, "merge.lse.dtype", "expected f32, got {}", lse);
  check(lse.rank == 2, "merge.lse.rank", "expected [num_tokens, num_heads], got {}", lse);
  check(out.sizes == like.sizes, "merge.out.shape", "expected the shape of {}, got {}", like, out);
  check(lse.size(0) == out.size(0) && lse.size(1) == out.size(1), "merge.lse.shape", "expected [{}, {}], got {}", out.size(0), out.size(1),
        lse);
  check(out.num_elements() == 0 || !out.empty(), "merge.out.missing", "expected memory for {}, got none", out);
  check(lse.num_elements() == 0 || !lse.empty(), "merge.lse.missing", "expected memory for {}, got none", lse);
  check_memory(out, "out", device);
  check_memory(lse, "lse", device);
}

template <class T, float (*kToFloat)(T)>
void add_row(const void* data, int64_t offset, int64_t stride, float weight, float* sum, int count) {
  const T* row = static_cast<const T*>(data) + offset;
  if (stride == 1) {
    for (int d = 0; d < count; ++d) sum[d] += weight * kToFloat(row[d]);
  } else {
    for (int d = 0; d < count; ++d) sum[d] += weight * kToFloat(row[d * stride]);
  }
}
float same(float x) { return x; }

void add_row(const TensorView& t, int64_t offset, float weight, float* sum, int count) {
  const int64_t stride = t.stride(2);
  if (t.dtype == DType::f32) return add_row<float, same>(t.data, offset, stride, weight, sum, count);
  if (t.dtype == DType::bf16) return add_row<uint16_t, bf16_to_float>(t.data, offset, stride, weight, sum, count);
  add_row<uint16_t, f16_to_float>(t.data, offset, stride, weight, sum, count);
}

// Weights of the parts for one row, from their log-sum-exps; returns the joint one. Infinity of either sign says that a part is empty. A
// NaN anywhere makes everything NaN.
float row_weights(std::span<const PartialResult> parts, int64_t token, int64_t head, float* weights) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  float highest = kEmpty;
  for (size_t i = 0; i < parts.size(); ++i) {
    const TensorView& lse = parts[i].lse;
    weights[i] = lse.as<const float>()[token * lse.stride(0) + head * lse.stride(1)];
    if (std::isinf(weights[i])) weights[i] = kEmpty;
    highest = std::max(highest, weights[i]);
  }
  float sum = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    weights[i] = weights[i] == kEmpty ? 0.f : std::exp(weights[i] - highest);
    sum += weights[i];
  }
  if (sum == 0) return kEmpty;
  for (size_t i = 0; i < parts.size(); ++i) weights[i] /= sum;
  return highest + std::log(sum);
}

// Every part is read before anything of the same elements is written, so that `out` and `lse` may be a part's.
void merge_row(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, int64_t token, int64_t head,
               float* weights) {
  constexpr int kChunk = 128;
  const float joint = row_weights(parts, token, head, weights);
  lse.as<float>()[token * lse.stride(0) + head * lse.stride(1)] = joint;
  for (int64_t begin = 0; begin < out.size(2); begin += kChunk) {
    const int count = int(std::min<int64_t>(kChunk, out.size(2) - begin));
    float sum[kChunk] = {};
    const auto offset = [&](const TensorView& t) { return token * t.stride(0) + head * t.stride(1) + begin * t.stride(2); };
    for (size_t i = 0; i < parts.size(); ++i)
      if (weights[i] != 0) add_row(parts[i].out, offset(parts[i].out), weights[i], sum, count);  // an empty part may hold anything
    for (int d = 0; d < count; ++d) store_from_float(out.data, out.dtype, offset(out) + d * out.stride(2), sum[d]);
  }
}

class HostMerger final : public PartialMerger {
 public:
  explicit HostMerger(const ParallelFor& threads) : threads_(threads) {}
  void merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Stream) const override {
    merge_partial_results(parts, out, lse, threads_);
  }

 private:
  ParallelFor threads_;
};

}  // namespace

void check_merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Device device) {
  check(!parts.empty(), "merge.parts.none", "expected 1 part or more, got none");
  check_result(out, lse, out, device);
  for (const PartialResult& part : parts) check_result(part.out, part.lse, out, device);
}

std::unique_ptr<PartialMerger> make_partial_merger(const DeviceInfo& device, const ParallelFor& threads) {
  check(device.present, "backend.device_absent", "expected a device of this machine, got {}", device.str());
  if (device.device.type == DeviceType::cpu) return std::make_unique<HostMerger>(threads);
  std::unique_ptr<PartialMerger> merger;
  if (const std::shared_ptr<const DeviceOperations> operations = operations_of(device.device)) merger = operations->partial_merger(device);
  check(merger != nullptr, "merge.missing", "expected a device that merges partial results, got {}, whose platform brings no merge",
        device.str());
  return merger;
}

void merge_partial_results(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, const ParallelFor& threads) {
  check_merge(parts, out, lse, {});
  const int64_t num_tokens = out.size(0), num_workers = std::max(1, threads.num_workers);
  run_parallel(threads, [&](int worker) {
    constexpr size_t kFew = 64;
    float few[kFew];
    std::vector<float> many(parts.size() > kFew ? parts.size() : 0);
    float* weights = many.empty() ? few : many.data();
    const int64_t end = num_tokens * (worker + 1) / num_workers;
    for (int64_t token = num_tokens * worker / num_workers; token < end; ++token)
      for (int64_t head = 0; head < out.size(1); ++head) merge_row(parts, out, lse, token, head, weights);
  });
}

}  // namespace imbrex
