// The family of the recurrent layers: its backends in order, and what the registry and select() make of them.
#include "family/select_of.h"
#include "family/spec_changes.h"
#include "imbrex/recurrent.h"
#include "recurrent/reference.h"
#include "recurrent/spec_fields.h"

namespace imbrex {

const BackendOf<RecurrentFamily>& cuda_sm80_recurrent();   // cuda/recurrent/recurrent_plan.cpp
const BackendOf<RecurrentFamily>& cpu_avx512_recurrent();  // cpu/recurrent.cpp
const BackendOf<RecurrentFamily>& cpu_generic_recurrent();

template <>
Registry<RecurrentFamily>::List Registry<RecurrentFamily>::built_in() {
  return {&cuda_sm80_recurrent(), &cpu_avx512_recurrent(), &cpu_generic_recurrent(), &recurrent_reference()};
}

template <>
std::vector<std::string> propose<RecurrentFamily>(const RecurrentSpec& spec, const DeviceInfo& device,
                                                  std::span<const CandidateOf<RecurrentFamily>> candidates,
                                                  const BackendOf<RecurrentFamily>& slow) {
  std::vector<SpecChange<RecurrentSpec>> changes;
  add_feature_changes(spec, changes);
  return proposals_of<RecurrentFamily>(spec, device, candidates, slow, changes);
}

template struct SelectionOf<RecurrentFamily>;
template std::vector<const BackendOf<RecurrentFamily>*> backends<RecurrentFamily>();
template const BackendOf<RecurrentFamily>* find_backend<RecurrentFamily>(std::string_view);
template void register_backend<RecurrentFamily>(std::shared_ptr<const BackendOf<RecurrentFamily>>);
template void unregister_backend<RecurrentFamily>(std::string_view);
template SelectionOf<RecurrentFamily> select<RecurrentFamily>(const RecurrentSpec&, const DeviceInfo&, const SelectOptions&);

}  // namespace imbrex
