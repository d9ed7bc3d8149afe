// `imbrex bench --halves`: batches cut in two, beside the whole of each.
#include <fmt/format.h>

#include "cli/bench.h"
#include "serve/bench_halves.h"

namespace imbrex::cli {

int run_halves(const BenchArguments& o, const DeviceInfo& device, int num_threads, const std::vector<AttentionJob>& jobs) {
  serve::Table table{{"case", "backend", ">cut at", ">whole µs", ">in turn µs", ">two streams µs", ">whole / two", "bits"}, {}};
  nlohmann::ordered_json j = nlohmann::ordered_json::array();
  for (const AttentionJob& job : jobs) {
    for (const BackendOf<AttentionFamily>* backend : backends_for(job, device, o)) {
      const serve::HalvesResult r = serve::bench_halves(*backend, job.spec, device, job.requests, o.bench, o.cut);
      const auto micros = [](const serve::Timing& t) { return fmt::format("{:.1f}", t.median_s * 1e6); };
      const std::string bits = r.different == 0 ? "equal" : fmt::format("{} of {} differ", r.different, r.values);
      table.rows.push_back({job.name, std::string(backend->name()), fmt::format("{}{}", r.cut, r.through_request ? " (a request)" : ""),
                            micros(r.whole), micros(r.in_turn), micros(r.together),
                            fmt::format("{:.2f}", r.whole.median_s / r.together.median_s), bits});
      const auto timing = [](const serve::Timing& t) {
        return nlohmann::ordered_json{{"median_s", t.median_s}, {"best_s", t.best_s}, {"noise", t.noise}, {"samples", t.samples}};
      };
      j.push_back({{"case", job.name},
                   {"spec", job.spec.str()},
                   {"backend", backend->name()},
                   {"device", device.name},
                   {"threads", num_threads},
                   {"cut", r.cut},
                   {"through_request", r.through_request},
                   {"whole", timing(r.whole)},
                   {"in_turn", timing(r.in_turn)},
                   {"together", timing(r.together)},
                   {"captured", r.captured},
                   {"values", r.values},
                   {"different", r.different},
                   {"largest_difference", r.largest_difference}});
    }
  }
  return print_bench(o, device, num_threads, table, j, "");
}

}  // namespace imbrex::cli
