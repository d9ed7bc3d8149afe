#pragma once
// The tensors that a recurrent layer's call only reads, with their names in errors. `state` and `conv_state` are written too.
#include <iterator>

#include "imbrex/recurrent.h"

namespace imbrex {

struct RecurrentInput {
  const char* name;
  TensorView RecurrentInputs::*tensor;
};

inline constexpr RecurrentInput kReadInputs[] = {
    {"q", &RecurrentInputs::q},
    {"k", &RecurrentInputs::k},
    {"v", &RecurrentInputs::v},
    {"gate", &RecurrentInputs::gate},
    {"beta", &RecurrentInputs::beta},
    {"rates", &RecurrentInputs::rates},
    {"gate_bias", &RecurrentInputs::gate_bias},
    {"skip", &RecurrentInputs::skip},
    {"z", &RecurrentInputs::z},
    {"norm_weight", &RecurrentInputs::norm_weight},
    {"input", &RecurrentInputs::input},
    {"conv_weight", &RecurrentInputs::conv_weight},
    {"conv_bias", &RecurrentInputs::conv_bias},
};
static_assert(sizeof(RecurrentInputs) == (std::size(kReadInputs) + 2) * sizeof(TensorView), "a tensor has no row above");

}  // namespace imbrex
