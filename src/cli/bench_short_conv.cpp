// `imbrex bench --family short_conv`: times every backend of the short convolution on batches.
#include <fmt/format.h>

#include "cli/bench.h"
#include "cli/kernel_choices.h"
#include "core/check.h"
#include "serve/short_conv_bench.h"

namespace imbrex::cli {
namespace {

// The backends that --backend names, each of which must run the spec, or all but the reference that run it.
std::vector<const BackendOf<ShortConvFamily>*> conv_backends(const ShortConvSpec& spec, const DeviceInfo& device,
                                                             const std::string& names) {
  std::vector<const BackendOf<ShortConvFamily>*> list;
  for (const std::string& name : split(names, ",")) {
    SelectOptions options;
    options.forced = name;
    const auto selection = select<ShortConvFamily>(spec, device, options);
    check(selection.rule.starts_with("forced"), "select.forced", "expected a backend of short_conv, got {}", selection.rule);
    list.push_back(selection.backend);
  }
  if (!list.empty()) return list;
  for (const BackendOf<ShortConvFamily>* backend : backends<ShortConvFamily>())
    if (backend->unsupported(spec, device).empty() && backend->name() != "reference") list.push_back(backend);
  return list;
}

serve::ShortConvBenchOptions conv_options(const BenchArguments& o, const ParallelFor& threads) {
  serve::ShortConvBenchOptions options;
  static_cast<serve::TimingOptions&>(options) = o.bench;
  options.seed = o.bench.seed;
  options.copies = o.bench.kv_copies;
  options.check = o.bench.check;
  options.threads = threads;
  return options;
}

}  // namespace

int run_short_conv_bench(const BenchArguments& o, const DeviceInfo& device, const ParallelFor& threads) {
  const ShortConvSpec& spec = o.short_conv;
  spec.validate();
  const bool gpu = device.device.type == DeviceType::cuda;
  const double unit = gpu ? 1e12 : 1e9;
  const auto list = conv_backends(spec, device, o.backends);
  if (list.empty()) fmt::print(stderr, "no backend runs {} on {}\n", spec.str(), device.str());
  serve::Ceilings ceilings;
  if (!o.no_ceilings && !list.empty()) ceilings = serve::ceilings_of(device, o.threads);
  const serve::ShortConvBenchOptions options = conv_options(o, threads);
  serve::Table table{{"case", "backend", ">µs", ">best µs", ">noise %", gpu ? ">read TB/s" : ">read GB/s",
                      gpu ? ">written TB/s" : ">written GB/s", ">of ceiling", ">plan µs"},
                     {}};
  nlohmann::ordered_json j = nlohmann::ordered_json::array();
  for (const std::string& text : batches_of(o)) {
    const auto items = serve::parse_batch(text);
    for (const BackendOf<ShortConvFamily>* backend : list) {
      const serve::ShortConvBenchResult r = serve::bench(*backend, spec, device, requests_of(items), options);
      const serve::Share share = share_of(r, ceilings, device);
      table.rows.push_back({serve::to_string(items), std::string(backend->name()), fmt::format("{:.1f}", r.median_s * 1e6),
                            fmt::format("{:.1f}", r.best_s * 1e6), fmt::format("{:.1f}", 100 * r.noise),
                            fmt::format("{:.2f}", r.read_bytes / r.median_s / unit),
                            fmt::format("{:.2f}", r.written_bytes / r.median_s / unit),
                            share.of_ceiling > 0 ? fmt::format("{:.0f} % {}", 100 * share.of_ceiling, share.bound) : "-",
                            fmt::format("{:.1f}", r.plan_s * 1e6)});
      j.push_back({{"case", serve::to_string(items)},
                   {"spec", spec.str()},
                   {"backend", backend->name()},
                   {"device", device.name},
                   {"threads", threads.num_workers},
                   {"median_s", r.median_s},
                   {"best_s", r.best_s},
                   {"noise", r.noise},
                   {"samples", r.samples},
                   {"plan_s", r.plan_s},
                   {"read_bytes", r.read_bytes},
                   {"written_bytes", r.written_bytes},
                   {"flops", r.flops},
                   {"read_bytes_per_s", r.read_bytes / r.median_s},
                   {"written_bytes_per_s", r.written_bytes / r.median_s},
                   {"share_of_ceiling", share.of_ceiling},
                   {"ceiling", share.bound},
                   {"copy_bytes", r.copy_bytes},
                   {"copies", r.copies},
                   {"captured", r.captured},
                   {"check_error", r.check_error},
                   {"check_allowed", r.check_allowed},
                   {"plan", r.plan},
                   {"kernels", to_json(backend->kernel_choices(spec, device))}});
    }
  }
  std::string notes;
  for (const BackendOf<ShortConvFamily>* backend : list)
    if (o.verbose) notes += fmt::format("{}\n{}", backend->name(), lines_of(backend->kernel_choices(spec, device)));
  return print_bench(o, device, threads.num_workers, table, j, notes);
}

}  // namespace imbrex::cli
