#pragma once
// The table of the fields of AttentionSpec, for the visitors of family/spec_fields.h.
#include "family/spec_fields.h"
#include "imbrex/spec.h"

namespace imbrex {

auto& in_mask(auto& spec) { return spec.mask; }
auto& in_score(auto& spec) { return spec.score; }

template <>
struct SpecTable<AttentionSpec> {
  static constexpr auto rows() {
#define FIELD SPEC_FIELD
#define SHAPE SPEC_SHAPE
    return std::tuple_cat(
#include "attention/spec_fields.inl"
        std::tuple<>());
  }
};

}  // namespace imbrex
