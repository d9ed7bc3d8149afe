#pragma once
// Visits the fields of AttentionSpec, from the one table of them.
#include <string_view>
#include <type_traits>

#include "imbrex/spec.h"

namespace imbrex {

enum class SpecPart : uint8_t { spec, mask, score };

struct SpecField {  // a row of spec_fields.inl
  SpecPart part;
  std::string_view member, name, key, feature;
  const char *flag, *help;
};

// Parts of a spec by the names that the table has for them.
template <SpecPart part>
using SpecTag = std::integral_constant<SpecPart, part>;
auto& part_of(auto& spec, SpecTag<SpecPart::spec>) { return spec; }
auto& part_of(auto& spec, SpecTag<SpecPart::mask>) { return spec.mask; }
auto& part_of(auto& spec, SpecTag<SpecPart::score>) { return spec.score; }

// Calls visit(field, value) for every row; `value` is the member of `spec`, which may be const.
template <class Spec, class Visit>
void for_each_field(Spec& spec, Visit&& visit) {
#define FIELD(part, member, name, key, feature, flag, help) \
  visit(SpecField{SpecPart::part, #member, #name, key, feature, flag, help}, part_of(spec, SpecTag<SpecPart::part>{}).member);
#include "attention/spec_fields.inl"
}

// Calls visit(field, value, other) for every row; `value` and `other` are the member of two specs.
template <class Spec, class Other, class Visit>
void for_each_field(Spec& spec, Other& other, Visit&& visit) {
#define FIELD(part, member, name, key, feature, flag, help)                                                                   \
  visit(SpecField{SpecPart::part, #member, #name, key, feature, flag, help}, part_of(spec, SpecTag<SpecPart::part>{}).member, \
        part_of(other, SpecTag<SpecPart::part>{}).member);
#include "attention/spec_fields.inl"
}

}  // namespace imbrex
