// `imbrex info`: what this machine and this build can do.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "core/env.h"
#include "family/precompile.h"
#include "imbrex/device_platform.h"
#include "imbrex/model.h"
#include "serve/ceilings.h"

namespace imbrex::cli {
namespace {

struct InfoArguments {
  bool json = false, measure = false;
  int threads = 0;
};

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif

struct ListedBackend {
  std::string_view family;
  const BasicBackend* backend;
};
std::vector<ListedBackend> list_backends() {
  std::vector<ListedBackend> list;
  for_each_family([&]<class Family>(std::type_identity<Family>) {
    for (const BackendOf<Family>* backend : backends<Family>()) list.push_back({Family::name, backend});
  });
  return list;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

int run_info(const InfoArguments& o) {
  const DeviceInfo cpu = probe_cpu();
  serve::Ceilings ceilings;
  if (o.measure) ceilings = serve::measure_ceilings(cpu, o.threads);
  const std::vector<ListedBackend> listed = list_backends();
  std::string no_gpu;
  const auto gpus = probe_cuda(&no_gpu);
  const std::vector<DeviceInfo> plugins = probe_plugins();
  const KernelCompiler compiler = kernel_compiler();
  if (o.json) {
    nlohmann::ordered_json j;
    j["version"] = IMBREX_VERSION;
    j["compiler"] = kCompiler;
    j["devices"] = nlohmann::ordered_json::array();
    j["devices"].push_back({{"device", cpu.device.str()},
                            {"name", cpu.name},
                            {"isa", to_string(cpu.isa)},
                            {"isa_note", cpu.isa_note},
                            {"threads", cpu.num_workers},
                            {"l2_bytes", cpu.l2_bytes},
                            {"l3_bytes", cpu.l3_bytes},
                            {"memory_bytes", cpu.memory_bytes}});
    for (const DeviceInfo& gpu : gpus) {
      j["devices"].push_back({{"device", gpu.device.str()},
                              {"name", gpu.name},
                              {"sm", gpu.sm},
                              {"multiprocessors", gpu.num_workers},
                              {"l2_bytes", gpu.l2_bytes},
                              {"memory_bytes", gpu.memory_bytes},
                              {"max_smem_bytes", gpu.max_smem_bytes}});
    }
    for (const DeviceInfo& device : plugins) {
      j["devices"].push_back({{"device", device.device.str()},
                              {"name", device.name},
                              {"workers", device.num_workers},
                              {"l2_bytes", device.l2_bytes},
                              {"memory_bytes", device.memory_bytes}});
    }
    j["cuda"] = {{"no_device", no_gpu}, {"compiler", compiler.name}, {"no_compiler", compiler.why}, {"kernels", compiler.cache_folder}};
    for (const auto& [family, backend] : listed)
      j["backends"].push_back({{"family", family}, {"name", backend->name()}, {"description", backend->description()}});
    for (const auto& variable : env::variables()) {
      const auto value = env::get(variable.name);
      j["environment"].push_back(
          {{"name", variable.name}, {"value", value ? nlohmann::ordered_json(*value) : nullptr}, {"meaning", variable.meaning}});
    }
    for (const auto& preset : model_presets()) j["models"].push_back(preset.name);
    if (o.measure) {
      j["ceilings"] = {{"threads", ceilings.num_threads},         {"dram_read_bytes_per_s", ceilings.dram_read},
                       {"l3_read_bytes_per_s", ceilings.l3_read}, {"fma_flop_per_s", ceilings.fma},
                       {"bf16_pairs_flop_per_s", ceilings.pairs}, {"amx_flop_per_s", ceilings.amx}};
    }
    fmt::print("{}\n", j.dump(2));
    return kOk;
  }

  fmt::print("imbrex {} ({})\n\nDevices\n  cpu  {}\n", IMBREX_VERSION, kCompiler, cpu.str());
  fmt::print("       L2 {} a core, L3 {}, memory {}\n", serve::format_bytes(double(cpu.l2_bytes)),
             serve::format_bytes(double(cpu.l3_bytes)), serve::format_bytes(double(cpu.memory_bytes)));
  for (const DeviceInfo& gpu : gpus) {
    fmt::print("  {}  {}\n          memory {}, shared memory of a thread block {}\n", gpu.device.str(), gpu.str(),
               serve::format_bytes(double(gpu.memory_bytes)), serve::format_bytes(double(gpu.max_smem_bytes)));
  }
  if (gpus.empty()) fmt::print("  cuda {}\n", no_gpu);
  for (const DeviceInfo& device : plugins) fmt::print("  {}  {}, of a plug-in\n", device.device.str(), device.str());
  fmt::print("\nGPU kernels\n  compiler  {}\n  kept in   {}\n", compiler.name.empty() ? first_line(compiler.why) : compiler.name,
             compiler.cache_folder.empty() ? "no folder: neither a cache folder nor a home is set" : compiler.cache_folder);
  if (o.measure) {
    fmt::print("\nMeasured with {} threads\n  read from DRAM   {:>8.1f} GB/s\n", ceilings.num_threads, ceilings.dram_read / 1e9);
    if (ceilings.l3_read > 0) fmt::print("  read from L3     {:>8.1f} GB/s\n", ceilings.l3_read / 1e9);
    fmt::print("  f32 multiply-add {:>8.1f} GFLOP/s\n", ceilings.fma / 1e9);
    if (ceilings.pairs > 0) fmt::print("  pairs of bf16    {:>8.1f} GFLOP/s\n", ceilings.pairs / 1e9);
    if (ceilings.amx > 0) fmt::print("  bf16 tiles (AMX) {:>8.1f} GFLOP/s\n", ceilings.amx / 1e9);
  }
  serve::Table table{{"layers of", "backend", "what it is"}, {}};
  for (const auto& [family, backend] : listed)
    table.rows.push_back({std::string(family), std::string(backend->name()), std::string(backend->description())});
  fmt::print("\n{}", table.text());
  table = {{"environment", "value", "meaning"}, {}};
  for (const auto& variable : env::variables())
    table.rows.push_back({variable.name, env::get(variable.name).value_or("-"), variable.meaning});
  fmt::print("\n{}\nModels\n", table.text());
  std::string line;
  for (const auto& preset : model_presets()) {
    if (line.size() + preset.name.size() > 100) {
      fmt::print(" {}\n", line);
      line.clear();
    }
    line += fmt::format(" {}", preset.name);
  }
  fmt::print(" {}\n", line);
  return kOk;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  auto o = std::make_shared<InfoArguments>();
  CLI::App* sub = app.add_subcommand("info", "Devices, instruction sets, backends, environment variables, measured ceilings");
  sub->add_flag("--measure", o->measure, "Measure read bandwidth and arithmetic rate (about two seconds)");
  sub->add_option("--threads", o->threads, "Threads to measure with (0: one for each core)")->check(CLI::NonNegativeNumber);
  sub->add_flag("--json", o->json, "Print JSON");
  sub->footer("Examples:\n  imbrex info\n  imbrex info --measure --json");
  sub->callback([o, &action] { action = [o] { return run_info(*o); }; });
}

}  // namespace imbrex::cli
