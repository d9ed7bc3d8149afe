// The attention family: its backends in order, and what the registry and select() make of them.
#include "attention/proposals.h"
#include "attention/reference.h"
#include "family/select_of.h"
#include "imbrex/select.h"

namespace imbrex {

const Backend& cpu_amx();  // cpu/backend.cpp
const Backend& cpu_avx512();
const Backend& cpu_generic();
const Backend& cuda_sm90();  // cuda/backend.cpp
const Backend& cuda_sm80();

template <>
Registry<AttentionFamily>::List Registry<AttentionFamily>::built_in() {
  return {&cuda_sm90(), &cuda_sm80(), &cpu_amx(), &cpu_avx512(), &cpu_generic(), &reference_backend()};
}

template struct SelectionOf<AttentionFamily>;
template std::vector<const Backend*> backends<AttentionFamily>();
template const Backend* find_backend<AttentionFamily>(std::string_view);
template void register_backend<AttentionFamily>(std::shared_ptr<const Backend>);
template void unregister_backend<AttentionFamily>(std::string_view);
template Selection select<AttentionFamily>(const AttentionSpec&, const DeviceInfo&, const SelectOptions&);

}  // namespace imbrex
