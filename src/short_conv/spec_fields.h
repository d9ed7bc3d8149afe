#pragma once
// The table of the fields of ShortConvSpec, for the visitors of family/spec_fields.h.
#include "family/spec_fields.h"
#include "imbrex/short_conv.h"

namespace imbrex {

template <>
struct SpecTable<ShortConvSpec> {
  static constexpr auto rows() {
#define FIELD SPEC_FIELD
#define SHAPE SPEC_SHAPE
    return std::tuple_cat(
#include "short_conv/spec_fields.inl"
        std::tuple<>());
  }
};

}  // namespace imbrex
