// Fuzz target: any bytes as a trace file either parse to a trace that keeps its promises or give an Error.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "imbrex/error.h"
#include "serve/trace.h"
#include "serve/trace_stats.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace imbrex::serve;
  TraceLimits limits;
  limits.max_line_bytes = 4096;
  limits.max_requests = 1000;
  try {
    const Trace trace = parse_trace({reinterpret_cast<const char*>(data), size}, "fuzz", limits);
    double before = 0;
    for (const TraceRequest& r : trace.requests) {
      const bool lengths =
          r.input_length >= 1 && r.input_length <= limits.max_tokens && r.output_length >= 1 && r.output_length <= limits.max_tokens;
      const bool arrival = std::isfinite(r.arrival_s) && r.arrival_s >= before;
      const bool ids = trace.prefix_block == 0
                           ? r.prefix_ids.empty()
                           : int64_t(r.prefix_ids.size()) == (int64_t(r.input_length) + trace.prefix_block - 1) / trace.prefix_block;
      if (!lengths || !arrival || !ids) std::abort();
      before = r.arrival_s;
    }
    if (trace.requests.empty() || trace_stats(trace).requests != int64_t(trace.requests.size())) std::abort();
  } catch (const imbrex::Error&) {
  }
  return 0;
}
