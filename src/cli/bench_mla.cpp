// `imbrex bench --family mla`: times every backend of latent attention on batches.
#include <fmt/format.h>

#include "cli/bench.h"
#include "cli/kernel_choices.h"
#include "serve/mla_bench.h"

namespace imbrex::cli {

int run_mla_bench(const BenchArguments& o, const DeviceInfo& device, const ParallelFor& threads) {
  const bool gpu = device.device.type == DeviceType::cuda;
  const double unit = gpu ? 1e12 : 1e9;
  const auto specs = mla_specs_of(o.spec, o.mla, o.heads_given);
  serve::Ceilings ceilings;
  if (!o.no_ceilings) ceilings = serve::ceilings_of(device, o.threads);
  serve::MlaBenchOptions options = bench_options<serve::MlaBenchOptions>(o, threads);
  options.common_keys = o.bench.common_keys, options.balanced = o.bench.balanced;
  serve::Table table{{"case", "backend", ">µs", ">best µs", ">noise %", gpu ? ">KV TB/s" : ">KV GB/s", gpu ? ">TFLOP/s" : ">GFLOP/s",
                      ">of ceiling", ">plan µs"},
                     {}};
  nlohmann::ordered_json j = nlohmann::ordered_json::array();
  std::string notes;
  for (const Named<MlaSpec>& named : specs) {
    const auto list = backends_named<MlaFamily>(named.spec, device, o.backends);
    if (list.empty()) fmt::print(stderr, "no backend runs {} on {}\n", named.spec.str(), device.str());
    for (const std::string& text : batches_of(o)) {
      const auto items = serve::parse_batch(text);
      const std::string name = serve::to_string(items) + (named.name.empty() ? "" : ", " + named.name);
      for (const BackendOf<MlaFamily>* backend : list) {
        const serve::MlaBenchResult r = serve::bench(*backend, named.spec, device, requests_of(items), options);
        const serve::Share share = share_of(r, *backend, named.spec, ceilings, device);
        const std::vector<KernelChoice> kernels = backend->kernel_choices(named.spec, device);
        const BenchOf of{name, named.spec.str(), backend->name(), device, threads.num_workers};
        const OwnFigures own{{fmt::format("{:.2f}", r.kv_bytes / r.median_s / unit), fmt::format("{:.1f}", r.flops / r.median_s / unit)},
                             {{"kv_bytes", r.kv_bytes},
                              {"weight_bytes", r.weight_bytes},
                              {"flops", r.flops},
                              {"kv_bytes_per_s", r.kv_bytes / r.median_s},
                              {"flop_per_s", r.flops / r.median_s},
                              {"copy_bytes", r.copy_bytes},
                              {"copies", r.copies}}};
        table.rows.push_back(bench_row(of, r, share, own));
        j.push_back(bench_entry(of, r, share, own, kernels));
        if (o.verbose) notes += fmt::format("{}, {}\n{}{}\n", name, backend->name(), lines_of(kernels), r.plan);
      }
    }
  }
  return print_bench(o, device, threads.num_workers, table, j, notes);
}

}  // namespace imbrex::cli
