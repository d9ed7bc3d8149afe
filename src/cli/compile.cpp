// `imbrex compile`: compiles the GPU kernels of a model ahead of time, without a GPU, and shows what they take.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "cli/spec_options.h"
#include "conformance/kernel_ledger.h"
#include "core/cores.h"
#include "family/precompile.h"

namespace imbrex::cli {
namespace {

using nlohmann::ordered_json;

struct CompileArguments {
  std::string archs, folder, ledger, format = "table";
  SpecOptions spec;
  int jobs = 0, recheck = -1;
  bool layer_given = false;  // a model, or a layer that flags describe
  bool strict = false, renew = false, json = false;
};

constexpr const char* kArchs = "sm_80,sm_90a,sm_100a,sm_120";

ordered_json to_json(const PrecompiledKernel& kernel) {
  ordered_json entries = ordered_json::array();
  for (const PrecompiledEntry& e : kernel.entries) {
    entries.push_back({{"entry", e.name},
                       {"registers", e.registers},
                       {"spill_bytes", e.spill_bytes},
                       {"stack_bytes", e.stack_bytes},
                       {"smem_bytes", e.smem_bytes}});
  }
  return {{"family", kernel.family},
          {"file", kernel.file},
          {"arch", kernel.arch},
          {"constants", kernel.constants},
          {"compile_ms", kernel.compile_ms},
          {"cubin_bytes", kernel.cubin_bytes},
          {"entries", entries},
          {"recorded", kernel.left_out},
          {"problems", kernel.problems},
          {"error", kernel.error}};
}

serve::Table to_table(const std::vector<PrecompiledKernel>& kernels) {
  serve::Table table{{"kernel", "arch", "constants", ">registers", ">spills B", ">stack B", ">smem B", ">ms", ">cubin B"}, {}};
  for (const PrecompiledKernel& k : kernels) {
    // Figures of a whole file are in the row of its first entry point.
    std::string ms = !k.error.empty()   ? "failed"
                     : k.left_out       ? "recorded"
                     : k.compile_ms > 0 ? fmt::format("{:.0f}", k.compile_ms)
                                        : "cached";
    std::string bytes = k.left_out ? "" : fmt::format("{}", k.cubin_bytes);
    if (k.entries.empty()) table.rows.push_back({k.file, k.arch, k.constants, "", "", "", "", ms, bytes});
    for (const PrecompiledEntry& e : k.entries) {
      table.rows.push_back({e.name, k.arch, k.constants, fmt::format("{}", e.registers), fmt::format("{}", e.spill_bytes),
                            fmt::format("{}", e.stack_bytes), fmt::format("{}", e.smem_bytes), std::exchange(ms, ""),
                            std::exchange(bytes, "")});
    }
  }
  return table;
}

int run_compile(CompileArguments& o) {
  PrecompileRequest request{.archs = split(o.archs, ", "), .specs = {}, .folder = o.folder, .jobs = o.jobs};
  if (request.archs.empty()) request.archs = split(kArchs, ",");
  if (request.jobs == 0) request.jobs = default_num_threads();
  if (o.layer_given)
    for (const Named<LayerSpec>& named : specs_of(o.spec)) request.specs.push_back(named.spec);
  std::optional<KernelLedger> ledger;
  if (!o.ledger.empty()) {
    ledger.emplace(o.ledger);
    request.left_out = [&](const std::string& content) {
      return ledger->find(content) != nullptr && (o.recheck < 0 || KernelLedger::share(content) != o.recheck % KernelLedger::kShares);
    };
  }
  std::vector<PrecompiledKernel> kernels = precompile(request);

  std::string complaints;
  ordered_json j = ordered_json::array();
  int failed = 0, refused = 0, recorded = 0, again = 0, differ = 0;
  for (PrecompiledKernel& kernel : kernels) {
    if (const auto* const record = ledger ? ledger->find(kernel.content) : nullptr) {
      ++recorded;
      if (kernel.left_out) {
        kernel.entries = *record;
      } else {
        ++again;
        if (ledger_text(kernel.entries) != ledger_text(*record)) {
          ++differ;
          complaints += fmt::format("{} for {} ({}): expected, as {} has it, {}, got {}\n", kernel.file, kernel.arch, kernel.constants,
                                    o.ledger, ledger_text(*record), ledger_text(kernel.entries));
        }
      }
    }
    j.push_back(to_json(kernel));
    failed += !kernel.error.empty();
    refused += !kernel.problems.empty();
    if (!kernel.error.empty()) complaints += kernel.error + "\n";
    for (const std::string& problem : kernel.problems)
      complaints += fmt::format("{} for {} ({}): {}\n", kernel.file, kernel.arch, kernel.constants, problem);
  }
  if (o.json || o.format == "json") {
    fmt::print("{}\n", j.dump(2));
  } else {
    fmt::print("{}", print_as(to_table(kernels), o.format));
    if (o.format == "table") {
      fmt::print("\n{} kernel files in {}, {} failed, {} with spills, stack or warnings\n", kernels.size(),
                 o.folder.empty() ? kernel_compiler().cache_folder : o.folder, failed, refused);
      if (ledger) {
        fmt::print("{}: {} of them recorded, {} of these compiled again, {} not as recorded; {} without a record\n", o.ledger, recorded,
                   again, differ, int(kernels.size()) - recorded);
      }
    }
  }
  fmt::print(stderr, "{}", complaints);
  if (o.renew) {
    ledger->renew(request.archs, kernels);
    write_file(o.ledger, ledger->str());
  }
  return failed > 0 || (o.strict && refused + differ > 0) ? kCheckFailed : kOk;
}

}  // namespace

void add_compile(CLI::App& app, Action& action) {
  auto o = std::make_shared<CompileArguments>();
  CLI::App* sub = app.add_subcommand("compile", "Compile GPU kernels ahead of time; needs NVRTC, but no GPU");
  sub->add_option("--arch", o->archs, fmt::format("Architectures, separated by commas (default: {})", kArchs));
  const size_t others = sub->get_options().size();
  add_spec_options(*sub, o->spec);
  std::vector<CLI::Option*> of_layer = sub->get_options();
  of_layer.erase(of_layer.begin(), of_layer.begin() + long(others));
  sub->add_option("--out", o->folder, "Folder to fill, for IMBREX_CUDA_CACHE of another machine (default: the cache of this one)");
  sub->add_flag("--strict", o->strict, "Fail on spills, local memory and warnings of the compiler");
  CLI::Option* const ledger = sub->add_option("--ledger", o->ledger, "A file of clean kernels: those that it has are not compiled");
  sub->add_option("--recheck", o->recheck, "With --ledger: compile also a twentieth of what it has, that of this number, and compare")
      ->check(CLI::NonNegativeNumber)
      ->needs(ledger);
  sub->add_flag("--renew", o->renew, "With --ledger: write to the file, for the architectures, what is clean now")->needs(ledger);
  sub->add_option("--jobs", o->jobs, "Kernels to compile at the same time (0: one for each core)")->check(CLI::Range(0, 4096));
  sub->add_option("--format", o->format, "table, markdown, csv, json")
      ->check(CLI::IsMember({"table", "markdown", "csv", "json"}))
      ->capture_default_str();
  sub->add_flag("--json", o->json, "Like --format json");
  sub->footer(
      "Examples:\n"
      "  imbrex compile --arch sm_90a --model llama-3.1-8b --kv-dtype fp8_e4m3\n"
      "  imbrex compile --arch sm_90a --model llama-3.1-8b --mask-mod 'int doc[,]; doc[batch, q] == doc[batch, kv]'\n"
      "  imbrex compile --arch sm_90a --heads 32/8 --head-dim 64 --window 128 --sinks\n"
      "  imbrex compile --arch sm_80,sm_90a --out kernels && IMBREX_CUDA_CACHE=kernels imbrex info\n"
      "  imbrex compile --strict\n"
      "  imbrex compile --strict --ledger tests/cuda/clean_kernels.txt --renew\n\n"
      "With a model, or a layer described as for select and bench: the kernels that its plans may load, with its expressions in them.\n"
      "Otherwise a set that covers all kinds of kernels. Exit code 1 when a kernel does not compile, or with --strict has spills, local "
      "memory or warnings, or is not what the ledger says;\n"
      "3 without NVRTC.");
  sub->callback([o, of_layer, &action] {
    o->layer_given = std::ranges::any_of(of_layer, [](const CLI::Option* option) { return option->count() > 0; });
    action = [o] { return run_compile(*o); };
  });
}

}  // namespace imbrex::cli
