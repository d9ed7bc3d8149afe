// See recurrent.h.
#include "recurrent.h"

#include <optional>
#include <utility>

#include "imbrex/recurrent.h"
#include "recurrent/inputs.h"
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
          "Of a slot of one layer: rows, value heads, and the two dimensions in the order of `layout`.")
      .def_prop_ro(
          "conv_state_shape", [](const RecurrentSpec& s) { return nb::make_tuple(s.conv_state_rows(), s.conv_channels()); },
          "Of a slot of the convolution in front: rows, and channels of q, k and v together.");
  bind_fields(spec, "RecurrentSpec");
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  bind_recurrent_spec(m);
  bind_selection_of<RecurrentFamily>(m, "RecurrentSelection");
  bind_state_plan<RecurrentFamily>(m, "RecurrentPlan")
      .def(
          "run",
          [](StatePlanOf<RecurrentFamily>& p, const OptionalArray& q, const OptionalArray& k, const OptionalArray& v,
             const OptionalArray& gate, const OptionalArray& beta, const OptionalArray& rates, const OptionalArray& gate_bias,
             const OptionalArray& skip, const OptionalArray& z, const OptionalArray& norm_weight, const OptionalArray& input,
             const OptionalArray& conv_weight, const OptionalArray& conv_bias, nb::handle conv_state, nb::handle state, nb::handle out,
             uintptr_t stream) {
            const DType type = p.spec.dtype;
            const Array state_array = written(state, "state"), out_array = written(out, "out");
            const std::optional<Array> conv_array = conv_state.is_none() ? std::nullopt : std::optional(written(conv_state, "conv_state"));
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
                                     .norm_weight = view_of(norm_weight, "norm_weight", type),
                                     .input = view_of(input, "input", type),
                                     .conv_weight = view_of(conv_weight, "conv_weight", type),
                                     .conv_bias = view_of(conv_bias, "conv_bias", type),
                                     .conv_state = conv_array ? written_view(*conv_array, "conv_state", type) : TensorView{}};
            const RecurrentOutputs outputs{.out = written_view(out_array, "out", type)};
            for (const auto& [name, tensor] : kReadInputs)
              for (const auto& [written_to, its_name] :
                   {std::pair{&in.state, "state"}, {&outputs.out, "out"}, {&in.conv_state, "conv_state"}})
                check_apart(*written_to, its_name, in.*tensor, name);
            check_apart(outputs.out, "out", in.state, "state");
            check_apart(outputs.out, "out", in.conv_state, "conv_state");
            check_apart(in.state, "state", in.conv_state, "conv_state");
            const nb::gil_scoped_release release;
            p.plan->run(in, outputs, stream_of(stream));
          },
          nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("gate").none(), nb::arg("beta").none(),
          nb::arg("rates").none(), nb::arg("gate_bias").none(), nb::arg("skip").none(), nb::arg("z").none(), nb::arg("norm_weight").none(),
          nb::arg("input").none(), nb::arg("conv_weight").none(), nb::arg("conv_bias").none(), nb::arg("conv_state").none(),
          nb::arg("state"), nb::arg("out"), nb::arg("stream") = 0);
}

}  // namespace imbrex::python
