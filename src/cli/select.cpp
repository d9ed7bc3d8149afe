// `imbrex select`: which backend runs each kind of layer of a model on a device, with every reason.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "cli/kernel_choices.h"
#include "cli/spec_options.h"
#include "imbrex/error.h"
#include "imbrex/select.h"
#include "model/groups.h"

namespace imbrex::cli {
namespace {

using nlohmann::ordered_json;

struct SelectArguments {
  SpecOptions spec;
  SelectOptions select;
  std::string device = "cpu", phase = "any";
  bool json = false, verbose = false;
};

template <class Family>
ordered_json to_json(const SelectionOf<Family>& selection, const std::vector<int>& layers, const typename Family::Spec& spec,
                     const std::vector<KernelChoice>& kernels) {
  ordered_json j;
  j["layers"] = layers;
  j["family"] = Family::name;
  j["spec"] = spec.str();
  j["backend"] = selection.backend ? ordered_json(selection.backend->name()) : nullptr;
  j["rule"] = selection.rule;
  j["kernels"] = cli::to_json(kernels);
  j["candidates"] = ordered_json::array();
  for (const CandidateOf<Family>& candidate : selection.candidates) {
    ordered_json reasons = ordered_json::array();
    for (const Reason& reason : candidate.reasons) {
      reasons.push_back({{"code", reason.code}, {"wanted", reason.wanted}, {"actual", reason.actual}});
    }
    j["candidates"].push_back({{"backend", candidate.backend->name()}, {"reasons", reasons}});
  }
  j["proposals"] = selection.proposals;
  return j;
}

// A family that no backend runs yet: the refusal by name, and what each backend says of family and device.
int print_refusal(const SelectArguments& o, const DeviceInfo& device, const Error& error) {
  AttentionSpec probe;  // only to ask what the backends say of the device
  probe.num_q_heads = probe.num_kv_heads = 1;
  probe.head_dim_qk = probe.head_dim_v = 128;
  const Reason family{error.code(), "a family of softmax attention over cached keys and values", o.spec.model};
  ordered_json j{{"model", o.spec.model}, {"device", device.str()}, {"backend", nullptr}, {"rule", error.what()}};
  std::string text = fmt::format("{} on {}\nno backend ({})\n", o.spec.model, device.str(), error.what());
  for (const BackendOf<AttentionFamily>* backend : backends()) {
    std::vector<Reason> reasons{family};
    for (const Reason& reason : backend->unsupported(probe, device)) {
      if (reason.code.starts_with("device.")) reasons.push_back(reason);
    }
    text += fmt::format("  {:<12} refuses    {}\n", backend->name(), backend->description());
    ordered_json list = ordered_json::array();
    for (const Reason& reason : reasons) {
      text += fmt::format("  {:<12}   - {}\n", "", reason.str());
      list.push_back({{"code", reason.code}, {"wanted", reason.wanted}, {"actual", reason.actual}});
    }
    j["candidates"].push_back({{"backend", backend->name()}, {"reasons", list}});
  }
  fmt::print("{}", o.json ? j.dump(2) + "\n" : text);
  return kUnsupported;
}

int run_select(SelectArguments& o) {
  const DeviceInfo device = describe_device(o.device);
  o.select.phase = o.phase == "prefill" ? Phase::prefill : o.phase == "decode" ? Phase::decode : Phase::any;
  std::vector<Named<LayerSpec>> specs;
  try {
    specs = specs_of(o.spec);
  } catch (const Error& error) {
    if (error.code() != "model.family.later") throw;
    return print_refusal(o, device, error);
  }

  ordered_json j{{"model", o.spec.model}, {"device", device.str()}, {"kinds", ordered_json::array()}};
  std::string text = fmt::format("{}{}\n", o.spec.model.empty() ? "" : o.spec.model + " on ", device.str());
  bool all_run = true;
  for (const Named<LayerSpec>& named : specs) {
    std::visit(
        [&]<class Spec>(const Spec& spec) {
          const auto selection = select<FamilyOf<Spec>>(spec, device, o.select);
          all_run = all_run && selection.backend != nullptr;
          const auto kernels = selection.backend ? selection.backend->kernel_choices(spec, device) : std::vector<KernelChoice>{};
          j["kinds"].push_back(to_json<FamilyOf<Spec>>(selection, named.layers, spec, kernels));
          text += fmt::format("\n{}{}\n{}", named.name.empty() ? "" : named.name + ": ", spec.str(), selection.str());
          if (o.verbose) text += lines_of(kernels);
        },
        named.spec);
  }
  const std::optional<ModelSpec> model = model_of(o.spec);
  const std::vector<std::string> notes = model ? model->notes : std::vector<std::string>();
  j["cache_groups"] = ordered_json::array();
  for (const CacheGroup& group : model ? model->cache_groups : std::vector<CacheGroup>()) {
    j["cache_groups"].push_back({{"name", group.name},
                                 {"layers", model->numbers_of(group.layers)},
                                 {"bytes_per_token", group.bytes_per_token},
                                 {"bytes_per_request", group.bytes_per_slot}});
  }
  if (model && !model->cache_groups.empty()) text += "\ncache\n" + group_lines(*model);
  j["notes"] = notes;
  if (!notes.empty()) text += "\n";
  for (const std::string& note : notes) text += fmt::format("note: {}\n", note);
  fmt::print("{}", o.json ? j.dump(2) + "\n" : text);
  return all_run ? kOk : kUnsupported;
}

}  // namespace

void add_select(CLI::App& app, Action& action) {
  auto o = std::make_shared<SelectArguments>();
  CLI::App* sub = app.add_subcommand("select", "Which backend runs each kind of layer, and why not the others");
  add_spec_options(*sub, o->spec);
  sub->add_option("--device", o->device, "cpu, cuda:0, h200, b200, a100, ..., or a described CPU such as \"avx512,32 threads\"")
      ->capture_default_str();
  sub->add_option("--backend", o->select.forced, "Force a backend, by its name or one that vLLM or SGLang users know");
  sub->add_option("--prefill-backend", o->select.forced_prefill, "The same for prefill only (with --phase prefill)");
  sub->add_option("--decode-backend", o->select.forced_decode, "The same for decode only (with --phase decode)");
  sub->add_option("--phase", o->phase, "any, prefill, decode")->check(CLI::IsMember({"any", "prefill", "decode"}))->capture_default_str();
  sub->add_flag("-v,--verbose", o->verbose, "Also the kernels of each chosen backend, and the sizes of their tiles");
  sub->add_flag("--json", o->json, "Print JSON; it has the kernels too");
  sub->footer(
      "Examples:\n"
      "  imbrex select --model gpt-oss-20b\n"
      "  imbrex select --model llama-3.1-8b --device h200 -v\n"
      "  imbrex select --model lfm2-1.2b\n"
      "  imbrex select --model kimi-linear-48b-a3b\n"
      "  imbrex select --heads 64/8 --head-dim 80 --kv-dtype fp8_e4m3 --window 4096 --device \"avx512,32 threads\"\n"
      "  imbrex select --model llama-3.1-8b --backend intel_amx\n\n"
      "A model may have layers of several families (LFM2: attention and short convolutions; Kimi-Linear: latent attention and KDA). A "
      "forced name that one of them has is for "
      "that\n"
      "family alone; the others go by their order, and say so. Exit code 3 when nothing runs a layer.");
  sub->callback([o, &action] { action = [o] { return run_select(*o); }; });
}

}  // namespace imbrex::cli
