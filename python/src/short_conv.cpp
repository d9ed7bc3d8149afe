// See short_conv.h.
#include "short_conv.h"

#include "imbrex/short_conv.h"
#include "selection.h"
#include "short_conv/spec_fields.h"
#include "spec_fields.h"
#include "state_plan.h"
#include "tensors.h"

namespace imbrex::python {
namespace {

void set_short_conv_shape(ShortConvSpec& spec, int dim) { spec.dim = dim; }

void bind_short_conv_spec(nb::module_& m) {
  auto spec = nb::class_<ShortConvSpec>(
      m, "ShortConvSpec",
      "A causal convolution of a few tokens. form \"gated\" (LFM2): h = B * x, y = C * (bias + weighted sum of h over `width` tokens);\n"
      "\"plain\" (in front of Mamba, GDN and KDA): h = x, y = activation(bias + weighted sum), \"none\" or \"silu\". A request's state "
      "are\n"
      "width - 1 + num_drafts rows of h.");
  bind_constructor(spec, set_short_conv_shape, nb::arg("dim"), nb::kw_only());
  spec.def_prop_ro("state_rows", &ShortConvSpec::state_rows)
      .def_prop_ro("state_bytes", &ShortConvSpec::state_bytes, "Of a slot of one layer.");
  bind_fields(spec, "ShortConvSpec");
}

}  // namespace

void bind_short_conv(nb::module_& m) {
  bind_short_conv_spec(m);
  bind_selection_of<ShortConvFamily>(m, "ShortConvSelection");
  bind_state_plan<ShortConvFamily>(m, "ShortConvPlan")
      .def(
          "run",
          [](StatePlanOf<ShortConvFamily>& p, const Array& input, const Array& weight, const OptionalArray& bias, nb::handle state,
             nb::handle out, uintptr_t stream) {
            const DType type = p.spec.dtype;
            const Array state_array = written(state, "state"), out_array = written(out, "out");
            const ShortConvInputs in{.input = view_of(input, "input", type),
                                     .weight = view_of(weight, "weight", type),
                                     .bias = view_of(bias, "bias", type),
                                     .state = written_view(state_array, "state", type)};
            const ShortConvOutputs outputs{.out = written_view(out_array, "out", type)};
            for (const auto& [to, name] : {std::pair(&in.state, "state"), std::pair(&outputs.out, "out")})
              check_apart(*to, name, in.input, "input"), check_apart(*to, name, in.weight, "weight"),
                  check_apart(*to, name, in.bias, "bias");
            check_apart(outputs.out, "out", in.state, "state");
            const nb::gil_scoped_release release;
            p.plan->run(in, outputs, stream_of(stream));
          },
          nb::arg("input"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("state"), nb::arg("out"), nb::arg("stream") = 0);
}

}  // namespace imbrex::python
