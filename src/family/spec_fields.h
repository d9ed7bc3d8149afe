#pragma once
// The machinery of tables of spec fields. A family lists the fields of its spec once, in a file spec_fields.inl; the C ABI, Python, case
// files, the command line, str() and proposals visit the rows of that table, so that none of them has a list of its own.
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace imbrex {

// What a table says of a field.
struct SpecField {
  std::string_view part;     // "spec", or the member struct of the spec that the field is in
  std::string_view member;   // its name there
  std::string_view name;     // its name in the C ABI and in Python
  std::string_view key;      // its name in case files; empty: they do not hold it
  std::string_view feature;  // what a layer does without when the field has its default; empty: every layer has it
  const char *flag, *help;   // its option on the command line; empty: it has none of its own
};

// A row of a table: a field, and functions that find it in a spec and, by its name, in any other struct, such as that of the C ABI.
template <class HasDefault, class Of, class Named>
struct SpecRow {
  static constexpr bool has_default = HasDefault::value;  // otherwise every layer says the field, or it follows from another one
  SpecField field;
  Of of;
  Named named;
};
template <class HasDefault, class Of, class Named>
SpecRow(HasDefault, SpecField, Of, Named) -> SpecRow<HasDefault, Of, Named>;
template <class HasDefault, class Of, class Named>
constexpr auto spec_row(HasDefault, SpecField field, Of of, Named named) {
  return std::tuple(SpecRow<HasDefault, Of, Named>{field, of, named});
}

// A family specialises this beside its table: rows() is a tuple of SpecRows, in which SPEC_FIELD and SPEC_SHAPE are what the table calls
// FIELD and SHAPE. A part other than "spec" has a function in_<part>() that finds it.
template <class Spec>
struct SpecTable;

auto& in_spec(auto& spec) { return spec; }

#define SPEC_ROW(has_default, part, member, name, key, feature, flag, help)                          \
  spec_row(                                                                                          \
      std::bool_constant<has_default>(), SpecField{#part, #member, #name, key, feature, flag, help}, \
      [](auto& spec) -> auto& { return in_##part(spec).member; }, [](auto& other) -> auto& { return other.name; }),
#define SPEC_FIELD(part, member, name, key, feature, flag, help) SPEC_ROW(true, part, member, name, key, feature, flag, help)
#define SPEC_SHAPE(member) SPEC_ROW(false, spec, member, member, #member, "", "", "")

// Calls visit(row) for every row of a spec's table.
template <class Spec, class Visit>
void for_each_row(Visit&& visit) {
  std::apply([&](const auto&... row) { (visit(row), ...); }, SpecTable<std::remove_const_t<Spec>>::rows());
}

// Calls visit(field, value) for every row; `value` is the member of `spec`, which may be const.
template <class Spec, class Visit>
void for_each_field(Spec& spec, Visit&& visit) {
  for_each_row<Spec>([&](const auto& row) { visit(row.field, row.of(spec)); });
}

// Calls visit(field, value, other) for every row; `value` and `other` are the member of two specs.
template <class Spec, class Other, class Visit>
void for_each_field(Spec& spec, Other& other, Visit&& visit) {
  for_each_row<Spec>([&](const auto& row) { visit(row.field, row.of(spec), row.of(other)); });
}

// Calls visit(field, value, named) for every row; `named` is the member of another struct that has the field's name.
template <class Spec, class Struct, class Visit>
void for_each_named_field(Spec& spec, Struct& other, Visit&& visit) {
  for_each_row<Spec>([&](const auto& row) { visit(row.field, row.of(spec), row.named(other)); });
}

// What str() says of a field: of a flag that is set its name, of a number that is not the usual one "name=value", of others nothing.
std::string number_text(const SpecField&, double value);
template <class Value>
std::string field_text(const SpecField& field, const Value& value, const Value& usual) {
  if constexpr (std::is_same_v<Value, bool>)
    return value ? std::string(field.member) : std::string();
  else if constexpr (std::is_arithmetic_v<Value>)
    return value != usual ? number_text(field, double(value)) : std::string();
  else
    return {};
}

}  // namespace imbrex
