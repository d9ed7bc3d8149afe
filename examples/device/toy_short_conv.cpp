// The toy accelerator's backend of the short convolution: the library's reference, as in toy_backend.cpp.
#include "toy.h"

namespace toy {
namespace {

// One step, as the device keeps it.
struct Step {
  std::vector<int32_t> query_start_loc, seq_lens, state_slots, num_drafts, accepted_drafts, source_slots, draft_parents;

  explicit Step(const imbrex_batch& b)
      : query_start_loc(b.query_start_loc, b.query_start_loc + b.num_reqs + 1),
        seq_lens(b.seq_lens, b.seq_lens + b.num_reqs),
        state_slots(copy_of(b.state_slots, b.num_reqs)),
        num_drafts(copy_of(b.num_drafts, b.num_reqs)),
        accepted_drafts(copy_of(b.accepted_drafts, b.num_reqs)),
        source_slots(copy_of(b.source_slots, b.num_reqs)),
        draft_parents(copy_of(b.draft_parents, b.query_start_loc[b.num_reqs])) {}
  imbrex_status update(imbrex_plan* plan) const {
    imbrex_batch b;
    imbrex_batch_init(&b, sizeof b);
    b.num_reqs = int32_t(seq_lens.size()), b.query_start_loc = query_start_loc.data(), b.seq_lens = seq_lens.data();
    b.state_slots = or_null(state_slots), b.num_drafts = or_null(num_drafts), b.accepted_drafts = or_null(accepted_drafts);
    b.source_slots = or_null(source_slots), b.draft_parents = or_null(draft_parents);
    return of_library(imbrex_plan_update(plan, &b, nullptr));
  }

 private:
  static std::vector<int32_t> copy_of(const int32_t* list, int count) { return {list, list + (list == nullptr ? 0 : count)}; }
  static const int32_t* or_null(const std::vector<int32_t>& list) { return list.empty() ? nullptr : list.data(); }
};

// What work of streams shares with the plan: it may be freed before they are done.
struct ConvPlan {
  imbrex_short_conv_fields spec;
  imbrex_plan_options options;
  Device* device;
  HostPlan cpu;  // of the stream alone

  imbrex_status make() {
    return make_plan_once(
        cpu, [this](imbrex_spec** layer) { return imbrex_spec_create_short_conv(&spec, layer); }, options);
  }
};
using PlanHandle = std::shared_ptr<ConvPlan>;
PlanHandle& plan_of(void* plan) { return *static_cast<PlanHandle*>(plan); }

void unsupported(void*, const imbrex_short_conv_fields*, const imbrex_device_properties* device, const imbrex_reasons* reasons) {
  if (std::strcmp(device->platform, "toy") != 0) reasons->add(reasons->context, "device.type", "toy", device->platform);
}

imbrex_status make_plan(void*, const imbrex_short_conv_fields* spec, const imbrex_device_properties* device,
                        const imbrex_plan_options* options, void** plan) {
  return guarded([&] {
    Device* const open = open_device_of(device->platform_number);
    if (open == nullptr) return fail(IMBREX_DEVICE, "the device is not open");
    *plan = new PlanHandle(std::make_shared<ConvPlan>(ConvPlan{*spec, host_options(*options), open, nullptr}));
    return imbrex_status(IMBREX_OK);
  });
}
void free_plan(void* plan) { delete &plan_of(plan); }

imbrex_status update(void* plan, const imbrex_batch* batch, void* stream) {
  return guarded([&] {
    if (stream_of(stream).capture() != 0) return fail(IMBREX_INVALID, "an update is not part of a graph");
    return stream_of(stream).give([p = plan_of(plan), step = Step(*batch)] {
      const imbrex_status status = p->make();
      return status == IMBREX_OK ? step.update(p->cpu.get()) : status;
    });
  });
}

struct Run {
  Tensor bcx, weight, bias, state, out;
  Run(const Device& d, const imbrex_short_conv_inputs& in, const imbrex_short_conv_outputs& o)
      : bcx(d, in.bcx), weight(d, in.weight), bias(d, in.bias), state(d, in.state), out(d, o.out) {}
};

imbrex_status run(void* plan, const imbrex_short_conv_inputs* in, const imbrex_short_conv_outputs* out, void* stream) {
  return guarded([&] {
    const auto r = std::make_shared<Run>(*plan_of(plan)->device, *in, *out);
    return stream_of(stream).give([p = plan_of(plan), r] {
      if (p->cpu == nullptr) return imbrex_status(IMBREX_OK);  // there is no step yet
      imbrex_short_conv_inputs inputs;
      imbrex_short_conv_inputs_init(&inputs, sizeof inputs);
      inputs.bcx = r->bcx.get(), inputs.weight = r->weight.get(), inputs.bias = r->bias.get(), inputs.state = r->state.get();
      imbrex_short_conv_outputs outputs;
      imbrex_short_conv_outputs_init(&outputs, sizeof outputs);
      outputs.out = r->out.get();
      return of_library(imbrex_plan_run_short_conv(p->cpu.get(), &inputs, &outputs, nullptr));
    });
  });
}

}  // namespace

imbrex_status register_short_conv_backend(const imbrex_host* host) {
  imbrex_short_conv_backend backend{};
  backend.struct_size = sizeof backend, backend.spec_size = sizeof(imbrex_short_conv_fields),
  backend.device_size = sizeof(imbrex_device_properties);
  backend.name = "toy", backend.description = "an example of a backend on a device from outside: the library's reference over its memory";
  backend.unsupported = unsupported, backend.plan = make_plan, backend.plan_free = free_plan;
  backend.update = update, backend.run = run, backend.error = why;
  backend.capturable = 1;
  return host->register_short_conv_backend(&backend);
}

}  // namespace toy
