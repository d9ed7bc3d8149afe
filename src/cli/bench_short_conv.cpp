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
      const BenchOf of{serve::to_string(items), spec.str(), backend->name(), device, threads.num_workers};
      const OwnFigures own{
          {fmt::format("{:.2f}", r.read_bytes / r.median_s / unit), fmt::format("{:.2f}", r.written_bytes / r.median_s / unit)},
          {{"read_bytes", r.read_bytes},
           {"written_bytes", r.written_bytes},
           {"flops", r.flops},
           {"read_bytes_per_s", r.read_bytes / r.median_s},
           {"written_bytes_per_s", r.written_bytes / r.median_s},
           {"copy_bytes", r.copy_bytes},
           {"copies", r.copies}}};
      table.rows.push_back(bench_row(of, r, share, own));
      j.push_back(bench_entry(of, r, share, own, backend->kernel_choices(spec, device)));
    }
  }
  std::string notes;
  for (const BackendOf<ShortConvFamily>* backend : list)
    if (o.verbose) notes += fmt::format("{}\n{}", backend->name(), lines_of(backend->kernel_choices(spec, device)));
  return print_bench(o, device, threads.num_workers, table, j, notes);
}

}  // namespace imbrex::cli
