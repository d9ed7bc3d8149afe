#pragma once
// Case files of latent attention: one .safetensors file is one case with its expected result, see docs/case-files.md.
#include <span>
#include <vector>

#include "conformance/mla/cases.h"
#include "conformance/safetensors.h"
#include "conformance/verify_row.h"

namespace imbrex {

struct MlaCaseFile {
  MlaCaseInputs inputs;
  std::vector<float> out;  // [T, num_heads, out_dim()]
  std::vector<float> lse;  // [T, num_heads], or empty
};

// Error case_file.*, mla.* or spec.*; a field or tensor that is not known is refused, never ignored.
MlaCaseFile parse_mla_case(const Safetensors&);
Safetensors to_safetensors(const MlaCaseFile&);
MlaCaseFile make_case_file(const MlaCase&);  // with the exact result, rounded to float

// Every backend over page sizes, tables and layouts, pages shuffled, everything else poisoned with NaN, then with 0xff. A backend that does
// not run the spec has one row, with its reasons.
std::vector<VerifyRow> verify_case(const MlaCaseFile&, const DeviceInfo&, std::span<const BackendOf<MlaFamily>* const>);

}  // namespace imbrex
