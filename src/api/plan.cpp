// Devices, specs, selections and plans of the C ABI.
#include "api/structs.h"

using namespace imbrex;
using namespace imbrex::api;

namespace {

// Item `index` of a list; null when there is none.
template <class List>
const typename List::value_type* at(const List& list, int32_t index) {
  return index >= 0 && size_t(index) < list.size() ? &list[size_t(index)] : nullptr;
}

const imbrex_selection::Candidate* candidate(const imbrex_selection* s, int32_t index) {
  return s == nullptr ? nullptr : at(s->candidates, index);
}

imbrex_status give_reason(const std::vector<Reason>* reasons, int32_t index, imbrex_reason* out) {
  return guarded([&] {
    imbrex_reason& to = deref(out, "out");
    const Reason* reason = reasons == nullptr ? nullptr : at(*reasons, index);
    check(reason != nullptr, "api.index", "reason: expected 0 to {}, got {}", (reasons == nullptr ? 0 : int64_t(reasons->size())) - 1,
          index);
    to = c_reason(*reason);
  });
}

const imbrex_selection& chosen(const imbrex_selection& s) {
  check(s.chosen != nullptr, "backend.unsupported", "nothing runs {} on {}\n{}", s.spec.text, s.device.str(), s.text);
  return s;
}

const BackendOf<AttentionFamily>& attention_backend(const imbrex_selection& s) {
  return *std::get<const BackendOf<AttentionFamily>*>(chosen(s).backend);
}

// Calls use(backend, spec) with what a selection has chosen, of its family.
template <class Use>
void with_backend(const imbrex_selection& s, const Use& use) {
  chosen(s);
  std::visit([&]<class Spec>(const Spec& spec) { use(*std::get<const BackendOf<FamilyOf<Spec>>*>(s.backend), spec); }, s.spec.spec);
}

// A selection of imbrex_select(), for a spec of one family.
template <class Family>
void select_for(const typename Family::Spec& spec, const SelectOptions& options, imbrex_selection& to) {
  const SelectionOf<Family> selection = select<Family>(spec, to.device, options);
  to.backend = selection.backend, to.chosen = selection.backend;
  for (const CandidateOf<Family>& c : selection.candidates) to.candidates.push_back({std::string(c.backend->name()), c.reasons});
  to.proposals = selection.proposals;
  to.rule = selection.rule, to.text = selection.str();
  if (selection.backend != nullptr) to.name = selection.backend->name();
}

AttentionPlan& attention_plan(imbrex_plan* plan) { return *of_family<std::unique_ptr<AttentionPlan>>(deref(plan, "plan").plan, "plan"); }
MlaPlan& mla_plan(imbrex_plan* plan) { return *of_family<std::unique_ptr<MlaPlan>>(deref(plan, "plan").plan, "plan"); }

}  // namespace

imbrex_status imbrex_device_create(const char* text, imbrex_device** out) {
  return create(out, [&] {
    auto device = std::make_unique<imbrex_device>();
    device->info = describe_device(&deref(text, "text"));
    device->text = device->info.str();
    return device;
  });
}
void imbrex_device_free(imbrex_device* device) { delete device; }
const char* imbrex_device_str(const imbrex_device* device) { return device == nullptr ? "" : device->text.c_str(); }

int32_t imbrex_num_cuda_devices(const char** why) {
  static thread_local std::string text;
  int32_t count = 0;
  guarded([&] {
    text.clear();
    count = int32_t(probe_cuda(&text).size());
  });
  if (why != nullptr) *why = text.c_str();
  return count;
}

imbrex_status imbrex_device_get_properties(const imbrex_device* device, imbrex_device_properties* out) {
  return guarded([&] { write(out, properties_of(deref(device, "device").info), "out"); });
}

imbrex_status imbrex_threads_create(int32_t count, imbrex_threads** out) {
  return create(out, [&] { return std::make_unique<imbrex_threads>(count); });
}
void imbrex_threads_free(imbrex_threads* threads) { delete threads; }

imbrex_status imbrex_spec_create(const imbrex_spec_fields* fields, imbrex_spec** out) {
  return create(out, [&] {
    const AttentionSpec spec = spec_of(fields);
    const auto text_of = [](const Expression& e) { return e.empty() ? std::string() : e.text(); };
    return std::make_unique<imbrex_spec>(imbrex_spec{spec, spec.str(), text_of(spec.score_mod), text_of(spec.mask_mod)});
  });
}
imbrex_status imbrex_spec_create_short_conv(const imbrex_short_conv_fields* fields, imbrex_spec** out) {
  return create(out, [&] {
    const ShortConvSpec spec = spec_of(fields);
    return std::make_unique<imbrex_spec>(imbrex_spec{spec, spec.str()});
  });
}
imbrex_status imbrex_spec_create_mla(const imbrex_mla_fields* fields, imbrex_spec** out) {
  return create(out, [&] {
    const MlaSpec spec = spec_of(fields);
    return std::make_unique<imbrex_spec>(imbrex_spec{spec, spec.str()});
  });
}
imbrex_status imbrex_spec_create_recurrent(const imbrex_recurrent_fields* fields, imbrex_spec** out) {
  return create(out, [&] {
    const RecurrentSpec spec = spec_of(fields);
    return std::make_unique<imbrex_spec>(imbrex_spec{spec, spec.str()});
  });
}
void imbrex_spec_free(imbrex_spec* spec) { delete spec; }
const char* imbrex_spec_str(const imbrex_spec* spec) { return spec == nullptr ? "" : spec->text.c_str(); }
imbrex_status imbrex_spec_get_fields(const imbrex_spec* spec, imbrex_spec_fields* out) {
  return guarded([&] {
    const imbrex_spec& given = deref(spec, "spec");
    imbrex_spec_fields fields = fields_of(of_family<AttentionSpec>(given.spec, "spec"));
    const auto text_of = [](const std::string& text) { return text.empty() ? nullptr : text.c_str(); };
    fields.score_mod = text_of(given.score_mod), fields.mask_mod = text_of(given.mask_mod);
    write(out, fields, "out");
  });
}

imbrex_status imbrex_select(const imbrex_spec* spec, const imbrex_device* device, const imbrex_select_options* options,
                            imbrex_selection** out) {
  return create(out, [&] {
    auto selection = std::make_unique<imbrex_selection>();
    selection->spec = deref(spec, "spec");
    selection->device = deref(device, "device").info;
    const SelectOptions given = select_options_of(options);
    std::visit([&]<class Spec>(const Spec& spec) { select_for<FamilyOf<Spec>>(spec, given, *selection); }, selection->spec.spec);
    return selection;
  });
}
void imbrex_selection_free(imbrex_selection* selection) { delete selection; }

const char* imbrex_selection_backend(const imbrex_selection* s) { return s == nullptr || s->chosen == nullptr ? nullptr : s->name.c_str(); }
const char* imbrex_selection_rule(const imbrex_selection* s) { return s == nullptr ? "" : s->rule.c_str(); }
const char* imbrex_selection_explain(const imbrex_selection* s) { return s == nullptr ? "" : s->text.c_str(); }

int32_t imbrex_selection_num_candidates(const imbrex_selection* s) { return s == nullptr ? 0 : int32_t(s->candidates.size()); }
const char* imbrex_selection_candidate(const imbrex_selection* s, int32_t index) {
  const imbrex_selection::Candidate* c = candidate(s, index);
  return c == nullptr ? nullptr : c->name.c_str();
}
int32_t imbrex_selection_num_reasons(const imbrex_selection* s, int32_t index) {
  const imbrex_selection::Candidate* c = candidate(s, index);
  return c == nullptr ? 0 : int32_t(c->reasons.size());
}
imbrex_status imbrex_selection_reason(const imbrex_selection* s, int32_t index, int32_t reason, imbrex_reason* out) {
  const imbrex_selection::Candidate* c = candidate(s, index);
  return give_reason(c == nullptr ? nullptr : &c->reasons, reason, out);
}
const char* imbrex_selection_proposal(const imbrex_selection* s, int32_t index) {
  const std::string* proposal = s == nullptr ? nullptr : at(s->proposals, index);
  return proposal == nullptr ? nullptr : proposal->c_str();
}

imbrex_status imbrex_workspace_create(const imbrex_device* device, imbrex_workspace** out) {
  return create(out, [&] { return std::make_unique<imbrex_workspace>(make_workspace(deref(device, "device").info)); });
}
imbrex_status imbrex_workspace_create_in(const imbrex_device* device, void* memory, int64_t bytes, imbrex_workspace** out) {
  return create(out, [&] { return std::make_unique<imbrex_workspace>(make_workspace(deref(device, "device").info, memory, bytes)); });
}
void imbrex_workspace_free(imbrex_workspace* workspace) { delete workspace; }
int64_t imbrex_workspace_bytes(const imbrex_workspace* workspace) { return workspace == nullptr ? 0 : workspace->workspace->bytes(); }

imbrex_status imbrex_plan_create(const imbrex_selection* selection, const imbrex_plan_options* options, imbrex_plan** out) {
  return create(out, [&] {
    const imbrex_selection& s = chosen(deref(selection, "selection"));
    const PlanOptions given = plan_options_of(options);
    auto plan = std::make_unique<imbrex_plan>();
    with_backend(s, [&](const auto& backend, const auto& spec) { plan->plan = backend.plan(spec, s.device, given); });
    return plan;
  });
}

imbrex_status imbrex_selection_workspace_bytes(const imbrex_selection* selection, const imbrex_plan_options* options, int64_t* out) {
  return guarded([&] {
    const imbrex_selection& s = chosen(deref(selection, "selection"));
    const PlanOptions given = plan_options_of(options);
    int64_t& bytes = deref(out, "out");
    with_backend(s, [&](const auto& backend, const auto& spec) { bytes = backend.workspace_bytes(spec, s.device, given); });
  });
}

imbrex_status imbrex_plan_create_by_phase(const imbrex_selection* prefill, const imbrex_selection* decode,
                                          const imbrex_plan_options* options, int32_t decode_max_q, imbrex_plan** out) {
  return create(out, [&] {
    const imbrex_selection &p = deref(prefill, "prefill"), &d = deref(decode, "decode");
    const auto &p_spec = of_family<AttentionSpec>(p.spec.spec, "prefill"), &d_spec = of_family<AttentionSpec>(d.spec.spec, "decode");
    check(p_spec == d_spec && p.device.device == d.device.device, "api.phases",
          "expected selections for one spec on one device, got {} on {} and {} on {}", p.spec.text, p.device.str(), d.spec.text,
          d.device.str());
    auto plan = std::make_unique<imbrex_plan>();
    plan->plan = plan_by_phase(attention_backend(p), attention_backend(d), p_spec, p.device, plan_options_of(options), decode_max_q);
    return plan;
  });
}

void imbrex_plan_free(imbrex_plan* plan) { delete plan; }

const char* imbrex_plan_str(imbrex_plan* plan) {
  const imbrex_status status = guarded([&] {
    imbrex_plan& p = deref(plan, "plan");
    p.text = p.basic().str();
  });
  return status == IMBREX_OK ? plan->text.c_str() : "";
}

int32_t imbrex_plan_capturable(const imbrex_plan* plan) { return plan != nullptr && plan->basic().capturable() ? 1 : 0; }

imbrex_status imbrex_plan_update(imbrex_plan* plan, const imbrex_batch* batch, void* stream) {
  return guarded([&] {
    std::vector<NamedTensor> mask_tensors;
    deref(plan, "plan").basic().update(batch_of(batch, mask_tensors), stream);
  });
}

imbrex_status imbrex_plan_update_on_device(imbrex_plan* plan, const imbrex_device_batch* batch, void* stream) {
  return guarded([&] { deref(plan, "plan").basic().update_on_device(device_batch_of(batch), stream); });
}

imbrex_status imbrex_plan_device_problems(imbrex_plan* plan, void* stream, int32_t* count) {
  return guarded([&] {
    int32_t& out = deref(count, "count");
    imbrex_plan& p = deref(plan, "plan");
    p.problems = p.basic().device_problems(stream);
    out = int32_t(p.problems.size());
  });
}

imbrex_status imbrex_plan_device_problem(const imbrex_plan* plan, int32_t index, imbrex_reason* out) {
  return give_reason(plan == nullptr ? nullptr : &plan->problems, index, out);
}

imbrex_status imbrex_plan_write_kv(imbrex_plan* plan, const imbrex_kv_cache* kv, const imbrex_tensor* k, const imbrex_tensor* v,
                                   void* stream) {
  return guarded([&] { attention_plan(plan).write_kv(kv_of(kv), view_of(&deref(k, "k"), "k"), view_of(v, "v"), stream); });
}

imbrex_status imbrex_plan_run(imbrex_plan* plan, const imbrex_inputs* inputs, const imbrex_outputs* outputs, void* stream) {
  return guarded([&] {
    std::vector<NamedTensor> score_tensors;
    attention_plan(plan).run(inputs_of(inputs, score_tensors), outputs_of(outputs), stream);
  });
}

imbrex_status imbrex_plan_run_short_conv(imbrex_plan* plan, const imbrex_short_conv_inputs* inputs,
                                         const imbrex_short_conv_outputs* outputs, void* stream) {
  return guarded([&] {
    of_family<std::unique_ptr<ShortConvPlan>>(deref(plan, "plan").plan, "plan")->run(inputs_of(inputs), outputs_of(outputs), stream);
  });
}

imbrex_status imbrex_plan_write_latents(imbrex_plan* plan, const imbrex_kv_cache* kv, const imbrex_tensor* latents,
                                        const imbrex_tensor* rope, void* stream) {
  return guarded(
      [&] { mla_plan(plan).write_kv(kv_of(kv), view_of(&deref(latents, "latents"), "latents"), view_of(rope, "rope"), stream); });
}

imbrex_status imbrex_plan_run_mla(imbrex_plan* plan, const imbrex_mla_inputs* inputs, const imbrex_mla_outputs* outputs, void* stream) {
  return guarded([&] { mla_plan(plan).run(inputs_of(inputs), outputs_of(outputs), stream); });
}

imbrex_status imbrex_plan_run_recurrent(imbrex_plan* plan, const imbrex_recurrent_inputs* inputs, const imbrex_recurrent_outputs* outputs,
                                        void* stream) {
  return guarded([&] {
    of_family<std::unique_ptr<RecurrentPlan>>(deref(plan, "plan").plan, "plan")->run(inputs_of(inputs), outputs_of(outputs), stream);
  });
}
