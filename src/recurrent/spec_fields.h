#pragma once
// The table of the fields of RecurrentSpec, for the visitors of family/spec_fields.h.
#include "family/spec_fields.h"
#include "imbrex/recurrent.h"

namespace imbrex {

template <>
struct SpecTable<RecurrentSpec> {
  static constexpr auto rows() {
#define FIELD SPEC_FIELD
#define SHAPE SPEC_SHAPE
    return std::tuple_cat(
#include "recurrent/spec_fields.inl"
        std::tuple<>());
  }
};

}  // namespace imbrex
