#pragma once
// How exact the numbers of a type are, for the bounds of judges.
#include "imbrex/tensor.h"

namespace imbrex {

constexpr double kFloatRounding = 0x1p-24, kSmallestFloat = 0x1p-149;

// Half of a unit in the last place, as a share of a number; and the smallest number above zero.
struct Precision {
  double rounding, smallest;
};
inline Precision precision_of(DType dtype) {
  switch (dtype) {
    case DType::f16: return {0x1p-11, 0x1p-24};
    case DType::bf16: return {0x1p-8, 0x1p-133};
    default: return {kFloatRounding, kSmallestFloat};
  }
}

}  // namespace imbrex
