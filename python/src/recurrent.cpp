// See recurrent.h.
#include "recurrent.h"

#include <array>
#include <utility>

#include "imbrex/recurrent.h"
#include "recurrent/spec_fields.h"
#include "selection.h"
#include "spec_fields.h"
#include "state_plan.h"
#include "tensors.h"

namespace imbrex::python {
namespace {

void set_recurrent_shape(RecurrentSpec& spec, int num_k_heads, int num_v_heads, int head_dim_k, int head_dim_v) {
  spec.num_k_heads = num_k_heads, spec.num_v_heads = num_v_heads;
  spec.head_dim_k = head_dim_k, spec.head_dim_v = head_dim_v;
}

void bind_recurrent_spec(nb::module_& m) {
  auto spec = nb::class_<RecurrentSpec>(
      m, "RecurrentSpec",
      "A layer that keeps a matrix S of state for each request and value head: Mamba, gated delta nets, KDA, lightning attention. For "
      "each\n"
      "token S is decayed, written to (S = S + k u, with u = v, or beta (v - S k) with `delta`), and read: out = scale S q (+ skip v).");
  bind_constructor(spec, set_recurrent_shape, nb::arg("num_k_heads"), nb::arg("num_v_heads"), nb::arg("head_dim_k"), nb::arg("head_dim_v"),
                   nb::kw_only());
  spec.def_prop_ro("state_rows", &RecurrentSpec::state_rows, "Of a slot: one, and one for each draft.")
      .def_prop_ro("state_bytes", &RecurrentSpec::state_bytes, "Of a slot of one layer.")
      .def_prop_ro(
          "state_shape",
          [](const RecurrentSpec& s) {
            const bool k_first = s.layout == StateLayout::k_first;
            return nb::make_tuple(s.state_rows(), s.num_v_heads, k_first ? s.head_dim_k : s.head_dim_v,
                                  k_first ? s.head_dim_v : s.head_dim_k);
          },
          "Of a slot of one layer: rows, value heads, and the two dimensions in the order of `layout`.");
  bind_fields(spec, "RecurrentSpec");
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  bind_recurrent_spec(m);
  bind_selection_of<RecurrentFamily>(m, "RecurrentSelection");
  bind_state_plan<RecurrentFamily>(m, "RecurrentPlan")
      .def(
          "run",
          [](StatePlanOf<RecurrentFamily>& p, const Array& q, const Array& k, const Array& v, const OptionalArray& gate,
             const OptionalArray& beta, const OptionalArray& rates, const OptionalArray& gate_bias, const OptionalArray& skip,
             const OptionalArray& z, const OptionalArray& norm_weight, nb::handle state, nb::handle out, uintptr_t stream) {
            const DType type = p.spec.dtype;
            const Array state_array = written(state, "state"), out_array = written(out, "out");
            const RecurrentInputs in{.q = view_of(q, "q", type),
                                     .k = view_of(k, "k", type),
                                     .v = view_of(v, "v", type),
                                     .gate = view_of(gate, "gate", type),
                                     .beta = view_of(beta, "beta", type),
                                     .rates = view_of(rates, "rates", DType::f32),
                                     .gate_bias = view_of(gate_bias, "gate_bias", DType::f32),
                                     .skip = view_of(skip, "skip", DType::f32),
                                     .state = written_view(state_array, "state", p.spec.state_dtype),
                                     .z = view_of(z, "z", type),
                                     .norm_weight = view_of(norm_weight, "norm_weight", type)};
            const RecurrentOutputs outputs{.out = written_view(out_array, "out", type)};
            const std::array<std::pair<const TensorView*, const char*>, 10> read = {{{&in.q, "q"},
                                                                                     {&in.k, "k"},
                                                                                     {&in.v, "v"},
                                                                                     {&in.gate, "gate"},
                                                                                     {&in.beta, "beta"},
                                                                                     {&in.rates, "rates"},
                                                                                     {&in.gate_bias, "gate_bias"},
                                                                                     {&in.skip, "skip"},
                                                                                     {&in.z, "z"},
                                                                                     {&in.norm_weight, "norm_weight"}}};
            for (const auto& [other, name] : read)
              check_apart(in.state, "state", *other, name), check_apart(outputs.out, "out", *other, name);
            check_apart(outputs.out, "out", in.state, "state");
            const nb::gil_scoped_release release;
            p.plan->run(in, outputs, stream_of(stream));
          },
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("gate").none(), nb::arg("beta").none(), nb::arg("rates").none(),
          nb::arg("gate_bias").none(), nb::arg("skip").none(), nb::arg("z").none(), nb::arg("norm_weight").none(), nb::arg("state"),
          nb::arg("out"), nb::arg("stream") = 0);
}

}  // namespace imbrex::python
