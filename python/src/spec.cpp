// AttentionSpec for Python: every field of the table is an argument and a property.
#include "spec.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "attention/kv_codec.h"
#include "attention/spec_fields.h"
#include "imbrex/imbrex.hpp"
#include "one_of.h"

namespace imbrex::python {
namespace {

// A field's value as Python has it: enums by their names.
template <class Value>
using Given = std::conditional_t<std::is_enum_v<Value>, std::string, Value>;

template <class Value>
Given<Value> given(const Value& value) {
  if constexpr (std::is_enum_v<Value>)
    return to_string(value);
  else
    return value;
}

void take(DType& value, const std::string& text, const char*) { value = parse_dtype(text); }
void take(AttentionKind& value, const std::string& text, const char* name) {
  value = one_of(text, {AttentionKind::decoder, AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder}, name);
}
void take(KvFormat& value, const std::string& text, const char* name) { value = one_of(text, kv_formats(), name); }
void take(auto& value, const auto& given_value, const char*) { value = given_value; }

#define MEMBER(spec, part, member) part_of(spec, SpecTag<SpecPart::part>{}).member

const AttentionSpec& usual() {
  static const AttentionSpec spec;
  return spec;
}

}  // namespace

void bind_spec(nb::module_& m) {
  auto spec = nb::class_<AttentionSpec>(
      m, "AttentionSpec",
      "What one softmax-attention layer computes. Fixed for the life of a model.\n\n"
      "A query at index i of a request with q_len queries and seq_len keys has position seq_len - q_len + i. A window of W\n"
      "keys, the query's own included, is window_left = W - 1; -1 is no limit. block_size 0: ragged keys without a cache.");
  // The table of fields goes on with these lists.
  // clang-format off
  spec.def(
      "__init__",
      [](AttentionSpec* self, int num_q_heads, int num_kv_heads, int head_dim_qk, std::optional<int> head_dim_v,
         const std::optional<std::string>& kv_dtype
#define SHAPE(member)
#define FIELD(part, member, name, key, feature, flag, help) \
  , const Given<std::remove_cvref_t<decltype(MEMBER(usual(), part, member))>>& name
#include "attention/spec_fields.inl"
      ) {
        AttentionSpec made;
        made.num_q_heads = num_q_heads, made.num_kv_heads = num_kv_heads;
        made.head_dim_qk = head_dim_qk, made.head_dim_v = head_dim_v.value_or(head_dim_qk);
#define SHAPE(member)
#define FIELD(part, member, name, key, feature, flag, help) take(MEMBER(made, part, member), name, #name);
#include "attention/spec_fields.inl"
        made.kv_dtype = kv_dtype ? parse_dtype(*kv_dtype) : made.q_dtype;
        made.validate();
        new (self) AttentionSpec(made);
      },
      nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim_qk"), nb::arg("head_dim_v") = nb::none(), nb::kw_only(),
      nb::arg("kv_dtype") = nb::none()
#define SHAPE(member)
#define FIELD(part, member, name, key, feature, flag, help) , nb::arg(#name) = given(MEMBER(usual(), part, member))
#include "attention/spec_fields.inl"
  );
#define FIELD(part, member, name, key, feature, flag, help) \
  if (#name != std::string_view("scale")) spec.def_prop_ro(#name, [](const AttentionSpec& s) { return given(MEMBER(s, part, member)); });
#include "attention/spec_fields.inl"
  // clang-format on
  spec.def_prop_ro("scale", &AttentionSpec::scale, "What multiplies q.k.")
      .def_prop_ro(
          "out_dtypes",
          [](const AttentionSpec& s) {
            std::vector<std::string> names;
            for (const DType t : s.out_dtypes()) names.emplace_back(to_string(t));
            return names;
          },
          "Types that an output may have, the usual one first.")
      .def_prop_ro("kv_bytes_per_token", &AttentionSpec::kv_bytes_per_token)
      .def(
          "__eq__", [](const AttentionSpec& a, const AttentionSpec& b) { return a == b; }, nb::is_operator())
      .def("__repr__", [](const AttentionSpec& s) { return "<AttentionSpec " + s.str() + ">"; })
      .def("__str__", &AttentionSpec::str);
}

}  // namespace imbrex::python
