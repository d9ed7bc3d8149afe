// The toy accelerator's backend of attention: its kernels are the library's reference, which works on the arena as on any memory.
#include "toy.h"

namespace toy {
namespace {

// One step, as the device keeps it.
struct Step {
  std::vector<int32_t> query_start_loc, seq_lens, positions, num_drafts, draft_parents;
  Tensor block_table, kv_indptr, kv_indices, kv_last_page_len, kv_start_loc, slot_mapping, custom_mask;

  Step(const Device& device, const imbrex_batch& b)
      : query_start_loc(b.query_start_loc, b.query_start_loc + b.num_reqs + 1),
        seq_lens(b.seq_lens, b.seq_lens + b.num_reqs),
        positions(b.positions, b.positions + (b.positions == nullptr ? 0 : query_start_loc.back())),
        num_drafts(b.num_drafts, b.num_drafts + (b.num_drafts == nullptr ? 0 : b.num_reqs)),
        draft_parents(b.draft_parents, b.draft_parents + (b.draft_parents == nullptr ? 0 : query_start_loc.back())),
        block_table(device, b.block_table),
        kv_indptr(device, b.kv_indptr),
        kv_indices(device, b.kv_indices),
        kv_last_page_len(device, b.kv_last_page_len),
        kv_start_loc(device, b.kv_start_loc),
        slot_mapping(device, b.slot_mapping),
        custom_mask(device, b.custom_mask) {}
  imbrex_status update(imbrex_plan* plan) const {
    imbrex_batch b;
    imbrex_batch_init(&b, sizeof b);
    b.num_reqs = int32_t(seq_lens.size()), b.query_start_loc = query_start_loc.data(), b.seq_lens = seq_lens.data();
    if (!positions.empty()) b.positions = positions.data();
    if (!num_drafts.empty()) b.num_drafts = num_drafts.data();
    if (!draft_parents.empty()) b.draft_parents = draft_parents.data();
    b.block_table = block_table.get(), b.kv_indptr = kv_indptr.get(), b.kv_indices = kv_indices.get();
    b.kv_last_page_len = kv_last_page_len.get(), b.kv_start_loc = kv_start_loc.get(), b.slot_mapping = slot_mapping.get();
    b.custom_mask = custom_mask.get();
    return of_library(imbrex_plan_update(plan, &b, nullptr));
  }
};

struct Cache {
  Tensor k, v, k_scale, v_scale, k_rope, k_rope_scale;
  Cache(const Device& device, const imbrex_kv_cache& c)
      : k(device, c.k),
        v(device, c.v),
        k_scale(device, c.k_scale),
        v_scale(device, c.v_scale),
        k_rope(device, c.k_rope),
        k_rope_scale(device, c.k_rope_scale) {}
  imbrex_kv_cache get() const {
    imbrex_kv_cache c;
    imbrex_kv_cache_init(&c, sizeof c);
    c.k = k.get(), c.v = v.get(), c.k_scale = k_scale.get(), c.v_scale = v_scale.get();
    c.k_rope = k_rope.get(), c.k_rope_scale = k_rope_scale.get();
    return c;
  }
};

// What work of streams shares with the plan: it may be freed before they are done.
struct ToyPlan {
  imbrex_spec_fields spec;
  imbrex_plan_options options;
  Device* device;
  HostPlan cpu;                // of the stream alone, as all below
  std::shared_ptr<Step> step;  // what `cpu` has views of

  imbrex_status make() {
    return make_plan_once(
        cpu, [this](imbrex_spec** layer) { return imbrex_spec_create(&spec, layer); }, options);
  }
};
using PlanHandle = std::shared_ptr<ToyPlan>;
PlanHandle& plan_of(void* plan) { return *static_cast<PlanHandle*>(plan); }

void unsupported(void*, const imbrex_spec_fields* spec, const imbrex_device_properties* device, const imbrex_reasons* reasons) {
  if (std::strcmp(device->platform, "toy") != 0) reasons->add(reasons->context, "device.type", "toy", device->platform);
  if (spec->kv_format != IMBREX_KV_STRIDED && spec->kv_format != IMBREX_KV_LATENT)
    reasons->add(reasons->context, "spec.kv_format", "strided or latent", "another format");
}

imbrex_status make_plan(void*, const imbrex_spec_fields* spec, const imbrex_device_properties* device, const imbrex_plan_options* options,
                        void** plan) {
  return guarded([&] {
    auto made = std::make_shared<ToyPlan>(ToyPlan{*spec, host_options(*options), nullptr, nullptr, nullptr});
    made->device = open_device_of(device->platform_number);
    if (made->device == nullptr) return fail(IMBREX_DEVICE, "the device is not open");
    *plan = new PlanHandle(std::move(made));
    return imbrex_status(IMBREX_OK);
  });
}
void free_plan(void* plan) { delete &plan_of(plan); }

imbrex_status update(void* plan, const imbrex_batch* batch, void* stream) {
  return guarded([&] {
    if (stream_of(stream).capture() != 0) return fail(IMBREX_INVALID, "an update is not part of a graph");
    auto step = std::make_shared<Step>(*plan_of(plan)->device, *batch);
    return stream_of(stream).give([p = plan_of(plan), step] {
      if (const imbrex_status status = p->make(); status != IMBREX_OK) return status;
      const imbrex_status status = step->update(p->cpu.get());
      if (status == IMBREX_OK) p->step = step;
      return status;
    });
  });
}

imbrex_status write_kv(void* plan, const imbrex_kv_cache* cache, const imbrex_tensor* k, const imbrex_tensor* v, void* stream) {
  return guarded([&] {
    const Device& device = *plan_of(plan)->device;
    const auto pages = std::make_shared<Cache>(device, *cache);
    const auto new_k = std::make_shared<Tensor>(device, k), new_v = std::make_shared<Tensor>(device, v);
    return stream_of(stream).give([p = plan_of(plan), pages, new_k, new_v] {
      const imbrex_kv_cache c = pages->get();
      return of_library(imbrex_plan_write_kv(p->cpu.get(), &c, new_k->get(), new_v->get(), nullptr));
    });
  });
}

struct Run {
  Tensor q, q_scale, sinks, alibi_slopes, head_scales, relative_bias, out, lse;
  Cache cache;
  Run(const Device& d, const imbrex_inputs& in, const imbrex_outputs& o)
      : q(d, in.q),
        q_scale(d, in.q_scale),
        sinks(d, in.sinks),
        alibi_slopes(d, in.alibi_slopes),
        head_scales(d, in.head_scales),
        relative_bias(d, in.relative_bias),
        out(d, o.out),
        lse(d, o.lse),
        cache(d, *in.kv) {}
};

imbrex_status run(void* plan, const imbrex_inputs* in, const imbrex_outputs* out, void* stream) {
  return guarded([&] {
    const auto r = std::make_shared<Run>(*plan_of(plan)->device, *in, *out);
    return stream_of(stream).give([p = plan_of(plan), r] {
      const imbrex_kv_cache cache = r->cache.get();
      imbrex_inputs inputs;
      imbrex_inputs_init(&inputs, sizeof inputs);
      inputs.q = r->q.get(), inputs.q_scale = r->q_scale.get(), inputs.kv = &cache, inputs.sinks = r->sinks.get();
      inputs.alibi_slopes = r->alibi_slopes.get(), inputs.head_scales = r->head_scales.get(), inputs.relative_bias = r->relative_bias.get();
      imbrex_outputs outputs;
      imbrex_outputs_init(&outputs, sizeof outputs);
      outputs.out = r->out.get(), outputs.lse = r->lse.get();
      return of_library(imbrex_plan_run(p->cpu.get(), &inputs, &outputs, nullptr));
    });
  });
}

}  // namespace

imbrex_plan_options host_options(const imbrex_plan_options& given) {
  imbrex_plan_options options;
  imbrex_plan_options_init(&options, sizeof options);
  options.max_num_reqs = given.max_num_reqs, options.max_num_tokens = given.max_num_tokens;
  options.max_seq_len = given.max_seq_len, options.max_query_len = given.max_query_len;
  options.min_query_len = given.min_query_len;
  return options;
}

imbrex_status make_plan_once(HostPlan& plan, const std::function<imbrex_status(imbrex_spec**)>& make_layer,
                             const imbrex_plan_options& options) {
  if (plan != nullptr) return IMBREX_OK;
  imbrex_device* host = nullptr;
  imbrex_spec* layer = nullptr;
  imbrex_selection* selection = nullptr;
  imbrex_select_options by_the_law;
  imbrex_select_options_init(&by_the_law, sizeof by_the_law);
  by_the_law.forced = "reference";
  imbrex_plan* made = nullptr;
  imbrex_status status = imbrex_device_create("cpu", &host);
  if (status == IMBREX_OK) status = make_layer(&layer);
  if (status == IMBREX_OK) status = imbrex_select(layer, host, &by_the_law, &selection);
  if (status == IMBREX_OK) status = imbrex_plan_create(selection, &options, &made);
  of_library(status);
  imbrex_selection_free(selection), imbrex_spec_free(layer), imbrex_device_free(host);
  plan.reset(made);
  return status;
}

imbrex_status register_backend(const imbrex_host* host) {
  imbrex_backend backend{};
  backend.struct_size = sizeof backend, backend.spec_size = sizeof(imbrex_spec_fields),
  backend.device_size = sizeof(imbrex_device_properties);
  backend.name = "toy", backend.description = "an example of a backend on a device from outside: the library's reference over its memory";
  backend.unsupported = unsupported, backend.plan = make_plan, backend.plan_free = free_plan;
  backend.update = update, backend.write_kv = write_kv, backend.run = run, backend.error = why;
  backend.capturable = 1;
  return host->register_backend(&backend);
}

}  // namespace toy
