// See proposals.h.
#include "attention/proposals.h"

#include <fmt/format.h>

#include <cstdlib>

#include "attention/kv_codec.h"
#include "attention/spec_fields.h"
#include "family/spec_changes.h"

namespace imbrex {
namespace {

using Change = SpecChange<AttentionSpec>;
enum Field { kKvDtype, kQDtype, kKvFormat, kBlockSize, kHeadDim };

int dtype_rank(DType t) {  // more precise first
  switch (t) {
    case DType::f32: return 0;
    case DType::bf16: return 1;
    case DType::f16: return 2;
    case DType::fp8_e4m3: return 3;
    case DType::fp8_e5m2: return 4;
    default: return 5;
  }
}

void add_dtype_changes(const AttentionSpec& spec, std::vector<Change>& changes) {
  for (const DType t : {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3, DType::fp8_e5m2}) {
    if (t != spec.kv_dtype) {
      const int steps = dtype_rank(t) - dtype_rank(spec.kv_dtype);
      const int distance = steps > 0 && size_of(t) < size_of(spec.kv_dtype) ? 10 + steps : 1 + std::abs(steps);
      changes.push_back({distance, kKvDtype, fmt::format("kv_dtype {}", to_string(t)), [t](AttentionSpec& s) { s.kv_dtype = t; }});
    }
    if (t != spec.q_dtype && !is_fp8(t)) {
      const int steps = dtype_rank(t) - dtype_rank(spec.q_dtype);
      const int distance = steps > 0 && size_of(t) < size_of(spec.q_dtype) ? 10 + steps : 2 + std::abs(steps);
      changes.push_back({distance, kQDtype, fmt::format("q_dtype {}", to_string(t)), [t](AttentionSpec& s) { s.q_dtype = t; }});
      if (spec.q_dtype == spec.kv_dtype) {  // both together are one decision of a deployment
        changes.push_back({distance + 1, kQDtype, fmt::format("q_dtype and kv_dtype {}", to_string(t)),
                           [t](AttentionSpec& s) { s.q_dtype = s.kv_dtype = t; }});
      }
    }
  }
}

void add_layout_changes(const AttentionSpec& spec, std::vector<Change>& changes) {
  for (const KvFormat f : kv_formats()) {
    if (f == spec.kv_format || spec.block_size == 0 || codec_of(f).values_in_keys) continue;  // values need not be a part of the keys
    changes.push_back({1, kKvFormat, fmt::format("kv_format {}", to_string(f)), [f](AttentionSpec& s) { s.kv_format = f; }});
  }
  if (spec.block_size == 0) return;
  int previous = spec.block_size;
  for (const int multiple : {16, 32, 64, 128, 256}) {
    const int size = (spec.block_size + multiple - 1) / multiple * multiple;
    if (size == previous) continue;
    previous = size;
    const int ratio = size / spec.block_size;
    changes.push_back(
        {1 + (ratio > 2) + (ratio > 8), kBlockSize, fmt::format("block_size {}", size), [size](AttentionSpec& s) { s.block_size = size; }});
  }
}

// Zero-padded heads give the same result as long as the scale stays that of the true head_dim.
void add_padding_changes(const AttentionSpec& spec, std::vector<Change>& changes) {
  int previous_qk = spec.head_dim_qk, previous_v = spec.head_dim_v;
  for (const int multiple : {16, 32, 64, 128}) {
    const auto up = [&](int d) { return (d + multiple - 1) / multiple * multiple; };
    const int qk = up(spec.head_dim_qk), v = up(spec.head_dim_v);
    if (qk > AttentionSpec::kMaxHeadDim || v > AttentionSpec::kMaxHeadDim || (qk == previous_qk && v == previous_v)) continue;
    previous_qk = qk;
    previous_v = v;
    const std::string text = qk == v ? fmt::format("head_dim {} (zero-padded, scale kept)", qk)
                                     : fmt::format("head_dim_qk {}, head_dim_v {} (zero-padded, scale kept)", qk, v);
    const int growth = (qk + v) * 4 / (spec.head_dim_qk + spec.head_dim_v);  // in quarters; 4 is no growth
    changes.push_back({growth, kHeadDim, text, [qk, v](AttentionSpec& s) {
                         s.score.scale = s.scale();
                         s.head_dim_qk = qk;
                         s.head_dim_v = v;
                       }});
  }
  if (spec.head_dim_v < spec.head_dim_qk) {
    const int d = spec.head_dim_qk;
    changes.push_back({5, kHeadDim, fmt::format("head_dim_v {} (zero-padded)", d), [d](AttentionSpec& s) { s.head_dim_v = d; }});
  }
}

}  // namespace

template <>
std::vector<std::string> propose<AttentionFamily>(const AttentionSpec& spec, const DeviceInfo& device,
                                                  std::span<const Candidate> candidates, const BackendOf<AttentionFamily>& slow) {
  std::vector<Change> changes;
  add_layout_changes(spec, changes);
  add_dtype_changes(spec, changes);
  add_padding_changes(spec, changes);
  add_feature_changes(spec, changes);
  return proposals_of<AttentionFamily>(spec, device, candidates, slow, changes);
}

}  // namespace imbrex
