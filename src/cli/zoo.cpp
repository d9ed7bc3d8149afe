// `imbrex bench --zoo`: looks for cliffs in the layers of published models, or of a given one.
#include "serve/zoo.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/progress.h"
#include "core/check.h"
#include "core/cores.h"
#include "family/precompile.h"
#include "imbrex/error.h"
#include "imbrex/select.h"

namespace imbrex::cli {
namespace {

using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

// The longest that a call may take by its ceiling, in seconds: larger cells run with fewer or shorter requests.
constexpr double kCpuCall = 0.03, kGpuCall = 0.05;
constexpr int kWorst = 10;
constexpr int kAgain = 2;  // times that cells below the floor are measured once more

std::vector<serve::ZooCell> cells_asked(const BenchArguments& o) {
  std::vector<serve::ZooCell> cells;
  if (o.spec.model.empty()) {
    cells = serve::published_cells();
  } else {
    std::vector<AttentionSpec> layers;
    for (const Named<AttentionSpec>& named : attention_specs_of(o.spec)) layers.push_back(named.spec);
    serve::ZooAxes axes;
    if (o.page_given) axes.pages = {o.spec.spec.block_size};
    if (o.kv_dtype_given) axes.kv_dtypes = {parse_dtype(o.spec.kv_dtype)};
    cells = serve::cells_of(layers, axes);
  }
  std::regex only;
  try {
    only.assign(o.only);
  } catch (const std::regex_error& error) {
    fail("cli.only", "a regular expression, got \"{}\" ({})", o.only, error.what());
  }
  const size_t all = cells.size();
  std::erase_if(cells, [&](const serve::ZooCell& cell) { return !std::regex_search(cell.name(), only); });
  check(!cells.empty(), "cli.only", "a pattern that some of the {} cells match (see --list), got \"{}\"", all, o.only);
  return cells;
}

class Zoo {
 public:
  Zoo(const BenchArguments& o, const DeviceInfo& device)
      : device_(device), options_(o.bench), gpu_(device.device.type == DeviceType::cuda), ceilings_(serve::ceilings_of(device, o.threads)) {
    select_.forced = o.backends;
    if (!o.time_given) options_.min_seconds = 0.1, options_.max_seconds = 1, options_.target_noise = 0.03;
  }

  bool gpu() const { return gpu_; }

  serve::ZooCell fitted(serve::ZooCell cell) const {
    const double call = gpu_ ? kGpuCall : kCpuCall, most = double(device_.memory_bytes) / 8;
    const double bytes = ceilings_.dram_read > 0 ? std::min(most, call * ceilings_.dram_read) : most;
    const double peak = ceilings_.flops_for(device_.isa == CpuIsa::amx ? "cpu_amx" : "", to_string(cell.spec.q_dtype));
    return serve::fitted(std::move(cell), bytes, peak > 0 ? call * peak : 1e13);
  }

  // Kernels of all cells at once, by as many threads as there are cores: one by one they would take most of the time.
  void compile(const std::vector<serve::ZooCell>& cells) const {
    if (!gpu_ || kernel_compiler().name.empty()) return;
    PrecompileRequest request{.archs = {kernel_arch(device_)}, .jobs = default_num_threads()};
    for (const serve::ZooCell& cell : cells) request.specs.push_back(cell.spec);
    precompile(request);
  }

  serve::ZooResult measure(const serve::ZooCell& cell) {
    serve::ZooResult result{.name = cell.name(), .group = cell.group()};
    try {
      const Selection selection = select(cell.spec, device_, select_);
      if (!selection.backend || selection.backend->name() == "reference") {  // that one is not for speed
        result.problem = "no backend";
        return result;
      }
      const BackendOf<AttentionFamily>& backend = *selection.backend;
      result.backend = backend.name();
      serve::BenchOptions options = options_;
      options.launch = cell.launch;
      result.bench = serve::bench(backend, cell.spec, device_, cell.requests, with_copies(options, cell));
      result.share = share_of(result.bench, backend, cell.spec, ceilings_, device_);
      result.share.of_ceiling += call_seconds(backend, result.bench.captured) / result.bench.median_s;
    } catch (const Error& error) {
      result.problem = error.what();
    }
    return result;
  }

 private:
  // On a CPU the calls take turns at several caches, so that keys come from memory, as those of a model's many layers do.
  serve::BenchOptions with_copies(serve::BenchOptions options, const serve::ZooCell& cell) const {
    if (!gpu_ && options.kv_copies == 0) {
      const double bytes = std::max(serve::work_of(cell.spec, cell.requests).kv_bytes, 1.0);
      options.kv_copies = int(std::clamp(2 * double(device_.l3_bytes) / bytes, 1.0, 64.0));
    }
    return options;
  }

  // The time of a call that has almost no work.
  double call_seconds(const BackendOf<AttentionFamily>& backend, bool captured) {
    const auto [found, absent] = call_seconds_.try_emplace({std::string(backend.name()), captured}, 0.0);
    if (absent) {
      AttentionSpec spec;
      spec.num_q_heads = spec.num_kv_heads = 1;
      spec.head_dim_qk = spec.head_dim_v = 64;
      serve::BenchOptions options = options_;
      options.check = false;
      options.launch = captured ? serve::BenchLaunch::graph : serve::BenchLaunch::eager;
      try {
        found->second = serve::bench(backend, spec, device_, {{1, 16}}, options).median_s;
      } catch (const Error&) {  // a backend that does not run this: then nothing is known, and shares are a little smaller
      }
    }
    return found->second;
  }

  DeviceInfo device_;
  serve::BenchOptions options_;
  SelectOptions select_;
  bool gpu_;
  serve::Ceilings ceilings_;
  std::map<std::pair<std::string, bool>, double> call_seconds_;
};

std::vector<std::string> row_of(const serve::ZooResult& r, double unit) {
  if (!r.problem.empty()) return {r.name, r.backend, r.problem};
  return {r.name,
          r.backend,
          fmt::format("{:.1f}", r.bench.median_s * 1e6),
          fmt::format("{:.2f}", r.bench.kv_bytes / r.bench.median_s / unit),
          fmt::format("{:.1f}", r.bench.flops / r.bench.median_s / unit),
          fmt::format("{:.0f} % {}", 100 * r.share.of_ceiling, r.share.bound),
          fmt::format("{:.2f}", r.beside)};
}

ordered_json to_json(const serve::ZooResult& r) {
  ordered_json j{{"cell", r.name}, {"group", r.group}, {"backend", r.backend}};
  if (!r.problem.empty()) {
    j["problem"] = r.problem;
    return j;
  }
  j.update({{"median_s", r.bench.median_s},
            {"noise", r.bench.noise},
            {"kv_bytes", r.bench.kv_bytes},
            {"flops", r.bench.flops},
            {"kv_copies", r.bench.kv_copies},
            {"captured", r.bench.captured},
            {"share_of_ceiling", r.share.of_ceiling},
            {"ceiling", r.share.bound},
            {"beside", r.beside},
            {"cliff", r.beside < serve::kCliff},
            {"plan", r.bench.plan}});
  return j;
}

void print_results(const BenchArguments& o, const DeviceInfo& device, bool gpu, std::vector<serve::ZooResult>& results) {
  const double unit = gpu ? 1e12 : 1e9;
  serve::Table table{{"cell", "backend", ">µs", gpu ? ">KV TB/s" : ">KV GB/s", gpu ? ">TFLOP/s" : ">GFLOP/s", ">of ceiling", ">beside"},
                     {}};
  for (const serve::ZooResult& r : results) table.rows.push_back(row_of(r, unit));
  if (o.format != "table") {
    fmt::print("{}", print_as(table, o.format));
    return;
  }
  fmt::print("{}\n\n{}", device.name, table.text());
  std::vector<const serve::ZooResult*> ran;
  for (const serve::ZooResult& r : results) {
    if (r.problem.empty()) ran.push_back(&r);
  }
  const size_t worst = std::min(ran.size(), size_t(kWorst));
  std::partial_sort(ran.begin(), ran.begin() + int64_t(worst), ran.end(),
                    [](const serve::ZooResult* a, const serve::ZooResult* b) { return a->beside < b->beside; });
  table.rows.clear();
  for (size_t i = 0; i < worst; ++i) table.rows.push_back(row_of(*ran[i], unit));
  fmt::print("\nThe slowest beside the median of their kind\n\n{}", table.text());
}

}  // namespace

int run_zoo(const BenchArguments& o, const DeviceInfo& device) {
  check(o.batches.empty() && o.cases.empty(), "cli.zoo", "--zoo brings its own batches, got others beside it");
  check(!o.no_ceilings, "cli.zoo", "--zoo compares with ceilings, got --no-ceilings");
  std::vector<serve::ZooCell> cells = cells_asked(o);
  if (o.list) {
    for (const serve::ZooCell& cell : cells) fmt::print("{}\n", cell.name());
    return kOk;
  }
  const auto begin = Clock::now();
  const auto out_of_time = [&] { return o.seconds > 0 && std::chrono::duration<double>(Clock::now() - begin).count() > o.seconds; };
  Zoo zoo(o, device);
  for (serve::ZooCell& cell : cells) cell = zoo.fitted(std::move(cell));
  zoo.compile(cells);
  std::vector<serve::ZooResult> results;
  size_t not_run = 0;
  {
    ProgressBar bar;
    for (const serve::ZooCell& cell : cells) {
      if (out_of_time()) {
        not_run = cells.size() - results.size();
        break;
      }
      bar.show(double(results.size()) / double(cells.size()), cell.name());
      results.push_back(zoo.measure(cell));
    }
  }
  // A cell may be slow because the machine was busy for a moment, so slow cells are timed again.
  for (int again = 0; again < kAgain && !out_of_time(); ++again) {
    for (const serve::ZooResult* cliff : serve::judge_zoo(results)) {
      const size_t i = size_t(cliff - results.data());
      serve::ZooResult result = zoo.measure(cells[i]);
      if (!result.problem.empty() || result.share.of_ceiling > results[i].share.of_ceiling) results[i] = std::move(result);
    }
  }
  const size_t cliffs = serve::judge_zoo(results).size();
  const auto failed = size_t(
      std::count_if(results.begin(), results.end(), [](const serve::ZooResult& r) { return !r.problem.empty() && !r.backend.empty(); }));
  const auto no_backend =
      size_t(std::count_if(results.begin(), results.end(), [](const serve::ZooResult& r) { return r.backend.empty(); }));
  if (o.json || o.format == "json") {
    ordered_json j{{"device", device.name}, {"cliffs", cliffs}, {"failed", failed}, {"cells", ordered_json::array()}};
    for (const serve::ZooResult& r : results) j["cells"].push_back(to_json(r));
    fmt::print("{}\n", j.dump(2));
  } else {
    print_results(o, device, zoo.gpu(), results);
    if (o.format == "table") {
      fmt::print("\n{} cells: {} cliffs (below {} of the median of their kind), {} failed, {} without a backend, {} not run\n",
                 cells.size(), cliffs, serve::kCliff, failed, no_backend, not_run);
    }
  }
  if (results.size() == no_backend) return kUnsupported;
  return cliffs > 0 || failed > 0 ? kCheckFailed : kOk;
}

}  // namespace imbrex::cli
