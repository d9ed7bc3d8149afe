#pragma once
// Statistics of a trace that need no replay: lengths, arrivals, and how much of it is shared. Used by `imbrex trace stats`.
#include <cstdint>

#include "serve/percentiles.h"
#include "serve/trace.h"

namespace imbrex::serve {

struct TraceStats {
  int64_t requests = 0;
  int64_t input_tokens = 0, output_tokens = 0;
  Percentiles input, output;                              // tokens a request
  Percentiles gap;                                        // seconds between one arrival and the next
  double span_s = 0;                                      // first to last arrival
  double rate = 0;                                        // requests per second of the span; 0 when the span is 0
  int64_t prefix_blocks = 0, distinct_prefix_blocks = 0;  // 0 when the format has none
  double hit_rate() const {                               // of prefix blocks, with a cache that never forgets
    return prefix_blocks > 0 ? double(prefix_blocks - distinct_prefix_blocks) / double(prefix_blocks) : 0;
  }
};

TraceStats trace_stats(const Trace&);

}  // namespace imbrex::serve
