#pragma once
// Proposals of any family: the nearest changes of a spec after which a backend other than the reference runs it. select() asks for them
// when nothing else does.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "family/spec_fields.h"
#include "imbrex/error.h"
#include "imbrex/family.h"

namespace imbrex {

inline constexpr int kMaxProposals = 5;

// One change of a spec. The distances only order the answers: below 10 the results stay the same up to rounding and the caller changes a
// layout or a dtype; from 10 on precision is lost; from 20 on the layer computes something else.
template <class Spec>
struct SpecChange {
  static constexpr int kFeature = -1;
  int distance;
  int field;  // two changes of the same field do not combine; those of features do
  std::string text;
  std::function<void(Spec&)> apply;
};

// Adds a change for each feature that the layer has: it sets all fields of that feature to their defaults.
template <class Spec>
void add_feature_changes(const Spec& spec, std::vector<SpecChange<Spec>>& changes) {
  const Spec usual;
  for_each_field(spec, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    const std::string text = fmt::format("without {} (changes the result)", field.feature);
    const bool listed = std::any_of(changes.begin(), changes.end(), [&](const auto& change) { return change.text == text; });
    if (field.feature.empty() || value == default_value || listed) return;
    changes.push_back({20, SpecChange<Spec>::kFeature, text, [feature = field.feature](Spec& changed) {
                         const Spec without;
                         for_each_field(changed, without, [&](const SpecField& f, auto& to, const auto& from) {
                           if (f.feature == feature) to = from;
                         });
                       }});
  });
}

template <class Spec>
bool is_valid(const Spec& spec) {
  try {
    spec.validate();
  } catch (const Error&) {
    return false;
  }
  return true;
}

// "kv_dtype bf16: cpu_amx, cpu_avx512", nearest first, at most kMaxProposals: single changes, and pairs only where no single one helps.
// `slow` is no answer, and backends that refuse the device itself are not asked. Costs a few milliseconds at worst.
template <class Family>
std::vector<std::string> proposals_of(const typename Family::Spec& spec, const DeviceInfo& device,
                                      std::span<const CandidateOf<Family>> candidates, const BackendOf<Family>& slow,
                                      const std::vector<SpecChange<typename Family::Spec>>& changes) {
  std::vector<const BackendOf<Family>*> backends;
  for (const CandidateOf<Family>& candidate : candidates) {
    const bool refuses_device =
        std::any_of(candidate.reasons.begin(), candidate.reasons.end(), [](const Reason& r) { return r.code.starts_with("device."); });
    if (candidate.backend != &slow && !refuses_device) backends.push_back(candidate.backend);
  }
  if (backends.empty()) return {};

  struct Combination {  // of one or two changes, by index
    int distance;
    std::array<int, 2> change;  // the second is -1 for a single change
  };
  std::vector<std::string> answers;
  const auto try_all = [&](std::vector<Combination>& combinations) {
    std::stable_sort(combinations.begin(), combinations.end(),
                     [](const Combination& a, const Combination& b) { return a.distance < b.distance; });
    for (const Combination& c : combinations) {
      typename Family::Spec changed = spec;
      std::string text;
      for (const int i : c.change) {
        if (i < 0) continue;
        changes[i].apply(changed);
        text += (text.empty() ? "" : " and ") + changes[i].text;
      }
      if (!is_valid(changed)) continue;
      std::vector<std::string_view> names;
      for (const BackendOf<Family>* backend : backends) {
        if (backend->unsupported(changed, device).empty()) names.push_back(backend->name());
      }
      if (!names.empty()) answers.push_back(fmt::format("{}: {}", text, fmt::join(names, ", ")));
      if (int(answers.size()) == kMaxProposals) return;
    }
  };

  const int count = int(changes.size());
  std::vector<Combination> singles, pairs;
  for (int i = 0; i < count; ++i) {
    singles.push_back({changes[i].distance, {i, -1}});
    for (int j = i + 1; j < count; ++j) {
      const bool same_value = changes[i].field == changes[j].field && changes[i].field != SpecChange<typename Family::Spec>::kFeature;
      if (!same_value) pairs.push_back({changes[i].distance + changes[j].distance, {i, j}});
    }
  }
  try_all(singles);
  if (answers.empty()) try_all(pairs);
  return answers;
}

}  // namespace imbrex
