// `imbrex bench --family recurrent`: times every backend of recurrent layers on batches.
#include <fmt/format.h>

#include "cli/bench.h"
#include "cli/kernel_choices.h"
#include "serve/recurrent_bench.h"

namespace imbrex::cli {

int run_recurrent_bench(const BenchArguments& o, const DeviceInfo& device, const ParallelFor& threads) {
  RecurrentSpec spec = serve::recurrent_layer_of(o.recurrent_layer, o.with_outputs);
  if (o.k_heads > 0) spec.num_k_heads = o.k_heads;
  if (o.v_heads > 0) spec.num_v_heads = o.v_heads;
  spec.state_dtype = o.state_dtype;
  spec.layout = o.state_layout == to_string(StateLayout::k_first) ? StateLayout::k_first : StateLayout::v_first;
  spec.validate();
  const bool gpu = device.device.type == DeviceType::cuda;
  const double unit = gpu ? 1e12 : 1e9;
  const auto list = backends_named<RecurrentFamily>(spec, device, o.backends);
  if (list.empty()) fmt::print(stderr, "no backend runs {} on {}\n", spec.str(), device.str());
  serve::Ceilings ceilings;
  if (!o.no_ceilings && !list.empty()) ceilings = serve::ceilings_of(device, o.threads);
  const auto options = bench_options<serve::RecurrentBenchOptions>(o, threads);
  serve::Table table{{"case", "backend", ">µs", ">best µs", ">noise %", gpu ? ">state TB/s" : ">state GB/s", gpu ? ">TFLOP/s" : ">GFLOP/s",
                      ">tokens/s", ">of ceiling", ">plan µs"},
                     {}};
  nlohmann::ordered_json j = nlohmann::ordered_json::array();
  std::string notes;
  for (const std::string& text : batches_of(o)) {
    const auto items = serve::parse_batch(text);
    int64_t tokens = 0;
    for (const serve::BenchRequest& r : requests_of(items)) tokens += r.q_len;
    for (const BackendOf<RecurrentFamily>* backend : list) {
      const serve::RecurrentBenchResult r = serve::bench(*backend, spec, device, requests_of(items), options);
      const BenchOf of{fmt::format("{}, {}", serve::to_string(items), o.recurrent_layer), spec.str(), backend->name(), device,
                       threads.num_workers};
      const OwnFigures own{{fmt::format("{:.2f}", r.state_bytes / r.median_s / unit), fmt::format("{:.1f}", r.flops / r.median_s / unit),
                            fmt::format("{:.0f}", double(tokens) / r.median_s)},
                           {{"state_bytes", r.state_bytes},
                            {"token_bytes", r.token_bytes},
                            {"flops", r.flops},
                            {"state_bytes_per_s", r.state_bytes / r.median_s},
                            {"flop_per_s", r.flops / r.median_s},
                            {"copy_bytes", r.copy_bytes},
                            {"copies", r.copies}}};
      const serve::Share share = share_of(r, ceilings, device);
      table.rows.push_back(bench_row(of, r, share, own));
      j.push_back(bench_entry(of, r, share, own, backend->kernel_choices(spec, device)));
      if (o.verbose) notes += fmt::format("{}\n{}", backend->name(), lines_of(backend->kernel_choices(spec, device)));
    }
  }
  return print_bench(o, device, threads.num_workers, table, j, notes);
}

}  // namespace imbrex::cli
