#pragma once
// The options of `imbrex bench`, with and without --zoo.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/kernel_choices.h"
#include "cli/spec_options.h"
#include "core/check.h"
#include "imbrex/select.h"
#include "serve/batch_grammar.h"
#include "serve/bench.h"

namespace imbrex::cli {

struct BenchArguments {
  std::string family = "attention";
  SpecOptions spec;
  ShortConvSpec short_conv{.dim = 2048};
  MlaSpec mla{.num_heads = 128};  // the dimensions; the rest is in `spec`
  std::string recurrent_layer = "qwen3-next";
  DType state_dtype = DType::f32;
  std::string state_layout = to_string(StateLayout::v_first);
  bool with_outputs = false;
  int k_heads = 0, v_heads = 0;  // of recurrent layers; 0: those of the layer
  bool heads_given = false;
  serve::BenchOptions bench;
  std::vector<std::string> batches;
  std::string device = "cpu", backends, cases, only, format = "table";
  int threads = 0;
  double min_time = 0.3, max_time = 10, noise = 1;
  double seconds = 0;  // of the zoo; 0: as long as it takes
  bool json = false, verbose = false, no_ceilings = false, no_check = false, zoo = false, list = false;
  bool page_given = false, kv_dtype_given = false, time_given = false;  // options that the zoo varies by itself
};

// Prefill, chunked prefill, decode of few and of many requests, and a mix.
std::vector<std::string> batches_of(const BenchArguments&);
std::vector<serve::BenchRequest> requests_of(const std::vector<serve::BatchItem>&);
// The table in the format that was asked for, or the array; the exit code. `notes` are printed below a table.
int print_bench(const BenchArguments&, const DeviceInfo&, int num_threads, const serve::Table&, const nlohmann::ordered_json&,
                std::string_view notes);

// Layers of models in the steps that engines run, and the slowest of them.
int run_zoo(const BenchArguments&, const DeviceInfo&);
// --family short_conv, mla, and recurrent
int run_mla_bench(const BenchArguments&, const DeviceInfo&, const ParallelFor& threads);
int run_short_conv_bench(const BenchArguments&, const DeviceInfo&, const ParallelFor& threads);
int run_recurrent_bench(const BenchArguments&, const DeviceInfo&, const ParallelFor& threads);

// Of families that are timed on every backend: those that --backend names, each of which must run the spec, or all but the reference that
// run it. Error select.forced.
template <class Family>
std::vector<const BackendOf<Family>*> backends_named(const typename Family::Spec& spec, const DeviceInfo& device,
                                                     const std::string& names) {
  std::vector<const BackendOf<Family>*> list;
  for (const std::string& name : split(names, ",")) {
    SelectOptions options;
    options.forced = name;
    const auto selection = select<Family>(spec, device, options);
    check(selection.rule.starts_with("forced"), "select.forced", "expected a backend of {}, got {}", Family::name, selection.rule);
    list.push_back(selection.backend);
  }
  if (!list.empty()) return list;
  for (const BackendOf<Family>* backend : backends<Family>())
    if (backend->unsupported(spec, device).empty() && backend->name() != "reference") list.push_back(backend);
  return list;
}

// What bench tells of a layer, a batch and a backend, whatever the family.
struct BenchOf {
  std::string name, spec;
  std::string_view backend;
  const DeviceInfo& device;
  int threads;
};
// Figures of a family's own: cells of the table, and fields of the entry.
struct OwnFigures {
  std::vector<std::string> cells;
  nlohmann::ordered_json fields;
};

template <class Result>
std::vector<std::string> bench_row(const BenchOf& of, const Result& r, const serve::Share& share, const OwnFigures& own) {
  std::vector<std::string> row{of.name, std::string(of.backend), fmt::format("{:.1f}", r.median_s * 1e6),
                               fmt::format("{:.1f}", r.best_s * 1e6), fmt::format("{:.1f}", 100 * r.noise)};
  row.insert(row.end(), own.cells.begin(), own.cells.end());
  row.push_back(share.of_ceiling > 0 ? fmt::format("{:.0f} % {}", 100 * share.of_ceiling, share.bound) : "-");
  row.push_back(fmt::format("{:.1f}", r.plan_s * 1e6));
  return row;
}
template <class Result>
nlohmann::ordered_json bench_entry(const BenchOf& of, const Result& r, const serve::Share& share, const OwnFigures& own,
                                   const std::vector<KernelChoice>& kernels) {
  nlohmann::ordered_json j{{"case", of.name},       {"spec", of.spec},        {"backend", of.backend}, {"device", of.device.name},
                           {"threads", of.threads}, {"median_s", r.median_s}, {"best_s", r.best_s},    {"noise", r.noise},
                           {"samples", r.samples},  {"plan_s", r.plan_s}};
  j.update(own.fields);
  j.update({{"share_of_ceiling", share.of_ceiling},
            {"ceiling", share.bound},
            {"captured", r.captured},
            {"check_error", r.check_error},
            {"check_allowed", r.check_allowed},
            {"plan", r.plan},
            {"kernels", to_json(kernels)}});
  return j;
}

// Their options: ShortConvBenchOptions, MlaBenchOptions, RecurrentBenchOptions.
template <class Options>
Options bench_options(const BenchArguments& o, const ParallelFor& threads) {
  Options options;
  static_cast<serve::TimingOptions&>(options) = o.bench;
  options.seed = o.bench.seed;
  options.copies = o.bench.kv_copies;
  options.check = o.bench.check;
  options.threads = threads;
  return options;
}

}  // namespace imbrex::cli
