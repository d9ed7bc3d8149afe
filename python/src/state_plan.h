#pragma once
// What plans of layers with a state in slots have in Python, whatever their family: all but run(). Arrays are looked at with Python's lock
// held, and the work is done without it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>

#include "imbrex/imbrex.hpp"
#include "plan.h"
#include "tensors.h"
#include "threads.h"

namespace imbrex::python {

namespace nb = nanobind;

template <class Family>
struct StatePlanOf {
  typename Family::Spec spec;
  std::unique_ptr<typename Family::Plan> plan;
};

// Binds the class, to which the family adds run().
template <class Family>
nb::class_<StatePlanOf<Family>> bind_state_plan(nb::module_& m, const char* name) {
  using Bound = StatePlanOf<Family>;
  nb::class_<Bound> bound(m, name);
  bound
      .def(
          "__init__",
          [](Bound* self, const typename Family::Spec& spec, const DeviceInfo& device, const std::string& backend, int max_num_reqs,
             int max_num_tokens, int max_seq_len, int num_threads, bool validate, bool on_device, const PyWorkspace* workspace) {
            const auto chosen = select<Family>(spec, device, {.forced = backend});
            if (chosen.backend == nullptr) throw Error("backend.unsupported", "nothing runs " + spec.str() + "\n" + chosen.str());
            PlanOptions options;
            options.limits = {max_num_reqs, max_num_tokens, max_seq_len};
            options.validate = validate, options.on_device = on_device;
            if (workspace != nullptr) options.workspace = workspace->shared;
            if (device.device.type == DeviceType::cpu) options.threads = shared_threads(num_threads);
            Bound made{spec, {}};
            {
              const nb::gil_scoped_release release;
              made.plan = chosen.backend->plan(spec, device, options);
            }
            new (self) Bound(std::move(made));
          },
          nb::arg("spec"), nb::arg("device"), nb::kw_only(), nb::arg("backend") = "", nb::arg("max_num_reqs") = 256,
          nb::arg("max_num_tokens") = 8192, nb::arg("max_seq_len") = 131072, nb::arg("num_threads") = 0, nb::arg("validate") = true,
          nb::arg("on_device") = false, nb::arg("workspace").none() = nb::none())
      .def_ro("spec", &Bound::spec)
      .def(
          "update",
          [](Bound& p, const Array& query_start_loc, const Array& seq_lens, const Array& state_slots, const OptionalArray& num_drafts,
             const OptionalArray& accepted_drafts, const OptionalArray& source_slots, const OptionalArray& draft_parents,
             std::optional<int32_t> pad_slot, uintptr_t stream) {
            Batch batch;
            batch.query_start_loc = host_numbers(query_start_loc, "query_start_loc");
            batch.seq_lens = host_numbers(seq_lens, "seq_lens");
            batch.state_slots = host_numbers(state_slots, "state_slots");
            if (num_drafts) batch.num_drafts = host_numbers(*num_drafts, "num_drafts");
            if (accepted_drafts) batch.accepted_drafts = host_numbers(*accepted_drafts, "accepted_drafts");
            if (source_slots) batch.source_slots = host_numbers(*source_slots, "source_slots");
            if (draft_parents) batch.draft_parents = host_numbers(*draft_parents, "draft_parents");
            batch.pad_slot = pad_slot;
            const nb::gil_scoped_release release;
            p.plan->update(batch, stream_of(stream));
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("state_slots"), nb::arg("num_drafts") = nb::none(),
          nb::arg("accepted_drafts") = nb::none(), nb::arg("source_slots") = nb::none(), nb::arg("draft_parents") = nb::none(),
          nb::arg("pad_slot") = nb::none(), nb::arg("stream") = 0)
      .def(
          "update_on_device",
          [](Bound& p, const Array& query_start_loc, const Array& seq_lens, const Array& state_slots, const OptionalArray& num_drafts,
             const OptionalArray& accepted_drafts, const OptionalArray& source_slots, const OptionalArray& draft_parents,
             std::optional<int32_t> pad_slot, int max_num_tokens, uintptr_t stream) {
            DeviceBatch batch;
            batch.query_start_loc = view_of(query_start_loc, "query_start_loc", DType::i32);
            batch.seq_lens = view_of(seq_lens, "seq_lens", DType::i32);
            batch.state_slots = view_of(state_slots, "state_slots", DType::i32);
            batch.num_drafts = view_of(num_drafts, "num_drafts", DType::i32);
            batch.accepted_drafts = view_of(accepted_drafts, "accepted_drafts", DType::i32);
            batch.source_slots = view_of(source_slots, "source_slots", DType::i32);
            batch.draft_parents = view_of(draft_parents, "draft_parents", DType::i32);
            batch.pad_slot = pad_slot;
            batch.max_num_tokens = max_num_tokens;
            const nb::gil_scoped_release release;
            p.plan->update_on_device(batch, stream_of(stream));
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("state_slots"), nb::arg("num_drafts") = nb::none(),
          nb::arg("accepted_drafts") = nb::none(), nb::arg("source_slots") = nb::none(), nb::arg("draft_parents") = nb::none(),
          nb::arg("pad_slot") = nb::none(), nb::arg("max_num_tokens") = 0, nb::arg("stream") = 0)
      .def(
          "device_problems",
          [](Bound& p, uintptr_t stream) {
            const nb::gil_scoped_release release;
            return p.plan->device_problems(stream_of(stream));
          },
          nb::arg("stream") = 0)
      .def_prop_ro("capturable", [](const Bound& p) { return p.plan->capturable(); })
      .def("__str__", [](const Bound& p) { return p.plan->str(); });
  return bound;
}

}  // namespace imbrex::python
