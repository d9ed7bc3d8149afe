// The attention family: its backends in order, and what the registry and select() make of them.
#include "attention/proposals.h"
#include "attention/reference.h"
#include "family/select_of.h"
#include "imbrex/select.h"

namespace imbrex {

const BackendOf<AttentionFamily>& cpu_amx();  // cpu/backend.cpp
const BackendOf<AttentionFamily>& cpu_avx512();
const BackendOf<AttentionFamily>& cpu_generic();
const BackendOf<AttentionFamily>& cuda_sm90();  // cuda/backend.cpp
const BackendOf<AttentionFamily>& cuda_sm80();

template <>
Registry<AttentionFamily>::List Registry<AttentionFamily>::built_in() {
  return {&cuda_sm90(), &cuda_sm80(), &cpu_amx(), &cpu_avx512(), &cpu_generic(), &reference_backend()};
}

template struct SelectionOf<AttentionFamily>;
template std::vector<const BackendOf<AttentionFamily>*> backends<AttentionFamily>();
template const BackendOf<AttentionFamily>* find_backend<AttentionFamily>(std::string_view);
template void register_backend<AttentionFamily>(std::shared_ptr<const BackendOf<AttentionFamily>>);
template void unregister_backend<AttentionFamily>(std::string_view);
template Selection select<AttentionFamily>(const AttentionSpec&, const DeviceInfo&, const SelectOptions&);

}  // namespace imbrex
