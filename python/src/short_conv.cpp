// See short_conv.h. Arrays are looked at with Python's lock held, and the work is done without it.
#include "short_conv.h"

#include <memory>

#include "imbrex/short_conv.h"
#include "plan.h"
#include "selection.h"
#include "short_conv/spec_fields.h"
#include "spec_fields.h"
#include "tensors.h"
#include "threads.h"

namespace imbrex::python {
namespace {

struct PyShortConvPlan {
  ShortConvSpec spec;
  std::unique_ptr<ShortConvPlan> plan;
};

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
  nb::class_<PyShortConvPlan>(m, "ShortConvPlan")
      .def(
          "__init__",
          [](PyShortConvPlan* self, const ShortConvSpec& spec, const DeviceInfo& device, const std::string& backend, int max_num_reqs,
             int max_num_tokens, int max_seq_len, int num_threads, bool validate, bool on_device, const PyWorkspace* workspace) {
            const auto chosen = select<ShortConvFamily>(spec, device, {.forced = backend});
            if (chosen.backend == nullptr) throw Error("backend.unsupported", "nothing runs " + spec.str() + "\n" + chosen.str());
            PlanOptions options;
            options.limits = {max_num_reqs, max_num_tokens, max_seq_len};
            options.validate = validate, options.on_device = on_device;
            if (workspace != nullptr) options.workspace = workspace->shared;
            if (device.device.type == DeviceType::cpu) options.threads = shared_threads(num_threads);
            PyShortConvPlan made{spec, {}};
            {
              const nb::gil_scoped_release release;
              made.plan = chosen.backend->plan(spec, device, options);
            }
            new (self) PyShortConvPlan(std::move(made));
          },
          nb::arg("spec"), nb::arg("device"), nb::kw_only(), nb::arg("backend") = "", nb::arg("max_num_reqs") = 256,
          nb::arg("max_num_tokens") = 8192, nb::arg("max_seq_len") = 131072, nb::arg("num_threads") = 0, nb::arg("validate") = true,
          nb::arg("on_device") = false, nb::arg("workspace").none() = nb::none())
      .def_ro("spec", &PyShortConvPlan::spec)
      .def(
          "update",
          [](PyShortConvPlan& p, const Array& query_start_loc, const Array& seq_lens, const Array& state_slots,
             const OptionalArray& num_drafts, const OptionalArray& accepted_drafts, uintptr_t stream) {
            Batch batch;
            batch.query_start_loc = host_numbers(query_start_loc, "query_start_loc");
            batch.seq_lens = host_numbers(seq_lens, "seq_lens");
            batch.state_slots = host_numbers(state_slots, "state_slots");
            if (num_drafts) batch.num_drafts = host_numbers(*num_drafts, "num_drafts");
            if (accepted_drafts) batch.accepted_drafts = host_numbers(*accepted_drafts, "accepted_drafts");
            const nb::gil_scoped_release release;
            p.plan->update(batch, stream_of(stream));
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("state_slots"), nb::arg("num_drafts") = nb::none(),
          nb::arg("accepted_drafts") = nb::none(), nb::arg("stream") = 0)
      .def(
          "update_on_device",
          [](PyShortConvPlan& p, const Array& query_start_loc, const Array& seq_lens, const Array& state_slots,
             const OptionalArray& num_drafts, const OptionalArray& accepted_drafts, int max_num_tokens, uintptr_t stream) {
            DeviceBatch batch;
            batch.query_start_loc = view_of(query_start_loc, "query_start_loc", DType::i32);
            batch.seq_lens = view_of(seq_lens, "seq_lens", DType::i32);
            batch.state_slots = view_of(state_slots, "state_slots", DType::i32);
            batch.num_drafts = view_of(num_drafts, "num_drafts", DType::i32);
            batch.accepted_drafts = view_of(accepted_drafts, "accepted_drafts", DType::i32);
            batch.max_num_tokens = max_num_tokens;
            const nb::gil_scoped_release release;
            p.plan->update_on_device(batch, stream_of(stream));
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("state_slots"), nb::arg("num_drafts") = nb::none(),
          nb::arg("accepted_drafts") = nb::none(), nb::arg("max_num_tokens") = 0, nb::arg("stream") = 0)
      .def(
          "device_problems",
          [](PyShortConvPlan& p, uintptr_t stream) {
            const nb::gil_scoped_release release;
            return p.plan->device_problems(stream_of(stream));
          },
          nb::arg("stream") = 0)
      .def_prop_ro("capturable", [](const PyShortConvPlan& p) { return p.plan->capturable(); })
      .def(
          "run",
          [](PyShortConvPlan& p, const Array& input, const Array& weight, const OptionalArray& bias, nb::handle state, nb::handle out,
             uintptr_t stream) {
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
          nb::arg("input"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("state"), nb::arg("out"), nb::arg("stream") = 0)
      .def("__str__", [](const PyShortConvPlan& p) { return p.plan->str(); });
}

}  // namespace imbrex::python
