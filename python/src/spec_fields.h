#pragma once
// Binds specs of any family: every field of a spec's table is an argument of its constructor and a property.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <string>
#include <tuple>
#include <type_traits>

#include "attention/kv_codec.h"
#include "family/spec_fields.h"
#include "imbrex/imbrex.hpp"
#include "one_of.h"
#include "short_conv/spec_fields.h"

namespace imbrex::python {

namespace nb = nanobind;

// A field's value as Python has it: enums by their names.
template <class Value>
auto given(const Value& value) {
  if constexpr (std::is_enum_v<Value>)
    return std::string(to_string(value));
  else if constexpr (std::is_same_v<Value, Expression>)
    return value.empty() ? std::string() : value.text();
  else
    return value;
}

inline void take(DType& value, const std::string& text, const char*) { value = parse_dtype(text); }
inline void take(Expression& value, const std::string& text, const char*) { value = text.empty() ? Expression() : parse_expression(text); }
inline void take(AttentionKind& value, const std::string& text, const char* name) {
  value = one_of(text, {AttentionKind::decoder, AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder}, name);
}
inline void take(KvFormat& value, const std::string& text, const char* name) { value = one_of(text, kv_formats(), name); }
inline void take(ShortConvForm& value, const std::string& text, const char*) { parse_value(text, value); }
inline void take(ShortConvActivation& value, const std::string& text, const char*) { parse_value(text, value); }
inline void take(RecurrentGate& value, const std::string& text, const char* name) {
  value = one_of(text, {RecurrentGate::fixed, RecurrentGate::log, RecurrentGate::softplus, RecurrentGate::sigmoid}, name);
}
inline void take(StateLayout& value, const std::string& text, const char* name) {
  value = one_of(text, {StateLayout::k_first, StateLayout::v_first}, name);
}
inline void take(RecurrentConv& value, const std::string& text, const char* name) {
  value = one_of(text, {RecurrentConv::none, RecurrentConv::qkv, RecurrentConv::vkq}, name);
}
inline void take(OutputGate& value, const std::string& text, const char* name) {
  value = one_of(text, {OutputGate::none, OutputGate::silu, OutputGate::sigmoid}, name);
}
inline void take(OutputNorm& value, const std::string& text, const char* name) {
  value = one_of(text, {OutputNorm::none, OutputNorm::before_gate, OutputNorm::after_gate}, name);
}
void take(auto& value, const auto& given_value, const char*) { value = given_value; }

// The rows whose fields have a default.
template <class Spec>
constexpr auto rows_with_default() {
  const auto kept = [](const auto& row) {
    if constexpr (std::remove_cvref_t<decltype(row)>::has_default)
      return std::tuple(row);
    else
      return std::tuple();
  };
  return std::apply([&](const auto&... row) { return std::tuple_cat(kept(row)...); }, SpecTable<Spec>::rows());
}

// Binds the constructor, whose first arguments are `names`, with nb::kw_only() among them. Arguments of the same names as fields follow,
// for all that have a default; set(spec, first arguments...) then sets the others.
template <class Spec, class... First, class... Names>
void bind_constructor(nb::class_<Spec>& bound, void (*set)(Spec&, First...), const Names&... names) {
  static const Spec usual;
  const auto bind = [&]<class... Row>(const Row&... row) {
    bound.def(
        "__init__",
        [set](Spec* self, First... first, const decltype(given(std::declval<const Row&>().of(usual)))&... values) {
          Spec made;
          std::apply([&](const Row&... r) { (take(r.of(made), values, r.field.name.data()), ...); }, rows_with_default<Spec>());
          set(made, first...);
          made.validate();
          new (self) Spec(made);
        },
        names..., (nb::arg(row.field.name.data()) = given(row.of(usual)))...);
  };
  std::apply(bind, rows_with_default<Spec>());
}

// Binds the fields as properties, but for those that have a property of their own already, ==, and the texts.
template <class Spec>
void bind_fields(nb::class_<Spec>& bound, const char* class_name) {
  for_each_row<Spec>([&](const auto& row) {
    if (!nb::hasattr(bound, row.field.name.data()))
      bound.def_prop_ro(row.field.name.data(), [of = row.of](const Spec& spec) { return given(of(spec)); });
  });
  bound
      .def(
          "__eq__", [](const Spec& a, const Spec& b) { return a == b; }, nb::is_operator())
      .def("__repr__", [before = "<" + std::string(class_name) + " "](const Spec& spec) { return before + spec.str() + ">"; })
      .def("__str__", &Spec::str);
}

}  // namespace imbrex::python
