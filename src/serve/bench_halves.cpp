// See bench_halves.h.
#include "serve/bench_halves.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "core/check.h"
#include "core/float_types.h"
#include "core/run_parallel.h"
#include "imbrex/batch_tools.h"
#include "serve/bench_problem.h"
#include "serve/timer.h"

namespace imbrex::serve {
namespace {

// Batches that run one after the other on a stream of their own: the whole, both halves, or one of them.
class Lane {
 public:
  Lane(const BackendOf<AttentionFamily>& backend, const AttentionSpec& spec, const DeviceInfo& device, const BenchProblem& problem,
       std::vector<DerivedBatch> parts, const ParallelFor& threads)
      : problem_(problem), parts_(std::move(parts)), stream_(open_stream(device, threads)) {
    PlanOptions options;
    options.limits = problem.limits();
    options.threads = threads;
    options.out_dtype = problem.outputs().out.dtype;
    for (const DerivedBatch& part : parts_) {
      plans_.push_back(backend.plan(spec, device, options));
      plans_.back()->update(part.batch, stream_->get());
    }
    stream_->synchronize();
  }

  // The layer's next call: calls take turns at the copies of the cache.
  void run() {
    AttentionInputs inputs = problem_.inputs(copy_);
    const AttentionOutputs all = problem_.outputs();
    const TensorView q = inputs.q;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const int64_t first = parts_[i].first_token, end = first + parts_[i].batch.num_tokens();
      inputs.q = q.slice(0, first, end);
      plans_[i]->run(inputs, {.out = all.out.slice(0, first, end), .lse = all.lse.empty() ? all.lse : all.lse.slice(0, first, end)},
                     stream_->get());
    }
    copy_ = (copy_ + 1) % problem_.kv_copies();
  }
  DeviceStream& stream() const { return *stream_; }

 private:
  const BenchProblem& problem_;
  const std::vector<DerivedBatch> parts_;
  const std::unique_ptr<DeviceStream> stream_;
  std::vector<std::unique_ptr<AttentionPlan>> plans_;
  int copy_ = 0;
};

void wait_for(std::span<Lane* const> lanes) {
  for (Lane* lane : lanes) lane->stream().synchronize();
}

// Calls of the lanes at the same time on a GPU, each lane's in its own order.
Timing time_on_streams(std::span<Lane* const> lanes, bool captured, int rotation) {
  const auto calls_of = [&](int calls) {
    for (int i = 0; i < calls; ++i)
      for (Lane* lane : lanes) lane->run();
  };
  calls_of(2);
  wait_for(lanes);
  const Timer one_call;
  calls_of(1);
  wait_for(lanes);
  constexpr double kSample = 10e-3;
  constexpr int kMostCalls = 200, kSamples = 15;
  const int calls = std::max(std::clamp(int(kSample / std::max(one_call.elapsed(), 5e-6)), 1, kMostCalls) / rotation, 1) * rotation;
  std::vector<DeviceGraph> graphs;
  for (Lane* lane : captured ? lanes : std::span<Lane* const>())
    graphs.push_back(lane->stream().capture([&] {
      for (int i = 0; i < calls; ++i) lane->run();
    }));
  const auto sample = [&] {
    const Timer timer;
    if (!captured) calls_of(calls);
    for (size_t i = 0; i < graphs.size(); ++i) lanes[i]->stream().replay(graphs[i]);
    wait_for(lanes);
    return timer.elapsed() / calls;
  };
  for (int i = 0; i < 3; ++i) sample();  // until the clock has settled under the load
  std::vector<double> times(kSamples);
  std::ranges::generate(times, sample);
  return summary_of(times);
}

std::vector<char> outputs_of(const BenchProblem& problem, const Lane& lane) {
  const TensorView out = problem.outputs().out;
  std::vector<char> bytes(size_t(out.num_elements() * size_of(out.dtype)));
  lane.stream().download(bytes.data(), out.data, int64_t(bytes.size()));
  lane.stream().synchronize();
  return bytes;
}

void compare(const std::vector<char>& whole, const std::vector<char>& halves, DType dtype, HalvesResult& result) {
  const int64_t size = size_of(dtype);
  result.values = int64_t(whole.size()) / size;
  for (int64_t i = 0; i < result.values; ++i) {
    if (std::memcmp(whole.data() + i * size, halves.data() + i * size, size_t(size)) == 0) continue;
    ++result.different;
    const double difference = std::abs(load_as_double(whole.data(), dtype, i) - load_as_double(halves.data(), dtype, i));
    result.largest_difference = std::max(result.largest_difference, std::isnan(difference) ? HUGE_VAL : difference);
  }
}

int cut_of(const Batch& batch, int asked) {
  const int tokens = batch.num_tokens();
  check(tokens >= 2, "bench.halves", "expected a batch of two query tokens at least, got {}", tokens);
  check(asked >= 0 && asked < tokens, "bench.halves", "expected a cut in front of a token from 1 to {}, got {}", tokens - 1, asked);
  if (asked > 0) return asked;
  const int boundary = nearest_boundary(batch, tokens / 2);
  return boundary > 0 && boundary < tokens ? boundary : tokens / 2;
}

}  // namespace

HalvesResult bench_halves(const BackendOf<AttentionFamily>& backend, const AttentionSpec& spec, const DeviceInfo& device,
                          const std::vector<BenchRequest>& requests, const BenchOptions& options, int cut) {
  HalvesResult result;
  const auto stream = open_stream(device, options.threads);
  const BenchProblem problem(backend, spec, device, requests, options, *stream);
  const Batch& batch = problem.batch();
  result.cut = cut_of(batch, cut);
  result.through_request = nearest_boundary(batch, result.cut) != result.cut;
  const std::array<DerivedBatch, 2> parts = split_batch(batch, part_keys(spec), result.cut);
  stream->synchronize();
  const bool on_gpu = stream->asynchronous();
  result.captured = on_gpu && goes_into_graph(options, problem.limits().max_query_len);

  const std::vector<DerivedBatch> alone{{.batch = batch, .memory = nullptr}}, both{parts[0], parts[1]};
  const int half = std::max(options.threads.num_workers / 2, 1);
  ThreadPool pool_of_first(on_gpu ? 1 : half), pool_of_second(on_gpu ? 1 : std::max(options.threads.num_workers - half, 1));
  ThreadPool pair(on_gpu ? 1 : 2);
  Lane whole(backend, spec, device, problem, alone, options.threads), in_turn(backend, spec, device, problem, both, options.threads);
  Lane first(backend, spec, device, problem, {parts[0]}, pool_of_first.parallel_for());
  Lane second(backend, spec, device, problem, {parts[1]}, pool_of_second.parallel_for());
  const std::array<Lane*, 2> lanes{&first, &second};
  const auto run_together = [&] { run_parallel(pair.parallel_for(), [&](int worker) { lanes[size_t(worker)]->run(); }); };

  const TensorView out = problem.outputs().out;
  whole.run();
  BenchResult checked;
  if (options.check) whole.stream().synchronize(), check_outputs(backend, problem, spec, requests, checked);
  const std::vector<char> expected = outputs_of(problem, whole);
  whole.stream().fill(out.data, 0xff, int64_t(expected.size()));
  whole.stream().synchronize();
  for (Lane* lane : lanes) lane->run();
  first.stream().synchronize();
  compare(expected, outputs_of(problem, second), out.dtype, result);
  check(result.different == 0 || (on_gpu && result.through_request), "bench.halves",
        "{} on {}: expected the bits of the whole batch from halves cut in front of token {}, got {} of {} values with others, by up to "
        "{:.3g}",
        backend.name(), spec.str(), result.cut, result.different, result.values, result.largest_difference);

  if (on_gpu) {
    const std::array<Lane*, 1> of_whole{&whole}, of_turns{&in_turn};
    result.whole = time_on_streams(of_whole, result.captured, problem.kv_copies());
    result.in_turn = time_on_streams(of_turns, result.captured, problem.kv_copies());
    result.together = time_on_streams(lanes, result.captured, problem.kv_copies());
  } else {
    result.whole = time_calls([&] { whole.run(); }, whole.stream(), false, 1, options);
    result.in_turn = time_calls([&] { in_turn.run(); }, in_turn.stream(), false, 1, options);
    result.together = time_calls(run_together, first.stream(), false, 1, options);
  }
  return result;
}

}  // namespace imbrex::serve
