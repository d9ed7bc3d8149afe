#pragma once
// Makes Mooncake-format traces of conversations that share system prompts; `imbrex trace gen` and data/sample_trace.jsonl.
#include <cstdint>
#include <string>

#include "serve/trace.h"

namespace imbrex::serve {

// A conversation begins with one of a few system prompts, then has a user message and an answer per turn; the prompt of a turn is
// all of that up to its message. Conversations begin at random (Poisson), so that requests come at about `rate`.
struct TraceGenOptions {
  uint64_t seed = 1;
  int num_requests = 1000;      // 1 to 10,000,000
  double rate = 2.0;            // requests per second, about; > 0
  int num_system_prompts = 4;   // >= 0; the first ones are more popular
  int system_length = 1024;     // tokens of a system prompt, about (from half to one and a half times); shared in blocks of 512
  double mean_turns = 2.5;      // of a conversation; >= 1
  double think_s = 10;          // mean seconds between two turns; >= 0
  double message_median = 200;  // tokens of a user message; lognormal
  double message_sigma = 1.0;   // of its logarithm; 0 to 4
  double output_median = 100;   // tokens of an answer; lognormal
  double output_sigma = 0.8;
  int min_input = 1, max_input = 32768;  // prompts are cut to this; a conversation ends when its prompt does not fit
  int min_output = 1, max_output = 2048;
};

TraceGenOptions sample_trace_options();  // the ones that data/sample_trace.jsonl was made with

// The same options give the same trace on every platform. Error trace_gen.* for options out of range.
Trace generate_trace(const TraceGenOptions&);

std::string to_mooncake_jsonl(const Trace&);  // prefix ids are written as hash_ids; arrivals are rounded to milliseconds

}  // namespace imbrex::serve
