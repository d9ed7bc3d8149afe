#pragma once
// The table of the fields of ShortConvSpec, for the visitors of family/spec_fields.h.
#include <string>

#include "family/spec_fields.h"
#include "imbrex/short_conv.h"

namespace imbrex {

// Sets a field to the value of a name. Error short_conv.form, short_conv.activation.
void parse_value(const std::string& name, ShortConvForm&);
void parse_value(const std::string& name, ShortConvActivation&);

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
