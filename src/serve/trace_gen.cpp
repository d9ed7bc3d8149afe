// Makes Mooncake-format traces of conversations that share system prompts (see trace_gen.h).
#include "serve/trace_gen.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <queue>
#include <random>

#include "core/check.h"

namespace imbrex::serve {

namespace {

// The engine is defined by the standard to the bit, the standard's distributions are not: these are. log, exp and cos may differ
// in the last bit between C libraries; every value drawn is rounded to a whole token or millisecond, which hides that.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  double uniform() { return (double(engine_() >> 11) + 0.5) * 0x1p-53; }  // in (0, 1)
  int below(int n) { return int(uniform() * n); }
  double exponential(double mean) { return -mean * std::log(uniform()); }
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(uniform()));
    return radius * std::cos(2.0 * std::numbers::pi * uniform());
  }
  int lognormal(double median, double sigma, int low, int high) {
    return int(std::clamp(std::round(median * std::exp(sigma * normal())), double(low), double(high)));
  }

 private:
  std::mt19937_64 engine_;
};

struct Conversation {
  std::vector<uint64_t> block_ids;  // of the full blocks of all text so far
  int64_t length = 0;               // tokens of all text so far
};

struct Turn {
  int64_t arrival_ms;
  int64_t order;  // breaks ties, so that the queue's order is defined
  size_t conversation;
  bool operator>(const Turn& other) const { return std::pair(arrival_ms, order) > std::pair(other.arrival_ms, other.order); }
};

void check_options(const TraceGenOptions& o) {
  check(o.num_requests >= 1 && o.num_requests <= 10'000'000, "trace_gen.num_requests", "num_requests must be in [1, 10000000], is {}",
        o.num_requests);
  check(std::isfinite(o.rate) && o.rate >= 1e-6 && o.rate <= 1e6, "trace_gen.rate",
        "rate must be in [1e-6, 1e6] requests per second, is {}", o.rate);
  check(o.num_system_prompts >= 0 && o.num_system_prompts <= 1'000'000, "trace_gen.num_system_prompts",
        "num_system_prompts must be in [0, 1000000], is {}", o.num_system_prompts);
  check(o.system_length >= 0 && o.system_length <= (1 << 24), "trace_gen.system_length", "system_length must be in [0, {}], is {}", 1 << 24,
        o.system_length);
  check(o.mean_turns >= 1 && o.mean_turns <= 1e6, "trace_gen.mean_turns", "mean_turns must be in [1, 1e6], is {}", o.mean_turns);
  check(o.think_s >= 0 && o.think_s <= 1e6, "trace_gen.think_s", "think_s must be in [0, 1e6], is {}", o.think_s);
  const auto lengths = [](double median, double sigma, std::string_view what) {
    check(median >= 1 && median <= 1e7, "trace_gen.median", "median of the {} must be in [1, 1e7], is {}", what, median);
    check(sigma >= 0 && sigma <= 4, "trace_gen.sigma", "sigma of the {} must be in [0, 4], is {}", what, sigma);
  };
  lengths(o.message_median, o.message_sigma, "message");
  lengths(o.output_median, o.output_sigma, "output");
  const auto range = [](int low, int high, std::string_view what) {
    check(low >= 1 && low <= high && high <= (1 << 24), "trace_gen.range", "{} must be ordered within [1, {}], is [{}, {}]", what, 1 << 24,
          low, high);
  };
  range(o.min_input, o.max_input, "min_input and max_input");
  range(o.min_output, o.max_output, "min_output and max_output");
}

}  // namespace

TraceGenOptions sample_trace_options() {
  TraceGenOptions o;
  o.seed = 4;
  o.num_requests = 40;
  o.rate = 1.5;
  o.num_system_prompts = 3;
  o.system_length = 800;
  o.think_s = 6;
  o.message_median = 260;
  o.message_sigma = 0.9;
  o.output_median = 40;
  o.output_sigma = 0.7;
  o.min_input = 200;
  o.max_input = 3000;
  o.min_output = 10;
  o.max_output = 120;
  return o;
}

Trace generate_trace(const TraceGenOptions& o) {
  check_options(o);
  Random random(o.seed);
  uint64_t next_id = 0;
  std::vector<std::vector<uint64_t>> systems(size_t(o.num_system_prompts));
  for (auto& ids : systems) {
    const int length = o.system_length / 2 + random.below(o.system_length + 1);
    ids.resize(size_t((length + kMooncakeBlock / 2) / kMooncakeBlock));
    for (uint64_t& id : ids) id = next_id++;
  }

  Trace trace;
  trace.source = fmt::format("generated, seed {}", o.seed);
  trace.format = "mooncake";
  trace.prefix_block = kMooncakeBlock;
  std::vector<Conversation> conversations;
  std::priority_queue<Turn, std::vector<Turn>, std::greater<>> turns;
  double next_start_s = 0;
  int64_t order = 0;
  const auto start_conversation = [&] {
    Conversation conversation;
    if (!systems.empty()) {
      // The smaller of two numbers: the first prompt is about twice as popular as the middle one.
      const int which = std::min(random.below(int(systems.size())), random.below(int(systems.size())));
      conversation.block_ids = systems[size_t(which)];
      conversation.length = int64_t(conversation.block_ids.size()) * kMooncakeBlock;
    }
    turns.push({int64_t(next_start_s * 1e3), order++, conversations.size()});
    conversations.push_back(std::move(conversation));
    next_start_s += random.exponential(o.mean_turns / o.rate);
  };
  start_conversation();
  while (int(trace.requests.size()) < o.num_requests) {
    while (turns.empty() || int64_t(next_start_s * 1e3) <= turns.top().arrival_ms) start_conversation();
    const Turn turn = turns.top();
    turns.pop();
    Conversation& conversation = conversations[turn.conversation];

    TraceRequest request;
    request.arrival_s = double(turn.arrival_ms) * 1e-3;
    const int64_t message = random.lognormal(o.message_median, o.message_sigma, 1, o.max_input);
    request.input_length = int(std::clamp<int64_t>(conversation.length + message, o.min_input, o.max_input));
    request.output_length = random.lognormal(o.output_median, o.output_sigma, o.min_output, o.max_output);
    const size_t full = size_t(request.input_length / kMooncakeBlock);
    while (conversation.block_ids.size() < full) conversation.block_ids.push_back(next_id++);
    request.prefix_ids.assign(conversation.block_ids.begin(), conversation.block_ids.begin() + int64_t(full));
    if (request.input_length % kMooncakeBlock != 0) request.prefix_ids.push_back(next_id++);
    conversation.length = int64_t(request.input_length) + request.output_length;
    const bool another = random.uniform() < 1.0 - 1.0 / o.mean_turns;
    if (another && conversation.length < o.max_input) {
      const auto pause_ms = int64_t(random.exponential(o.think_s) * 1e3);
      turns.push({turn.arrival_ms + pause_ms, order++, turn.conversation});
    } else {
      conversation = {};  // its memory
    }
    trace.requests.push_back(std::move(request));
  }
  return trace;
}

std::string to_mooncake_jsonl(const Trace& trace) {
  std::string text;
  for (const TraceRequest& request : trace.requests) {
    fmt::format_to(std::back_inserter(text), "{{\"timestamp\": {}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [{}]}}\n",
                   int64_t(std::llround(request.arrival_s * 1e3)), request.input_length, request.output_length,
                   fmt::join(request.prefix_ids, ", "));
  }
  return text;
}

}  // namespace imbrex::serve
