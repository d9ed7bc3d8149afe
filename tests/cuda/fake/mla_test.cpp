// Latent attention's plan for GPUs on the fake driver: its cases beside the reference, both ways, eager and from graphs; what it launches
// and refuses; that a failed update changes nothing. Attention and products are host code there; the kernels between them are their texts,
// compiled for the host (tests/cuda/lanes).
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>

#include "conformance/mla/cases.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/lanes/mla_variants.h"
#include "cuda/mla/rounds.h"
#include "expect_error.h"
#include "mla/backend.h"
#ifdef IMBREX_LANES
#include "cuda/lanes/library.h"
#endif

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code, imbrex::test::mla_variants, imbrex::test::MlaVariant;

#ifdef IMBREX_LANES
// The kernel of a launch, as a library.
void run_text(const fake::Launch& launch, const std::string& variant) {
  static std::map<std::string, imbrex::test::Library> libraries;
  const bool gathers = launch.entry.starts_with("gather_latents");
  const std::string name = launch.entry + "_" + (gathers ? variant : "latents_bf16");
  if (!libraries.contains(name)) libraries[name] = imbrex::test::open_library(name);
  libraries[name].run(launch.all_params.at(0).data(), nullptr, {.blocks = int(std::min(launch.grid_x, 3u))});
}
#endif

class FakeMla : public testing::Test {
 protected:
  void SetUp() override {
#ifndef IMBREX_LANES
    GTEST_SKIP() << "builds with sanitizers have no libraries of kernels for the host";
#endif
  }
  ~FakeMla() override {
    drop_mla_mirrors();
    fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear();
  }

  // The library of gather_latents.cu for a spec's types; empty: there is none.
  static std::string variant_of(const MlaSpec& spec) {
    for (const MlaVariant& v : mla_variants())
      if (v.runs(spec)) return v.name;
    return {};
  }

  // Plans of this spec compute from now on.
  static void use(const MlaSpec& spec) {
    std::vector<AttentionSpec> specs{spec.latent_spec()};
    if (!spec.absorbed && can_expand_on_device(spec.mask))
      for (const AttentionSpec& round : round_specs(spec)) specs.push_back(round);
    fake::run_on_host(specs);
    for (const KernelKey& key : {gather_latents_key("sm_90a", spec), copy_rows_key("sm_90a"), add_parts_key("sm_90a")})
      fake::put_into_cache(key);
    for (const char* entry : {"gather_latents_aligned", "gather_latents_unaligned"})
      fake::state().param_sizes[entry] = {sizeof(GatherLatentsParams)};
    for (const char* entry : {"copy_rows_16", "copy_rows_2"}) fake::state().param_sizes[entry] = {sizeof(CopyRowsParams)};
    fake::state().param_sizes["add_parts"] = {sizeof(AddPartsParams)};
#ifdef IMBREX_LANES
    fake::state().on_launch = [others = fake::state().on_launch, name = variant_of(spec)](const fake::Launch& launch) {
      const bool ours = launch.entry.starts_with("gather_latents") || launch.entry.starts_with("copy_rows") || launch.entry == "add_parts";
      ours ? run_text(launch, name) : others(launch);
    };
#endif
  }

  static MlaPlanMaker forced(bool expand, int chunk) {
    return [=](const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
      use(spec);
      MlaParts parts = dynamic_cast<const MlaCompositeBackend&>(backend).parts(spec, device, options);
      parts.expand = expand, parts.chunk_keys = chunk;
      return make_mla_plan(spec, device, options, std::move(parts));
    };
  }

  // Requests with more queries than a tenth of their keys are expanded.
  static MlaPlanMaker both_ways(int chunk) {
    return [=](const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
      use(spec);
      MlaParts parts = dynamic_cast<const MlaCompositeBackend&>(backend).parts(spec, device, options);
      parts.rates = {.products = 1, .expansion = 10, .latent = 1e30, .expanded = 1e30, .bytes = 1e30}, parts.chunk_keys = chunk;
      return make_mla_plan(spec, device, options, std::move(parts));
    };
  }

  DeviceInfo device = probe_cuda().at(0);
  const BackendOf<MlaFamily>& sm90 = *find_backend<MlaFamily>("cuda_sm90");
  const BackendOf<MlaFamily>& sm80 = *find_backend<MlaFamily>("cuda_sm80");
};

TEST_F(FakeMla, CasesMatchTheReference) {
  int ran = 0;
  std::set<std::string> entries;
  for (const MlaCase& c : mla_cases()) {
    if (!sm80.unsupported(c.spec, device).empty()) continue;
    const BackendOf<MlaFamily>& backend = ran % 2 == 0 && sm90.unsupported(c.spec, device).empty() ? sm90 : sm80;
    const MlaCaseInputs inputs = make_inputs(c);
    const Expected expected = expect(inputs);
    RunOptions options = default_options(c.attention);
    struct Way {
      const char* name;
      MlaPlanMaker make;
      bool expands = true, in_graph = false;
    };
    for (const Way& way : {Way{"in latent space", forced(false, 0), false}, Way{"in a graph", forced(false, 0), false, true},
                           Way{"expanded by 128", forced(true, 128)}, Way{"expanded by 24", forced(true, 24)}, Way{"both ways", both_ways(40)}}) {
      if (way.expands && (c.spec.absorbed || !can_expand_on_device(c.spec.mask) || variant_of(c.spec).empty())) continue;
      const RunResult result = run_case(backend, device, inputs, options, way.make, {.in_graph = way.in_graph});
      const Judgement judgement = judge(expected, result);
      EXPECT_TRUE(judgement.pass()) << c.attention.name << " " << way.name << ": " << judgement.failure;
      EXPECT_TRUE(result.violations.empty()) << c.attention.name << ": " << result.violations.front();
      options.check_cache = false;
    }
    for (const fake::Launch& launch : fake::state().launches) entries.insert(launch.entry);
    fake::state().launches.clear();
    ++ran;
  }
  EXPECT_GT(ran, 30);
  for (const char* entry : {"gather_latents_aligned", "gather_latents_unaligned", "copy_rows_16", "copy_rows_2", "add_parts"})
    EXPECT_TRUE(entries.contains(entry)) << entry;
}

}  // namespace
}  // namespace imbrex::cuda
