// The family of the short convolution: its backends in order, and what the registry and select() make of them.
#include "family/select_of.h"
#include "family/spec_changes.h"
#include "imbrex/short_conv.h"
#include "short_conv/reference.h"
#include "short_conv/spec_fields.h"

namespace imbrex {

const BackendOf<ShortConvFamily>& cuda_sm80_short_conv();   // cuda/short_conv/short_conv_plan.cpp
const BackendOf<ShortConvFamily>& cpu_avx512_short_conv();  // cpu/short_conv.cpp
const BackendOf<ShortConvFamily>& cpu_generic_short_conv();

template <>
Registry<ShortConvFamily>::List Registry<ShortConvFamily>::built_in() {
  return {&cuda_sm80_short_conv(), &cpu_avx512_short_conv(), &cpu_generic_short_conv(), &short_conv_reference()};
}

template <>
std::vector<std::string> propose<ShortConvFamily>(const ShortConvSpec& spec, const DeviceInfo& device,
                                                  std::span<const CandidateOf<ShortConvFamily>> candidates,
                                                  const BackendOf<ShortConvFamily>& slow) {
  std::vector<SpecChange<ShortConvSpec>> changes;
  add_feature_changes(spec, changes);
  return proposals_of<ShortConvFamily>(spec, device, candidates, slow, changes);
}

template struct SelectionOf<ShortConvFamily>;
template std::vector<const BackendOf<ShortConvFamily>*> backends<ShortConvFamily>();
template const BackendOf<ShortConvFamily>* find_backend<ShortConvFamily>(std::string_view);
template void register_backend<ShortConvFamily>(std::shared_ptr<const BackendOf<ShortConvFamily>>);
template void unregister_backend<ShortConvFamily>(std::string_view);
template SelectionOf<ShortConvFamily> select<ShortConvFamily>(const ShortConvSpec&, const DeviceInfo&, const SelectOptions&);

}  // namespace imbrex
