#pragma once
// The tensors of one case of the short convolution, in host memory: made from the table's seeds or read from a case file.
#include <vector>

#include "conformance/host_tensor.h"
#include "conformance/short_conv/cases.h"

namespace imbrex {

struct ShortConvCaseInputs {
  ShortConvSpec spec;
  std::vector<ShortConvCaseRequest> requests;
  HostTensor input;   // [T, input_channels]
  HostTensor weight;  // [dim, width]
  HostTensor bias;    // [dim], with a bias
  HostTensor state;   // [R, state_rows, dim], of each request before the step; what is not its past is zero

  int num_tokens() const { return int(input.sizes[0]); }
  // The first and one past the last row of the state.
  struct Rows {
    int begin, end;
  };
  Rows past_rows(size_t request) const;     // that a request reads, if it has tokens; none of a new one
  Rows written_rows(size_t request) const;  // none without tokens
};

// Makes the inputs of a case: the same bits on every machine. The state is that which a run from the request's first token on leaves.
ShortConvCaseInputs make_inputs(const ShortConvCase&);

}  // namespace imbrex
