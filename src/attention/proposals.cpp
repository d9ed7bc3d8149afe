// The nearest changes of a spec after which a real backend runs it. Used by select() for specs that nothing runs.
#include "attention/proposals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>

#include "attention/kv_codec.h"
#include "attention/spec_fields.h"
#include "imbrex/error.h"

namespace imbrex {
namespace {

// One edit of a spec. The distances only order the answers: below 10 the results stay the same up to rounding and the caller
// changes a layout or a dtype; from 10 on precision is lost; from 20 on the layer computes something else.
struct Change {
  int distance;
  int field;  // two changes of the same field do not combine
  std::string text;
  std::function<void(AttentionSpec&)> apply;
};

enum Field { kKvDtype, kQDtype, kKvFormat, kBlockSize, kHeadDim, kScore, kVisible };

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

// Adds a change for each feature that the layer has: it sets all fields of that feature to their defaults.
void add_feature_changes(const AttentionSpec& spec, std::vector<Change>& changes) {
  const AttentionSpec usual;
  for_each_field(spec, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    const std::string text = fmt::format("without {} (changes the result)", field.feature);
    const bool listed = std::any_of(changes.begin(), changes.end(), [&](const Change& change) { return change.text == text; });
    if (field.feature.empty() || value == default_value || listed) return;
    changes.push_back({20, field.part == SpecPart::score ? kScore : kVisible, text, [feature = field.feature](AttentionSpec& changed) {
                         const AttentionSpec without;
                         for_each_field(changed, without, [&](const SpecField& f, auto& to, const auto& from) {
                           if (f.feature == feature) to = from;
                         });
                       }});
  });
}

bool valid(const AttentionSpec& spec) {
  try {
    spec.validate();
  } catch (const Error&) {
    return false;
  }
  return true;
}

bool refuses_device(const Candidate& candidate) {
  return std::any_of(candidate.reasons.begin(), candidate.reasons.end(), [](const Reason& r) { return r.code.starts_with("device."); });
}

// A combination of one or two changes, by index.
struct Combination {
  int distance;
  std::array<int, 2> change;  // the second is -1 for a single change
};

}  // namespace

template <>
std::vector<std::string> propose<AttentionFamily>(const AttentionSpec& spec, const DeviceInfo& device,
                                                  std::span<const Candidate> candidates, const Backend& slow) {
  std::vector<const Backend*> backends;
  for (const Candidate& candidate : candidates) {
    if (candidate.backend != &slow && !refuses_device(candidate)) backends.push_back(candidate.backend);
  }
  if (backends.empty()) return {};

  std::vector<Change> changes;
  add_layout_changes(spec, changes);
  add_dtype_changes(spec, changes);
  add_padding_changes(spec, changes);
  add_feature_changes(spec, changes);
  const int count = int(changes.size());

  std::vector<std::string> answers;
  const auto try_all = [&](std::vector<Combination>& combinations) {
    std::stable_sort(combinations.begin(), combinations.end(),
                     [](const Combination& a, const Combination& b) { return a.distance < b.distance; });
    for (const Combination& c : combinations) {
      AttentionSpec changed = spec;
      std::string text;
      for (const int i : c.change) {
        if (i < 0) continue;
        changes[i].apply(changed);
        text += (text.empty() ? "" : " and ") + changes[i].text;
      }
      if (!valid(changed)) continue;
      std::vector<std::string_view> names;
      for (const Backend* backend : backends) {
        if (backend->unsupported(changed, device).empty()) names.push_back(backend->name());
      }
      if (!names.empty()) answers.push_back(fmt::format("{}: {}", text, fmt::join(names, ", ")));
      if (int(answers.size()) == kMaxProposals) return;
    }
  };

  std::vector<Combination> singles, pairs;
  for (int i = 0; i < count; ++i) {
    singles.push_back({changes[i].distance, {i, -1}});
    for (int j = i + 1; j < count; ++j) {
      const bool same_value = changes[i].field == changes[j].field && changes[i].field != kScore && changes[i].field != kVisible;
      if (!same_value) pairs.push_back({changes[i].distance + changes[j].distance, {i, j}});
    }
  }
  try_all(singles);
  if (answers.empty()) try_all(pairs);
  return answers;
}

}  // namespace imbrex
