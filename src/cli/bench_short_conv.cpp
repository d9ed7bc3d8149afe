// `imbrex bench --family short_conv`: times every backend of the short convolution on batches.
#include <fmt/format.h>

#include "cli/bench.h"
#include "cli/kernel_choices.h"
#include "serve/short_conv_bench.h"

namespace imbrex::cli {

int run_short_conv_bench(const BenchArguments& o, const DeviceInfo& device, const ParallelFor& threads) {
  const ShortConvSpec& spec = o.short_conv;
  spec.validate();
  const bool gpu = device.device.type == DeviceType::cuda;
  const double unit = gpu ? 1e12 : 1e9;
  const auto list = backends_named<ShortConvFamily>(spec, device, o.backends);
  if (list.empty()) fmt::print(stderr, "no backend runs {} on {}\n", spec.str(), device.str());
  serve::Ceilings ceilings;
  if (!o.no_ceilings && !list.empty()) ceilings = serve::ceilings_of(device, o.threads);
  const serve::ShortConvBenchOptions options = bench_options<serve::ShortConvBenchOptions>(o, threads);
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
