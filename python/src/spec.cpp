// AttentionSpec for Python.
#include "spec.h"

#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "attention/spec_fields.h"
#include "spec_fields.h"

namespace imbrex::python {
namespace {

void set_attention_shape(AttentionSpec& spec, int num_q_heads, int num_kv_heads, int head_dim_qk, std::optional<int> head_dim_v,
                         const std::optional<std::string>& kv_dtype) {
  spec.num_q_heads = num_q_heads, spec.num_kv_heads = num_kv_heads;
  spec.head_dim_qk = head_dim_qk, spec.head_dim_v = head_dim_v.value_or(head_dim_qk);
  spec.kv_dtype = kv_dtype ? parse_dtype(*kv_dtype) : spec.q_dtype;
}

}  // namespace

void bind_spec(nb::module_& m) {
  auto spec = nb::class_<AttentionSpec>(
      m, "AttentionSpec",
      "What one softmax-attention layer computes. Fixed for the life of a model.\n\n"
      "A query at index i of a request with q_len queries and seq_len keys has position seq_len - q_len + i. A window of W\n"
      "keys, the query's own included, is window_left = W - 1; -1 is no limit. block_size 0: ragged keys without a cache.");
  bind_constructor(spec, set_attention_shape, nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim_qk"),
                   nb::arg("head_dim_v") = nb::none(), nb::kw_only(), nb::arg("kv_dtype") = nb::none());
  spec.def_prop_ro("scale", &AttentionSpec::scale, "What multiplies q.k.")
      .def_prop_ro(
          "out_dtypes",
          [](const AttentionSpec& s) {
            std::vector<std::string> names;
            for (const DType t : s.out_dtypes()) names.emplace_back(to_string(t));
            return names;
          },
          "Types that an output may have, the usual one first.")
      .def_prop_ro("kv_bytes_per_token", &AttentionSpec::kv_bytes_per_token);
  bind_fields(spec, "AttentionSpec");
}

}  // namespace imbrex::python
