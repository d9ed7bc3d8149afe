// See mla_targets.h.
#include "mla_targets.h"

#include "mla/backend.h"

namespace imbrex::test {

const std::vector<MlaTarget>& mla_targets() {
  static const std::vector<MlaTarget> all = [] {
    std::vector<MlaTarget> result;
    std::set<std::string> seen;
    const MlaSpec spec{.num_heads = 4};
    for (const BackendOf<MlaFamily>* backend : backends<MlaFamily>())
      for (const DeviceInfo& device : test_devices()) {
        if (!backend->unsupported(spec, device).empty()) continue;
        std::string kernels(backend->name());
        for (const KernelChoice& choice : backend->kernel_choices(spec, device)) kernels += " " + choice.str();
        if (seen.insert(kernels).second) result.push_back({backend, device});
      }
    return result;
  }();
  return all;
}

namespace {

template <class Change>
MlaPlanMaker with_parts(const Change& change) {
  return [=](const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
    MlaParts parts = dynamic_cast<const MlaCompositeBackend&>(backend).parts(spec, device, options);
    change(parts);
    return make_mla_plan(spec, device, options, std::move(parts));
  };
}

}  // namespace

MlaPlanMaker forced_way(bool expand, int chunk_keys) {
  return with_parts([=](MlaParts& parts) { parts.expand = expand, parts.chunk_keys = chunk_keys; });
}

MlaPlanMaker both_ways(int chunk_keys) {
  return with_parts([=](MlaParts& parts) {
    constexpr double kFree = 1e30;
    parts.rates = {.products = 1, .expansion = 10, .latent = kFree, .expanded = kFree, .bytes = kFree};
    parts.chunk_keys = chunk_keys;
  });
}

MlaPlanMaker in_slices(bool expand, int tokens, int heads) {
  return with_parts([=](MlaParts& parts) {
    parts.expand = expand, parts.chunk_keys = 48;
    parts.slice_tokens = tokens, parts.group_heads = heads;
  });
}

bool is_composite(const BackendOf<MlaFamily>& backend) { return dynamic_cast<const MlaCompositeBackend*>(&backend) != nullptr; }

const MlaCaseInputs& inputs_of(const MlaCase& c) {
  return kept<MlaCaseInputs, 16>(c, [](const MlaCase& of) { return make_inputs(of); });
}
const Expected& expected_of(const MlaCase& c) {
  return kept<Expected, 16>(c, [](const MlaCase& of) { return expect(inputs_of(of)); });
}

}  // namespace imbrex::test
