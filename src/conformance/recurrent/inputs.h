#pragma once
// The tensors of one case of recurrent layers, in host memory, made from the table's seeds.
#include "conformance/host_tensor.h"
#include "conformance/recurrent/cases.h"
#include "conformance/short_conv/inputs.h"

namespace imbrex {

struct RecurrentCaseInputs {
  RecurrentSpec spec;
  StateCaseRequests requests;
  HostTensor q, k;              // [T, num_k_heads, head_dim_k], where no convolution makes them
  HostTensor v;                 // [T, num_v_heads, head_dim_v], likewise
  HostTensor gate;              // [T, 1, num_v_heads], or [T, num_v_heads, head_dim_k], where there are gates
  HostTensor beta;              // [T, 1, num_v_heads], with the delta rule
  HostTensor rates, gate_bias;  // f32, as in RecurrentInputs
  HostTensor skip;
  HostTensor state;  // [R, state_rows, num_v_heads, ..] of each request before the step; only the row that it reads is not zero

  HostTensor z;            // [T, num_v_heads, head_dim_v], with a gate of outputs
  HostTensor norm_weight;  // as in RecurrentInputs, with a norm of outputs

  // With a convolution in front, which makes q, k and v.
  HostTensor input;        // [T, 1, conv_channels]
  HostTensor conv_weight;  // [conv_channels, conv_width]
  HostTensor conv_bias;    // [conv_channels], with a bias
  HostTensor conv_state;   // [R, conv_state_rows, conv_channels] before the step; only rows that it reads are not zero

  bool has_conv() const { return spec.conv != RecurrentConv::none; }
  ShortConvCaseInputs conv() const;  // the convolution as a case of its own

  int64_t head_numbers() const { return int64_t(spec.head_dim_k) * spec.head_dim_v; }  // of a state
  int64_t row_numbers() const { return spec.num_v_heads * head_numbers(); }
};

// Makes the inputs of a case: the same bits on every machine, and of a request's position in any batch.
RecurrentCaseInputs make_inputs(const RecurrentCase&);

}  // namespace imbrex
