#pragma once
// Case files of the short convolution: one .safetensors file is one step with its expected result, see docs/case-files.md.
#include <span>
#include <vector>

#include "conformance/safetensors.h"
#include "conformance/short_conv/judge.h"
#include "conformance/verify_row.h"

namespace imbrex {

struct ShortConvCaseFile {
  ShortConvCaseInputs inputs;
  std::vector<float> out;  // [T, dim]
  HostTensor state_out;    // [R, state_rows, dim]; rows that the step does not write are those of the inputs
};

// Error case_file.* or short_conv.*; a field or tensor that is not known is refused, never ignored.
ShortConvCaseFile parse_short_conv_case(const Safetensors&);
Safetensors to_safetensors(const ShortConvCaseFile&);
ShortConvCaseFile make_case_file(const ShortConvCase&);  // with the exact result, rounded to float

// Every backend in one step over gaps between rows and orders of slots, everything else poisoned with NaN, then with 0xff; and where no
// request has drafts, token by token. A backend that does not run the spec has one row, with its reasons.
std::vector<VerifyRow> verify_case(const ShortConvCaseFile&, const DeviceInfo&, std::span<const BackendOf<ShortConvFamily>* const>);

}  // namespace imbrex
