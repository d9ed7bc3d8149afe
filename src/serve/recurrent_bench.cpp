// See recurrent_bench.h.
#include "serve/recurrent_bench.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "conformance/recurrent/judge.h"
#include "core/check.h"
#include "imbrex/model.h"
#include "recurrent/conv_plan.h"
#include "serve/hash.h"

namespace imbrex::serve {
namespace {

struct RecurrentLayerName {
  const char *name, *preset;
};
constexpr RecurrentLayerName kRecurrentLayerNames[] = {
    {"qwen3-next", "qwen3-next-80b-a3b"},   {"qwen3.5-397b", "qwen3.5-397b-a17b"},          {"kimi-linear", "kimi-linear-48b-a3b"},
    {"minimax-01", "minimax-01"},           {"nemotron-3-nano", "nemotron-3-nano-30b-a3b"}, {"granite-4-h-small", "granite-4-h-small"},
    {"falcon-mamba-7b", "falcon-mamba-7b"},
};

// Without what is in front of it and, unless `outputs`, behind it.
RecurrentSpec recurrence_of(const RecurrentSpec& spec, bool outputs) {
  const RecurrentSpec usual;
  RecurrentSpec part = without_conv(spec);
  if (outputs) return part;
  part.out_gate = usual.out_gate, part.out_norm = usual.out_norm, part.norm_groups = usual.norm_groups, part.norm_eps = usual.norm_eps;
  return part;
}

// The tensors of one benchmark, on the host and where the device has them.
class RecurrentProblem {
 public:
  RecurrentProblem(const RecurrentSpec& spec, const std::vector<BenchRequest>& requests, const RecurrentBenchOptions& options,
                   const DeviceStream& stream)
      : spec_(spec), stream_(stream) {
    RecurrentCase c{.name = "bench", .spec = spec, .seed = options.seed};
    for (const BenchRequest& r : requests) {
      // The contents of states are filled in here, because there are many of them.
      c.requests.push_back({.q_len = r.q_len, .context_len = 0, .id = int(c.requests.size())});
    }
    host_ = make_inputs(c);
    for (size_t r = 0; r < requests.size(); ++r) host_.requests[r].context_len = requests[r].seq_len - requests[r].q_len;
    slots_ = shuffled_slots(int64_t(requests.size()), requests.size(), options.seed);
    fill_states(options.seed);
    const StateParts whole = steps_of(host_.requests, 0).front();
    lists_ = std::make_unique<StateBatchLists>(host_.requests, whole, StateSlots{.read = slots_, .written = slots_}, Poison::zero);
    for (const HostTensor* t : {&host_.rates, &host_.gate_bias, &host_.skip, &host_.norm_weight}) parameters_.push_back(copy_of(*t));
    for (int copy = 0; copy < std::max(options.copies, 1); ++copy) {
      copies_.push_back({copy_of(host_.q), copy_of(host_.k), copy_of(host_.v), copy_of(host_.gate), copy_of(host_.beta),
                         copy_of(host_.state), copy_of(host_.z),
                         stream.tensor(spec.dtype, {num_tokens(host_.requests), spec.num_v_heads, spec.head_dim_v})});
    }
    for (const HostTensor* t : {&host_.q, &host_.k, &host_.v, &host_.v, &host_.gate, &host_.beta, &host_.state, &host_.z})
      copy_bytes_ += int64_t(t->bytes.size());
  }

  Batch batch() const { return lists_->batch(false); }
  PlanLimits limits() const {
    PlanLimits limits = limits_of(host_.requests);
    for (const auto& r : host_.requests) limits.max_query_len = std::max(limits.max_query_len, r.q_len);
    return limits;
  }
  int64_t copy_bytes() const { return copy_bytes_; }
  int copies() const { return int(copies_.size()); }
  RecurrentInputs inputs(int copy) const {
    const Copy& c = copies_[size_t(copy)];
    return {.q = c.q.view,
            .k = c.k.view,
            .v = c.v.view,
            .gate = spec_.channel_gate ? c.gate.view : without_heads(c.gate.view),
            .beta = without_heads(c.beta.view),
            .rates = parameters_[0].view,
            .gate_bias = parameters_[1].view,
            .skip = parameters_[2].view,
            .state = state_view(c.state.view),
            .z = c.z.view,
            .norm_weight = parameters_[3].view};
  }
  RecurrentOutputs outputs(int copy) const { return {.out = copies_[size_t(copy)].out.view}; }

  // A value head of some requests, as a case of its own; and what run() has left of it in the first copy.
  RecurrentCaseInputs sample() const;
  RecurrentRunResult actual() const;

 private:
  struct Copy {
    DeviceTensor q, k, v, gate, beta, state, z, out;
  };

  DeviceTensor copy_of(const HostTensor& t) const { return t.empty() ? DeviceTensor{} : stream_.copy_of(t.view()); }
  static TensorView without_heads(TensorView t) {
    if (!t.empty()) t.rank = 2, t.sizes[1] = t.sizes[2], t.strides[1] = 1;
    return t;
  }
  // [requests, 1, heads, two dimensions] in the order of the layout; cases have [.., head_dim_k, head_dim_v] for any.
  TensorView state_view(TensorView t) const {
    if (spec_.layout == StateLayout::v_first) std::swap(t.sizes[3], t.sizes[4]), t.strides[3] = t.sizes[4];
    return t;
  }

  // Stretches of one array of numbers: as good as fresh ones for timing, and quickly made.
  void fill_states(uint64_t seed) {
    const int64_t head = host_.head_numbers(), size = size_of(spec_.state_dtype);
    RecurrentCase c{.name = "states", .spec = spec_, .requests = {{.q_len = 0, .context_len = 1}}, .seed = seed};
    const HostTensor numbers = make_inputs(c).state;
    const int64_t heads = numbers.num_elements() / head;
    for (int64_t i = 0; i < host_.state.num_elements() / head; ++i)
      std::memcpy(host_.state.bytes.data() + i * head * size,
                  numbers.bytes.data() + int64_t(hash_numbers(seed, uint64_t(i)) % uint64_t(heads)) * head * size, size_t(head * size));
  }

  int head() const { return spec_.num_v_heads / 2; }
  // The shortest requests, of so many tokens in all, and one in any case.
  std::vector<size_t> sampled_requests() const {
    constexpr int kMostTokens = 1024;
    std::vector<size_t> order(host_.requests.size()), sampled;
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::stable_sort(order, {}, [&](size_t r) { return host_.requests[r].q_len; });
    int tokens = 0;
    for (const size_t r : order) {
      if (!sampled.empty() && tokens + host_.requests[r].q_len > kMostTokens) break;
      sampled.push_back(r), tokens += host_.requests[r].q_len;
    }
    std::ranges::sort(sampled);
    return sampled;
  }
  // The rows of a head of the sampled requests' tokens, [tokens, heads, dim] to [tokens, 1, dim].
  HostTensor rows_of(const HostTensor& t, int64_t head) const {
    if (t.empty()) return {};
    std::vector<char> bytes;
    const int64_t row = t.sizes[2] * size_of(t.dtype);
    for (const size_t r : sampled_requests()) {
      int64_t first = 0;
      for (size_t i = 0; i < r; ++i) first += host_.requests[i].q_len;
      for (int64_t token = first; token < first + host_.requests[r].q_len; ++token) {
        const char* const from = t.bytes.data() + (token * t.sizes[1] + head) * row;
        bytes.insert(bytes.end(), from, from + row);
      }
    }
    HostTensor part = HostTensor::make(t.dtype, {int64_t(bytes.size()) / row, 1, t.sizes[2]});
    part.bytes = std::move(bytes);
    return part;
  }
  // One number a token: of tensors [tokens, 1, heads].
  HostTensor column_of(const HostTensor& t, int64_t column) const {
    const HostTensor rows = rows_of(t, 0);
    HostTensor part = HostTensor::make(t.dtype, {rows.sizes[0], 1, 1});
    for (int64_t i = 0; i < rows.sizes[0]; ++i) part.set(i, rows.get(i * rows.sizes[2] + column));
    return part;
  }
  HostTensor states_of(const HostTensor& states) const {
    const int64_t bytes = host_.head_numbers() * size_of(spec_.state_dtype);
    const std::vector<size_t> sampled = sampled_requests();
    HostTensor part = HostTensor::make(spec_.state_dtype, {int64_t(sampled.size()), 1, 1, spec_.head_dim_k, spec_.head_dim_v});
    for (size_t i = 0; i < sampled.size(); ++i)
      std::memcpy(part.bytes.data() + int64_t(i) * bytes,
                  states.bytes.data() + (int64_t(slots_[sampled[i]]) * spec_.num_v_heads + head()) * bytes, size_t(bytes));
    return part;
  }
  HostTensor fetch(const DeviceTensor& from, const HostTensor& like) const {
    HostTensor t = HostTensor::make(like.dtype, like.sizes);
    stream_.download(t.bytes.data(), from.view.data, int64_t(t.bytes.size()));
    stream_.synchronize();
    return t;
  }

  const RecurrentSpec spec_;
  const DeviceStream& stream_;
  RecurrentCaseInputs host_;  // states by slot
  std::vector<int32_t> slots_;
  std::unique_ptr<StateBatchLists> lists_;
  std::vector<DeviceTensor> parameters_;
  std::vector<Copy> copies_;
  int64_t copy_bytes_ = 0;
};

RecurrentCaseInputs RecurrentProblem::sample() const {
  const int64_t k_head = head() / (spec_.num_v_heads / spec_.num_k_heads);
  RecurrentCaseInputs in;
  in.spec = spec_;
  in.spec.num_k_heads = in.spec.num_v_heads = 1, in.spec.norm_groups = 0;
  for (const size_t r : sampled_requests()) in.requests.push_back(host_.requests[r]);
  in.q = rows_of(host_.q, k_head), in.k = rows_of(host_.k, k_head), in.v = rows_of(host_.v, head()), in.z = rows_of(host_.z, head());
  if (!host_.gate.empty()) in.gate = spec_.channel_gate ? rows_of(host_.gate, head()) : column_of(host_.gate, head());
  if (!host_.beta.empty()) in.beta = column_of(host_.beta, head());
  const auto parameter = [&](const HostTensor& t) {
    if (t.empty()) return HostTensor{};
    const int64_t count = t.num_elements() / spec_.num_v_heads;
    HostTensor part = HostTensor::make(t.dtype, t.sizes.size() == 2 ? std::vector<int64_t>{1, count} : std::vector<int64_t>{1});
    for (int64_t i = 0; i < count; ++i) part.set(i, t.get(head() * count + i));
    return part;
  };
  in.rates = parameter(host_.rates), in.gate_bias = parameter(host_.gate_bias), in.skip = parameter(host_.skip);
  in.norm_weight = parameter(host_.norm_weight);
  in.state = states_of(host_.state);
  return in;
}

RecurrentRunResult RecurrentProblem::actual() const {
  RecurrentRunResult result;
  HostTensor all = HostTensor::make(spec_.dtype, host_.v.sizes);
  const HostTensor out = rows_of(fetch(copies_[0].out, all), head());
  for (int64_t i = 0; i < out.num_elements(); ++i) result.out.push_back(float(out.get(i)));
  result.state = states_of(fetch(copies_[0].state, host_.state));
  return result;
}

}  // namespace

const std::vector<std::string>& recurrent_layer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const RecurrentLayerName& layer : kRecurrentLayerNames) all.emplace_back(layer.name);
    return all;
  }();
  return names;
}

RecurrentSpec recurrent_layer_of(std::string_view name, bool outputs) {
  for (const RecurrentLayerName& known : kRecurrentLayerNames) {
    if (known.name != name) continue;
    for (const ModelLayer& layer : load_model(known.preset).layers)
      if (const auto* const spec = std::get_if<RecurrentSpec>(&layer.spec)) return recurrence_of(*spec, outputs);
  }
  fail("bench.layer", "expected a recurrent layer of a model that is known here, got {}", name);
}

RecurrentWork work_of(const RecurrentSpec& spec, const std::vector<BenchRequest>& requests, DType gates_dtype) {
  const double values = double(spec.num_v_heads) * spec.head_dim_v, state = values * spec.head_dim_k, element = double(size_of(spec.dtype));
  const double gates = spec.gate == RecurrentGate::fixed ? 0 : double(spec.num_v_heads) * (spec.channel_gate ? spec.head_dim_k : 1);
  const double token = element * (2. * spec.num_k_heads * spec.head_dim_k + values * (spec.out_gate == OutputGate::none ? 2 : 3)) +
                       double(size_of(gates_dtype)) * (gates + (spec.delta ? spec.num_v_heads : 0));
  const double channels = spec.conv == RecurrentConv::none ? 0 : double(spec.conv_channels());
  const double kept = channels * (spec.conv_width - 1) * element, conv_flops = channels * (2. * spec.conv_width - (spec.conv_bias ? 0 : 1));
  RecurrentWork work;
  for (const BenchRequest& r : requests) {
    if (r.q_len == 0) continue;
    work.state_bytes += (state * double(size_of(spec.state_dtype)) + kept) * (r.seq_len > r.q_len ? 2 : 1);
    work.token_bytes += token * r.q_len;
    work.flops += (state * (spec.delta ? 7 : 5) + conv_flops) * r.q_len;
  }
  return work;
}

RecurrentBenchResult bench(const BackendOf<RecurrentFamily>& backend, const RecurrentSpec& spec, const DeviceInfo& device,
                           const std::vector<BenchRequest>& requests, const RecurrentBenchOptions& options) {
  check(spec.num_drafts == 0, "bench.recurrent.drafts", "expected a layer without drafts, got {}", spec.num_drafts);
  check(spec.out_norm == OutputNorm::none || spec.norm_heads() == 1, "bench.recurrent.outputs",
        "expected a norm of outputs over a head, got one over {} heads", spec.norm_heads());
  RecurrentBenchResult result{work_of(spec, requests)};
  const auto stream = open_stream(device, options.threads);
  const RecurrentProblem problem(spec, requests, options, *stream);
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
    const RecurrentCaseInputs in = problem.sample();
    const RecurrentJudgement judgement = judge(expect(in, 0, plan->rounded_products()), in, problem.actual());
    check(judgement.pass(), "bench.check", "{} on {}: a head differs from the recurrence: {}", backend.name(), spec.str(),
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

Share share_of(const RecurrentBenchResult& r, const Ceilings& c, const DeviceInfo& device) {
  if (c.dram_read <= 0) return {};
  const bool in_cache = stays_in_cache(r.copy_bytes * r.copies, c, device);
  return {(r.state_bytes + r.token_bytes) / r.median_s / (in_cache ? c.l3_read : c.dram_read), in_cache ? "L3" : "DRAM"};
}

}  // namespace imbrex::serve
