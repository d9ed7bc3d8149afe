// Times one attention spec on one batch, after a check against the reference. Used by `imbrex bench`.
#include "serve/bench.h"

#include <algorithm>

#include "attention/mask.h"
#include "conformance/attention/judge.h"
#include "core/check.h"
#include "serve/bench_problem.h"

namespace imbrex::serve {
namespace {

constexpr int kCapturedQueries = 16;  // of a request, up to which calls go into a graph

// First and one past the last key that the mask lets a query at position p see; the custom mask apart.
std::pair<int64_t, int64_t> visible(const AttentionSpec& spec, int64_t p, int64_t seq_len) {
  const Mask& mask = spec.mask;
  int64_t end = seq_len;
  if (mask.causal) end = std::min(end, p + 1);
  if (mask.window_right >= 0) end = std::min(end, p + mask.window_right + 1);
  if (mask.chunk > 0 && p >= 0) end = std::min(end, (p / mask.chunk + 1) * mask.chunk);
  const int64_t begin = first_visible_key(mask, std::max<int64_t>(p, 0));
  return {begin, std::max(begin, end)};
}

}  // namespace

void check_outputs(const BackendOf<AttentionFamily>& backend, const BenchProblem& problem, const AttentionSpec& spec,
                   const std::vector<BenchRequest>& requests, BenchResult& result) {
  constexpr int kSamples = 4;
  int taken = 0;
  for (size_t r = 0; r < requests.size() && taken < kSamples; r += std::max<size_t>(1, requests.size() / kSamples)) {
    if (requests[r].q_len == 0) continue;
    const bool middle = spec.mask.causal && taken % 2 == 1;
    const int request = int(r), kv_head = taken % spec.num_kv_heads;
    const int query = problem.is_tree(r) ? 0 : middle ? requests[r].q_len / 2 : requests[r].q_len - 1;  // of a tree all
    const Expected expected = expect(problem.sample(request, query, kv_head));
    RunResult actual;
    problem.actual(request, query, kv_head, problem.sample_queries(request, query), actual.out, actual.lse);
    const Judgement judgement = judge(expected, actual);
    check(judgement.pass(), "bench.check", "{} on {}: request {}, query {}, kv head {} differs from the reference: {}", backend.name(),
          spec.str(), request, query, kv_head, judgement.failure);
    result.check_error = std::max(result.check_error, judgement.out.max);
    result.check_allowed = std::max(result.check_allowed, expected.bounds.max);
    ++taken;
  }
}

Work work_of(const AttentionSpec& spec, const std::vector<BenchRequest>& requests) {
  double pairs = 0, keys = 0;
  for (const BenchRequest& r : requests) {
    int64_t seen_begin = r.seq_len, seen_end = 0;
    for (int i = 0; i < r.q_len; ++i) {
      const auto [begin, end] = visible(spec, r.seq_len - r.q_len + i, r.seq_len);
      pairs += double(end - begin);
      if (end == begin) continue;
      seen_begin = std::min(seen_begin, begin);
      seen_end = std::max(seen_end, end);
    }
    keys += double(std::max<int64_t>(seen_end - seen_begin, 0));
  }
  return {.kv_bytes = keys * double(spec.kv_bytes_per_token()),
          .flops = pairs * spec.num_q_heads * 2.0 * (spec.head_dim_qk + spec.head_dim_v)};
}

bool goes_into_graph(const BenchOptions& options, int max_query_len) {
  return options.launch == BenchLaunch::by_queries ? max_query_len <= kCapturedQueries : options.launch == BenchLaunch::graph;
}

BenchResult bench(const BackendOf<AttentionFamily>& backend, const AttentionSpec& spec, const DeviceInfo& device,
                  const std::vector<BenchRequest>& requests, const BenchOptions& options) {
  BenchResult result{work_of(spec, requests)};
  const auto stream = open_stream(device, options.threads);
  const BenchProblem problem(backend, spec, device, requests, options, *stream);
  result.cache_bytes = problem.cache_bytes();
  result.kv_copies = problem.kv_copies();
  PlanOptions plan_options;
  plan_options.limits = problem.limits();
  plan_options.threads = options.threads;
  plan_options.out_dtype = problem.outputs().out.dtype;
  plan_options.balanced = options.balanced;
  result.captured = stream->asynchronous() && goes_into_graph(options, plan_options.limits.max_query_len);
  const auto plan = backend.plan(spec, device, plan_options);
  result.plan_s = best_seconds([&] { plan->update(problem.batch(), stream->get()); });
  result.plan = plan->str();
  const AttentionOutputs outputs = problem.outputs();
  plan->run(problem.inputs(0), outputs, stream->get());
  if (options.check) check_outputs(backend, problem, spec, requests, result);

  int copy = 0;
  const auto run = [&] {
    plan->run(problem.inputs(copy), outputs, stream->get());
    copy = (copy + 1) % result.kv_copies;
  };
  static_cast<Timing&>(result) = time_calls(run, *stream, result.captured, result.kv_copies, options);
  return result;
}

Share share_of(const BenchResult& r, const BackendOf<AttentionFamily>& backend, const AttentionSpec& spec, const Ceilings& c,
               const DeviceInfo& device) {
  if (c.dram_read <= 0) return {};
  const bool in_cache = stays_in_cache(r.cache_bytes * r.kv_copies, c, device);
  const double memory = r.kv_bytes / r.median_s / (in_cache ? c.l3_read : c.dram_read);
  const double arithmetic = r.flops / r.median_s / c.flops_for(backend.name(), to_string(spec.q_dtype));
  if (arithmetic >= memory) return {arithmetic, "flop"};
  return {memory, in_cache ? "L3" : "DRAM"};
}

}  // namespace imbrex::serve
