#pragma once
// The table of the fields of MlaSpec, for the visitors of family/spec_fields.h.
#include "attention/spec_fields.h"
#include "imbrex/mla.h"

namespace imbrex {

template <>
struct SpecTable<MlaSpec> {
  static constexpr auto rows() {
#define FIELD SPEC_FIELD
#define SHAPE SPEC_SHAPE
    return std::tuple_cat(
#include "mla/spec_fields.inl"
        std::tuple<>());
  }
};

}  // namespace imbrex
