// See trace_stats.h.
#include "serve/trace_stats.h"

#include <unordered_set>

namespace imbrex::serve {

TraceStats trace_stats(const Trace& trace) {
  TraceStats stats;
  stats.requests = int64_t(trace.requests.size());
  if (trace.requests.empty()) return stats;
  std::vector<double> input, output, gap;
  std::unordered_set<uint64_t> distinct;
  double before = trace.requests.front().arrival_s;
  for (const TraceRequest& request : trace.requests) {
    input.push_back(request.input_length);
    output.push_back(request.output_length);
    stats.input_tokens += request.input_length;
    stats.output_tokens += request.output_length;
    if (input.size() > 1) gap.push_back(request.arrival_s - before);
    before = request.arrival_s;
    stats.prefix_blocks += int64_t(request.prefix_ids.size());
    distinct.insert(request.prefix_ids.begin(), request.prefix_ids.end());
  }
  stats.input = percentiles(std::move(input));
  stats.output = percentiles(std::move(output));
  stats.gap = percentiles(std::move(gap));
  stats.span_s = trace.requests.back().arrival_s - trace.requests.front().arrival_s;
  stats.rate = stats.span_s > 0 ? double(stats.requests) / stats.span_s : 0;
  stats.distinct_prefix_blocks = int64_t(distinct.size());
  return stats;
}

}  // namespace imbrex::serve
