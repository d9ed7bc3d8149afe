#pragma once
// The functions of family.h, to be instantiated once for each family, which brings Registry::built_in() and propose().
#include "family/choose.h"
#include "family/registry.h"

namespace imbrex {

// Changes of a spec after which a backend other than `slow`, the family's reference, runs it. Each family defines it.
template <class Family>
std::vector<std::string> propose(const typename Family::Spec&, const DeviceInfo&, std::span<const CandidateOf<Family>>,
                                 const BackendOf<Family>& slow);

template <class Family>
std::vector<const BackendOf<Family>*> backends() {
  return Registry<Family>::all();
}
template <class Family>
const BackendOf<Family>* find_backend(std::string_view name) {
  return Registry<Family>::find(name);
}
template <class Family>
void register_backend(std::shared_ptr<const BackendOf<Family>> backend) {
  Registry<Family>::add(std::move(backend));
}
template <class Family>
void unregister_backend(std::string_view name) {
  Registry<Family>::remove(name);
}

template <class Family>
std::vector<Contender> contenders_of(std::span<const CandidateOf<Family>> candidates) {
  std::vector<Contender> contenders;
  for (const CandidateOf<Family>& candidate : candidates) contenders.push_back({candidate.backend, &candidate.reasons});
  return contenders;
}

template <class Family>
SelectionOf<Family> select(const typename Family::Spec& spec, const DeviceInfo& device, const SelectOptions& options) {
  SelectionOf<Family> selection;
  for (const BackendOf<Family>* backend : backends<Family>()) selection.candidates.push_back({backend, backend->unsupported(spec, device)});
  const BackendOf<Family>& slow = *Registry<Family>::built_in().back();
  Choice choice = choose(contenders_of<Family>(selection.candidates), slow, Family::name, options);
  selection.backend = static_cast<const BackendOf<Family>*>(choice.backend);
  selection.rule = std::move(choice.rule);
  if (!choice.only_slow) return selection;
  selection.proposals = propose<Family>(spec, device, selection.candidates, slow);
  if (device.device.type == DeviceType::cpu) return selection;
  static const DeviceInfo cpu = probe_cpu();
  std::string names;
  for (const CandidateOf<Family>& candidate : selection.candidates) {
    if (candidate.backend == &slow || !candidate.backend->unsupported(spec, cpu).empty()) continue;
    names += names.empty() ? "" : ", ";
    names += candidate.backend->name();
  }
  if (!names.empty()) selection.proposals.push_back("device cpu: " + names);
  return selection;
}

template <class Family>
std::string SelectionOf<Family>::str() const {
  return selection_table(backend, rule, contenders_of<Family>(candidates), proposals);
}

}  // namespace imbrex
