// See short_conv_bench.h.
#include "serve/short_conv_bench.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "conformance/case_random.h"
#include "conformance/short_conv/judge.h"
#include "core/check.h"
#include "serve/hash.h"

namespace imbrex::serve {
namespace {

// The tensors of one benchmark, on the host and where the device has them.
class ShortConvProblem {
 public:
  ShortConvProblem(const ShortConvSpec& spec, const std::vector<BenchRequest>& requests, const ShortConvBenchOptions& options,
                   const DeviceStream& stream)
      : spec_(spec), stream_(stream) {
    make_batch(requests, options.seed);
    make_host(options.seed);
    weight_ = stream.copy_of(host_.weight.view());
    if (spec.bias) bias_ = stream.copy_of(host_.bias.view());
    const int64_t tokens = num_tokens(), dim = spec.dim;
    copy_bytes_ = tokens * (spec.input_channels() + dim) * size_of(spec.dtype) + int64_t(requests.size()) * spec.state_bytes();
    for (int copies = copies_wanted(options.copies); int(copies_.size()) < copies;)
      copies_.push_back({stream.copy_of(host_.input.view()), stream.copy_of(host_.state.view()), stream.tensor(spec.dtype, {tokens, dim})});
  }

  const Batch& batch() const { return batch_; }
  int64_t copy_bytes() const { return copy_bytes_; }
  int copies() const { return int(copies_.size()); }
  int num_tokens() const { return starts_.back(); }
  PlanLimits limits() const {
    PlanLimits limits{.max_num_reqs = int(slots_.size()), .max_num_tokens = std::max(num_tokens(), 1), .max_seq_len = 1};
    for (const int32_t len : lens_) limits.max_seq_len = std::max(limits.max_seq_len, int(len));
    return limits;
  }
  ShortConvInputs inputs(int copy) const {
    const Copy& c = copies_[size_t(copy)];
    return {.input = c.input.view, .weight = weight_.view, .bias = bias_.view, .state = c.state.view};
  }
  ShortConvOutputs outputs(int copy) const { return {.out = copies_[size_t(copy)].out.view}; }

  // Some channels of the whole batch, as a case of its own; and what run() has left of them in the first copy.
  ShortConvCaseInputs sample() const;
  ShortConvRunResult actual() const;

 private:
  struct Copy {
    DeviceTensor input, state, out;
  };

  void make_batch(const std::vector<BenchRequest>& requests, uint64_t seed) {
    for (const BenchRequest& r : requests) {
      const bool has_past = r.seq_len > r.q_len;
      starts_.push_back(starts_.back() + r.q_len);
      lens_.push_back(r.seq_len);
      drafts_.push_back(has_past ? std::min(spec_.num_drafts, r.q_len - 1) : 0);
      accepted_.push_back(has_past ? spec_.num_drafts / 2 : 0);
    }
    slots_.resize(requests.size());
    std::iota(slots_.begin(), slots_.end(), 0);
    std::shuffle(slots_.begin(), slots_.end(), std::mt19937_64(seed));
    batch_.query_start_loc = starts_, batch_.seq_lens = lens_, batch_.state_slots = slots_;
    if (spec_.num_drafts > 0) batch_.num_drafts = drafts_, batch_.accepted_drafts = accepted_;
  }

  // Stretches of one array of numbers: as good as fresh ones for timing, and quickly made.
  void make_host(uint64_t seed) {
    constexpr int64_t kNumbers = 1 << 16;
    HostTensor numbers = HostTensor::make(spec_.dtype, {kNumbers});
    for (int64_t i = 0; i < kNumbers; ++i) numbers.set(i, normal(hash_numbers(seed, uint64_t(i))));
    const int64_t size = size_of(spec_.dtype), dim = spec_.dim;
    uint64_t stretches = 0;
    const auto make = [&](std::vector<int64_t> sizes) {
      HostTensor t = HostTensor::make(spec_.dtype, std::move(sizes));
      for (int64_t done = 0, count; done < t.num_elements(); done += count) {
        const int64_t from = int64_t(hash_numbers(seed + 1, ++stretches) % (kNumbers / 2));
        count = std::min(kNumbers / 2, t.num_elements() - done);
        std::memcpy(t.bytes.data() + done * size, numbers.bytes.data() + from * size, size_t(count * size));
      }
      return t;
    };
    host_.spec = spec_;
    host_.input = make({num_tokens(), spec_.input_channels()});
    host_.weight = make({dim, spec_.width});
    if (spec_.bias) host_.bias = make({dim});
    host_.state = make({int64_t(slots_.size()), spec_.state_rows(), dim});
  }

  // The number of sets of tensors that stay out of a GPU's L2 when calls take turns at them: several hundred megabytes, where they fit.
  int copies_wanted(int asked) const {
    if (asked > 0) return asked;
    if (!stream_.asynchronous()) return 1;
    constexpr int64_t kInTurn = 600'000'000, kMost = 64;
    const int64_t bytes = std::max<int64_t>(copy_bytes_, 1), wanted = std::min(kMost, kInTurn / bytes + 1);
    return int(std::clamp<int64_t>(stream_.free_bytes() / 10 * 9 / bytes, 1, wanted));
  }

  std::vector<int> sampled_channels() const {
    std::vector<int> channels{0, spec_.dim / 3, spec_.dim / 2, spec_.dim - 1};
    channels.resize(size_t(std::unique(channels.begin(), channels.end()) - channels.begin()));
    return channels;
  }
  HostTensor channels_of(const HostTensor& rows, const std::vector<int>& channels) const;  // [rows, dim] to [rows, channels]
  HostTensor fetch(const DeviceTensor&) const;

  const ShortConvSpec spec_;
  const DeviceStream& stream_;
  std::vector<int32_t> starts_{0}, lens_, slots_, drafts_, accepted_;
  Batch batch_;
  ShortConvCaseInputs host_;  // no requests
  DeviceTensor weight_, bias_;
  int64_t copy_bytes_ = 0;
  std::vector<Copy> copies_;
};

HostTensor ShortConvProblem::channels_of(const HostTensor& t, const std::vector<int>& channels) const {
  const int64_t rows = t.num_elements() / spec_.dim, count = int64_t(channels.size()), size = size_of(t.dtype);
  HostTensor part = HostTensor::make(t.dtype, {rows, count});
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(&part.bytes[size_t((row * count + i) * size)], &t.bytes[size_t((row * spec_.dim + channels[size_t(i)]) * size)],
                  size_t(size));
  return part;
}

HostTensor ShortConvProblem::fetch(const DeviceTensor& from) const {
  HostTensor t = HostTensor::make(spec_.dtype, {from.view.num_elements()});
  stream_.download(t.bytes.data(), from.view.data, int64_t(t.bytes.size()));
  stream_.synchronize();
  return t;
}

ShortConvCaseInputs ShortConvProblem::sample() const {
  const std::vector<int> channels = sampled_channels();
  const int64_t count = int64_t(channels.size()), rows = spec_.state_rows(), slot_bytes = rows * count * size_of(spec_.dtype);
  ShortConvCaseInputs in;
  in.spec = spec_;
  in.spec.dim = int(count);
  in.input = channels_of(host_.input, channels);  // the rows of a token one after the other
  in.input.sizes = {num_tokens(), in.spec.input_channels()};
  in.weight = HostTensor::make(spec_.dtype, {count, spec_.width});
  for (int64_t i = 0; i < count * spec_.width; ++i)
    in.weight.set(i, host_.weight.get(channels[size_t(i / spec_.width)] * int64_t(spec_.width) + i % spec_.width));
  if (spec_.bias) in.bias = channels_of(host_.bias, channels), in.bias.sizes = {count};
  const HostTensor slots = channels_of(host_.state, channels);
  in.state = HostTensor::make(spec_.dtype, {int64_t(slots_.size()), rows, count});
  for (size_t r = 0; r < slots_.size(); ++r) {
    std::memcpy(&in.state.bytes[r * size_t(slot_bytes)], &slots.bytes[size_t(slots_[r] * slot_bytes)], size_t(slot_bytes));
    const int q_len = starts_[r + 1] - starts_[r];
    in.requests.push_back({.q_len = q_len, .context_len = lens_[r] - q_len, .drafts = drafts_[r], .accepted = accepted_[r], .id = int(r)});
  }
  return in;
}

ShortConvRunResult ShortConvProblem::actual() const {
  const ShortConvCaseInputs in = sample();
  const std::vector<int> channels = sampled_channels();
  const HostTensor out = channels_of(fetch(copies_[0].out), channels), state = channels_of(fetch(copies_[0].state), channels);
  ShortConvRunResult result;
  for (int64_t i = 0; i < out.num_elements(); ++i) result.out.push_back(float(out.get(i)));
  result.state = HostTensor::make(spec_.dtype, in.state.sizes);
  const size_t row_bytes = channels.size() * size_t(size_of(spec_.dtype)), rows = size_t(spec_.state_rows());
  for (size_t r = 0; r < slots_.size(); ++r)
    std::memcpy(&result.state.bytes[r * rows * row_bytes], &state.bytes[size_t(slots_[r]) * rows * row_bytes],
                size_t(in.written_rows(r).end) * row_bytes);
  return result;
}

}  // namespace

ShortConvWork work_of(const ShortConvSpec& spec, const std::vector<BenchRequest>& requests) {
  const double row = double(spec.dim) * double(size_of(spec.dtype));
  ShortConvWork work{.read_bytes = row * (spec.width + (spec.bias ? 1 : 0))};
  for (const BenchRequest& r : requests) {
    const bool has_past = r.seq_len > r.q_len;
    const int given = spec.input_channels() / spec.dim;  // rows of a token
    work.read_bytes += row * (double(given) * r.q_len + (has_past ? spec.width - 1 : 0));
    const int drafts = has_past ? std::min(spec.num_drafts, r.q_len - 1) : 0;
    work.written_bytes += row * (r.q_len + spec.width - 1 + drafts * (spec.tree_drafts ? spec.width - 1 : 1));
    work.flops += double(r.q_len) * spec.dim * (2.0 * spec.width + (spec.form == ShortConvForm::gated ? 2 : 0));
  }
  return work;
}

ShortConvBenchResult bench(const BackendOf<ShortConvFamily>& backend, const ShortConvSpec& spec, const DeviceInfo& device,
                           const std::vector<BenchRequest>& requests, const ShortConvBenchOptions& options) {
  ShortConvBenchResult result{work_of(spec, requests)};
  const auto stream = open_stream(device, options.threads);
  const ShortConvProblem problem(spec, requests, options, *stream);
  result.copy_bytes = problem.copy_bytes();
  result.copies = problem.copies();
  PlanOptions plan_options;
  plan_options.limits = problem.limits();
  plan_options.threads = options.threads;
  const auto plan = backend.plan(spec, device, plan_options);
  result.captured = stream->asynchronous() && plan->capturable();
  result.plan_s = best_seconds([&] { plan->update(problem.batch(), stream->get()); });
  result.plan = plan->str();
  plan->run(problem.inputs(0), problem.outputs(0), stream->get());
  if (options.check) {
    const ShortConvCaseInputs in = problem.sample();
    const ShortConvJudgement judgement = judge(expect(in), in, problem.actual());
    check(judgement.pass(), "bench.check", "{} on {}: some channels differ from the reference: {}", backend.name(), spec.str(),
          judgement.failure);
    result.check_error = judgement.error.max;
    result.check_allowed = judgement.bound.max;
  }
  int copy = 0;
  const auto run = [&] {
    plan->run(problem.inputs(copy), problem.outputs(copy), stream->get());
    copy = (copy + 1) % result.copies;
  };
  static_cast<Timing&>(result) = time_calls(run, *stream, result.captured, result.copies, options);
  return result;
}

Share share_of(const ShortConvBenchResult& r, const Ceilings& c, const DeviceInfo& device) {
  if (c.dram_read <= 0) return {};
  const bool in_cache = stays_in_cache(r.copy_bytes * r.copies, c, device);
  return {(r.read_bytes + r.written_bytes) / r.median_s / (in_cache ? c.l3_read : c.dram_read), in_cache ? "L3" : "DRAM"};
}

}  // namespace imbrex::serve
