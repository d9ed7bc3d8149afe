#pragma once
// Case files of recurrent layers: one .safetensors file is one step with its expected result, see docs/case-files.md.
#include <span>
#include <vector>

#include "conformance/recurrent/judge.h"
#include "conformance/safetensors.h"
#include "conformance/verify_row.h"

namespace imbrex {

struct RecurrentCaseFile {
  RecurrentCaseInputs inputs;
  std::vector<float> out;        // [T, num_v_heads, head_dim_v], not rounded to dtype
  std::vector<float> state_out;  // as RecurrentCaseInputs::state, not rounded to state_dtype; zero in rows that the step does not write
  HostTensor conv_state_out;     // as RecurrentCaseInputs::conv_state, with a convolution in front; zero in such rows too
};

// Error case_file.* or recurrent.*; a field or tensor that is not known is refused, never ignored.
RecurrentCaseFile parse_recurrent_case(const Safetensors&);
Safetensors to_safetensors(const RecurrentCaseFile&);
RecurrentCaseFile make_case_file(const RecurrentCase&);  // with the result in double precision, rounded to float

// Every backend in one step over gaps between rows and orders of slots, everything else poisoned with NaN, then with 0xff; and where no
// request has drafts, token by token. A backend that does not run the spec has one row, with its reasons.
std::vector<VerifyRow> verify_case(const RecurrentCaseFile&, const DeviceInfo&, std::span<const BackendOf<RecurrentFamily>* const>);

}  // namespace imbrex
