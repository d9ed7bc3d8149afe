#pragma once
// What the convolution in front of a recurrence makes of a case's input, for the judge.
#include "conformance/recurrent/inputs.h"

namespace imbrex {

// q, k and v as a recurrence reads them, and how far a backend's may be from them: nothing, but where a sum is so near to the middle
// between two numbers of dtype that float arithmetic may round it to either.
struct ConvolvedRows {
  HostTensor q, k, v;              // f32 [T, heads, dim], of numbers that dtype has
  HostTensor q_off, k_off, v_off;  // of the same shapes
};
ConvolvedRows convolved_rows(const RecurrentCaseInputs&);

}  // namespace imbrex
