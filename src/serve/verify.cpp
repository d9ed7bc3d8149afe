// Recomputes sampled outputs of a replay (see verify.h).
#include "serve/verify.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>

#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "core/check.h"
#include "core/float_types.h"
#include "core/run_parallel.h"
#include "serve/step_plan.h"

namespace imbrex::serve {

namespace {

constexpr int kNoiseColumns = 64;  // enough to know the root mean square to about 10 %
constexpr uint64_t kSignTag = 0x7369676e;
constexpr double kRounding = 0x1p-8;  // to bf16: the most that it moves a number, as a share of it
constexpr double kTiny = 1e-6;

int noise_columns(const AttentionSpec& spec) { return std::min(kNoiseColumns, spec.head_dim_v); }

// One kv head of a layer with ragged keys; the noise columns are behind the values.
AttentionSpec head_spec(const AttentionSpec& spec) {
  AttentionSpec head = spec;
  head.num_q_heads = spec.group_size();
  head.num_kv_heads = 1;
  head.head_dim_v = spec.head_dim_v + noise_columns(spec);
  head.kv_format = KvFormat::strided;
  head.block_size = 0;
  head.mask.tree = head.mask.positions = false;  // keys are those of the query's path, one after the other
  return head;
}

// Outputs of a sample, and their values.
std::pair<int64_t, int64_t> size_of_output(const AttentionSpec& spec) {
  return {spec.group_size(), int64_t(spec.group_size()) * spec.head_dim_v};
}
std::pair<int64_t, int64_t> size_of_output(const ShortConvSpec& spec) { return {1, spec.dim}; }
std::pair<int64_t, int64_t> size_of_output(const MlaSpec& spec) { return {1, spec.v_dim}; }
std::pair<int64_t, int64_t> size_of_output(const RecurrentSpec& spec) {
  const int heads = RecurrentTarget::heads_of(spec);
  return {heads, int64_t(heads) * spec.head_dim_v};
}

}  // namespace

struct Verifier::Worker {
  std::optional<AttentionSpec> spec;  // that the plan is for
  std::unique_ptr<AttentionPlan> plan;
  int plan_keys = 0;
  std::vector<char> q, k, v;  // of the types of the plan's spec
  std::vector<float> out;

  std::optional<ShortConvSpec> conv_spec;
  std::unique_ptr<ShortConvPlan> conv_plan;
  std::vector<uint16_t> input, state, conv_out;
};

// Attention of one query to the ragged keys in Worker::k and v, of some q heads that share a kv head.
struct Verifier::HeadCall {
  AttentionSpec spec;
  int keys = 0;
  AttentionInputs parameters = {};
};

void Verifier::Outcome::add(double wanted, double got, double allowed, int of_head, int at, bool is_of_state) {
  const double error = std::abs(got - wanted);
  const double ratio = error == 0 ? 0 : std::isfinite(error) && allowed > 0 ? error / allowed : HUGE_VAL;
  max_error = std::max(max_error, std::isfinite(error) ? error : HUGE_VAL);
  if (ratio <= max_ratio) return;
  *this = {.max_error = max_error,
           .max_ratio = ratio,
           .expected = wanted,
           .actual = got,
           .bound = allowed,
           .head = of_head,
           .element = at,
           .of_state = is_of_state};
}

Verifier::Verifier(const Synthetic& synthetic, uint64_t seed, int prefix_block, DType kv_dtype, const ParallelFor& threads)
    : synthetic_(synthetic), seed_(seed), prefix_block_(prefix_block), kv_dtype_(kv_dtype), threads_(threads) {
  const auto pool = synthetic.pool();
  const float scale = is_fp8(kv_dtype) ? kFp8Scale : 1.f;
  pool_.resize(pool.size() * size_t(size_of(kv_dtype)));
  negative_pool_.resize(pool_.size());
  for (size_t i = 0; i < pool.size(); ++i) {
    const float value = bf16_to_float(pool[i]) / scale;
    store_from_float(pool_.data(), kv_dtype, int64_t(i), value);
    store_from_float(negative_pool_.data(), kv_dtype, int64_t(i), -value);
  }
  for (int w = 0; w < threads.num_workers; ++w) workers_.push_back(std::make_unique<Worker>());
}
Verifier::~Verifier() = default;

void Verifier::check_spec(const LayerSpec& layer) {
  if (!std::holds_alternative<AttentionSpec>(layer)) return;
  const auto& spec = std::get<AttentionSpec>(layer);
  const int limit = Synthetic::kMaxDim - noise_columns(spec);
  check(spec.head_dim_v <= limit, "replay.verify.head_dim_v", "verification needs head_dim_v <= {}, {} has {}", limit, spec.str(),
        spec.head_dim_v);
}

int Verifier::last_key_of(const VerifySample& sample) { return last_seen(*sample.trace, sample.position); }

uint64_t Verifier::key_of(const VerifySample& sample, int position) const {
  const int certain = sample.position + 1 - int(sample.drafts.size());
  if (!sample.drafts.empty() && position >= certain) return sample.drafts[size_t(position - certain)];
  return token_key(token_id(seed_, *sample.trace, prefix_block_, sample.request, position), position);
}

Verifier::Outcome Verifier::recompute(const VerifySample& sample, const AttentionTarget& target, Worker& w) const {
  const AttentionSpec& spec = *target.spec;
  const int group = spec.group_size(), dim_qk = spec.head_dim_qk, dim_v = spec.head_dim_v, noise = noise_columns(spec);
  // The query has the position of the last token that it sees, as if it came there. Keys that the mask hides are left out; a multiple of
  // the chunk, so that positions keep their chunk.
  const int last = last_key_of(sample);
  int first = int(first_visible_key(spec.mask, last));
  if (spec.mask.chunk > 0) first = first / spec.mask.chunk * spec.mask.chunk;
  const int keys = last + 1 - first;

  const size_t size = size_t(size_of(kv_dtype_)), k_bytes = size * size_t(dim_qk), v_bytes = size * size_t(dim_v);
  const size_t noise_bytes = size * size_t(noise);
  const size_t q_bytes = size_t(dim_qk) * sizeof(uint16_t);
  w.q.resize(size_t(group) * q_bytes);
  w.k.resize(size_t(keys) * k_bytes);
  w.v.resize(size_t(keys) * (v_bytes + noise_bytes));
  for (int h = 0; h < group; ++h) {
    const int64_t offset = synthetic_.offset(Side::q, sample.layer, target.kv_head * group + h, key_of(sample, sample.position));
    std::memcpy(w.q.data() + size_t(h) * q_bytes, synthetic_.pool().data() + offset, q_bytes);
  }
  const Side side_of_values = codec_of(spec).values_in_keys ? Side::k : Side::v;
  char *k = w.k.data(), *v = w.v.data();
  for (int j = first; j <= last; ++j, k += k_bytes, v += v_bytes + noise_bytes) {
    const uint64_t key = key_of(sample, j);
    const size_t from_k = size_t(synthetic_.offset(Side::k, sample.layer, target.kv_head, key)) * size;
    const size_t from_v = size_t(synthetic_.offset(side_of_values, sample.layer, target.kv_head, key)) * size;
    const bool negative = (hash_numbers(key, kSignTag) & 1) != 0;
    std::memcpy(k, pool_.data() + from_k, k_bytes);
    std::memcpy(v, pool_.data() + from_v, v_bytes);
    std::memcpy(v + v_bytes, (negative ? negative_pool_ : pool_).data() + from_v, noise_bytes);
  }

  HeadCall call{.spec = head_spec(spec), .keys = keys};
  target.parameters->view(call.parameters, target.kv_head * group, group);
  attend(call, w);
  const size_t columns = size_t(dim_v) + size_t(noise);
  Outcome worst;
  for (int h = 0; h < group; ++h) {
    const auto head = std::span(w.out).subspan(size_t(h) * columns, columns);
    double squares = 0;
    for (const float x : head.subspan(size_t(dim_v))) squares += double(x) * x;
    const std::vector<double> expected(head.begin(), head.begin() + dim_v);
    compare(sample.actual.data() + h * dim_v, expected, kRounding * std::sqrt(squares / noise), target.kv_head * group + h, worst);
  }
  return worst;
}

// The keys and values of a head are products of its weights and the latents, and a product of weights with the query, or with a sum of
// latents, is the same in double precision: the keys are the latents themselves.
Verifier::Outcome Verifier::recompute(const VerifySample& sample, const MlaTarget& target, Worker& w) const {
  const MlaSpec& spec = *target.spec;
  const MlaParameters& parameters = *target.parameters;
  const int rank = spec.kv_lora_rank, nope = spec.qk_nope_dim, dim_v = spec.v_dim, latent = spec.latent_dim();
  const int last = last_key_of(sample), first = int(first_visible_key(spec.mask, last)), keys = last + 1 - first;
  HeadCall call{.spec = spec.latent_spec(), .keys = keys};
  call.spec.num_q_heads = 1, call.spec.kv_format = KvFormat::strided, call.spec.block_size = 0;
  call.spec.mask.tree = call.spec.mask.positions = false;  // as in head_spec()
  call.spec.q_dtype = call.spec.kv_dtype = DType::f32;
  if (spec.sinks)
    call.parameters.sinks = TensorView::contiguous(const_cast<float*>(parameters.sinks.data()) + target.head, DType::f32, {1});
  const auto weights = [&](int n) {
    return parameters.kv_b.data() + (size_t(target.head) * size_t(nope + dim_v) + size_t(n)) * size_t(rank);
  };

  std::vector<double> absorbed(size_t(latent), 0);
  const uint64_t own = key_of(sample, sample.position);
  const uint16_t* const q = synthetic_.pool().data() + synthetic_.offset(Side::q, sample.layer, target.head, own);
  for (int n = 0; n < nope; ++n) {
    for (int d = 0; d < rank; ++d) absorbed[size_t(d)] += double(bf16_to_float(q[n])) * double(bf16_to_float(weights(n)[d]));
  }
  for (int d = 0; d < spec.qk_rope_dim; ++d) absorbed[size_t(rank) + size_t(d)] = bf16_to_float(q[nope + d]);

  w.q.resize(size_t(latent) * sizeof(float));
  w.k.resize(size_t(keys) * size_t(latent) * sizeof(float));
  w.v.resize(size_t(keys) * size_t(rank) * sizeof(float));
  auto *k = reinterpret_cast<float*>(w.k.data()), *v = reinterpret_cast<float*>(w.v.data());
  std::vector<double> numbers(static_cast<size_t>(latent));
  for (int j = 0; j < keys; ++j) {
    load_as_doubles(pool_.data(), kv_dtype_, synthetic_.offset(Side::k, sample.layer, 0, key_of(sample, first + j)), 1, numbers);
    for (int d = 0; d < latent; ++d) k[j * latent + d] = float((is_fp8(kv_dtype_) ? double(kFp8Scale) : 1.) * numbers[size_t(d)]);
  }
  const auto random_sign = [](uint64_t number) { return (number & 1) != 0 ? -1. : 1.; };
  // The sum of latents, with a random sign for each key or with elements of the query off by a rounding.
  const auto sum_of = [&](bool signs, bool off) {
    for (int j = 0; j < keys; ++j) {
      const auto sign = float(signs ? random_sign(hash_numbers(key_of(sample, first + j), kSignTag)) : 1);
      for (int d = 0; d < rank; ++d) v[j * rank + d] = sign * k[j * latent + d];
    }
    for (int d = 0; d < latent; ++d) {
      const double moved = off && d < rank ? kRounding * random_sign(hash_numbers(own, kSignTag, uint64_t(d))) : 0;
      reinterpret_cast<float*>(w.q.data())[d] = float(absorbed[size_t(d)] * (1 + moved));
    }
    attend(call, w);
    return std::vector<double>(w.out.begin(), w.out.end());
  };
  const std::vector<double> exact = sum_of(false, false), noise = sum_of(true, false), off = sum_of(false, true);
  std::vector<double> expected;
  double of_keys = 0, of_query = 0, of_sum = 0, of_outputs = 0;  // sums of squares over the outputs, as shares of kRounding
  for (int n = 0; n < dim_v; ++n) {
    double value = 0, value_noise = 0, value_off = 0;
    for (int d = 0; d < rank; ++d) {
      const double weight = bf16_to_float(weights(nope + n)[d]), x = exact[size_t(d)];
      value += weight * x, value_noise += weight * noise[size_t(d)], value_off += weight * (off[size_t(d)] - x);
      of_sum += weight * x * weight * x;
    }
    expected.push_back(value);
    of_keys += 3 * value_noise * value_noise;
    of_query += std::pow(value_off / kRounding, 2);
    of_outputs += value * value;
  }
  const double squares = of_keys + of_query + of_sum;
  Outcome worst;
  compare(sample.actual.data(), expected, kRounding * std::sqrt(squares / dim_v), target.head, worst);
  double error = 0;
  for (int n = 0; n < dim_v; ++n) error += std::pow(bf16_to_float(sample.actual[size_t(n)]) - expected[size_t(n)], 2);
  worst.add(0, std::sqrt(error / dim_v), kRounding * std::sqrt((squares + of_outputs) / dim_v) + kTiny, target.head, kRootMeanSquare);
  return worst;
}

// Adds the values of a head, of which the sample has the first of `head`'s at `actual`; `root` is that of the sum of the squares of their
// roundings.
void Verifier::compare(const uint16_t* actual, std::span<const double> expected, double root, int head, Outcome& worst) {
  constexpr int kRoots = 4;
  for (size_t d = 0; d < expected.size(); ++d)
    worst.add(expected[d], bf16_to_float(actual[d]), kRounding * std::abs(expected[d]) + kRoots * root + kTiny, head, int(d));
}

// Writes [q heads, head_dim_v] to Worker::out.
void Verifier::attend(const HeadCall& call, Worker& w) {
  const int keys = call.keys, group = call.spec.num_q_heads, dim_qk = call.spec.head_dim_qk, dim_v = call.spec.head_dim_v;
  if (!w.spec || !(*w.spec == call.spec) || w.plan_keys < keys) {
    w.spec = call.spec;
    w.plan_keys = std::max(2 * keys, 1024);
    PlanOptions options;
    options.limits = {.max_num_reqs = 1, .max_num_tokens = 1, .max_seq_len = w.plan_keys};
    w.plan = find_backend<AttentionFamily>("reference")->plan(call.spec, describe_device("cpu"), options);
  }
  w.out.assign(size_t(group) * size_t(dim_v), 0.f);
  const int32_t query_start_loc[] = {0, 1}, seq_lens[] = {keys};
  int32_t kv_start_loc[] = {0, keys};
  Batch batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.kv_start_loc = TensorView::contiguous(kv_start_loc, DType::i32, {2});
  w.plan->update(batch);
  float scale = kFp8Scale;
  AttentionInputs inputs = call.parameters;
  inputs.q = TensorView::contiguous(w.q.data(), call.spec.q_dtype, {1, group, dim_qk});
  inputs.kv.k = TensorView::contiguous(w.k.data(), call.spec.kv_dtype, {keys, 1, dim_qk});
  inputs.kv.v = TensorView::contiguous(w.v.data(), call.spec.kv_dtype, {keys, 1, dim_v});
  if (is_fp8(call.spec.kv_dtype)) inputs.kv.k_scale = inputs.kv.v_scale = TensorView::contiguous(&scale, DType::f32, {1});
  AttentionOutputs outputs;
  outputs.out = TensorView::contiguous(w.out.data(), DType::f32, {1, group, dim_v});
  w.plan->run(inputs, outputs);
}

// The tokens that the sum is over, as the whole of a request: there are none before them, or these have no part in the last one's sum.
Verifier::Outcome Verifier::recompute(const VerifySample& sample, const ShortConvTarget& target, Worker& w) const {
  const ShortConvSpec& spec = *target.spec;
  const int dim = spec.dim, piece = Synthetic::piece(spec.dim), tokens = std::min(spec.width, sample.position + 1);
  if (!w.conv_spec || !(*w.conv_spec == spec)) {
    w.conv_spec = spec;
    PlanOptions options;
    options.limits = {.max_num_reqs = 1, .max_num_tokens = spec.width, .max_seq_len = spec.width};
    w.conv_plan = find_backend<ShortConvFamily>("reference")->plan(spec, describe_device("cpu"), options);
  }
  const auto row = size_t(spec.input_channels());
  w.input.resize(size_t(spec.width) * row);
  w.state.resize(size_t(spec.state_rows()) * size_t(dim));
  w.conv_out.resize(size_t(spec.width) * size_t(dim));
  for (int i = 0; i < tokens; ++i) {
    const uint64_t key = key_of(sample, sample.position + 1 - tokens + i);
    for (int h = 0; h < spec.input_channels() / piece; ++h)
      std::memcpy(w.input.data() + size_t(i) * row + size_t(h) * size_t(piece),
                  synthetic_.pool().data() + synthetic_.offset(Side::conv, sample.layer, h, key), size_t(piece) * sizeof(uint16_t));
  }

  const int32_t query_start_loc[] = {0, tokens}, seq_lens[] = {tokens}, state_slots[] = {0};
  Batch batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.state_slots = state_slots;
  w.conv_plan->update(batch);
  ShortConvInputs inputs;
  target.parameters->view(inputs);
  inputs.input = TensorView::contiguous(w.input.data(), DType::bf16, {tokens, spec.input_channels()});
  inputs.state = TensorView::contiguous(w.state.data(), DType::bf16, {1, spec.state_rows(), dim});
  w.conv_plan->run(inputs, {.out = TensorView::contiguous(w.conv_out.data(), DType::bf16, {tokens, dim})});

  Outcome worst;
  const bool gated = spec.form == ShortConvForm::gated;
  const auto value = [&](int token, int part, int d) {  // of the gated form
    return double(bf16_to_float(w.input[size_t(token) * row + size_t(part) * size_t(dim) + size_t(d)]));
  };
  for (int d = 0; d < dim; ++d) {
    double magnitude = spec.bias ? std::abs(double(bf16_to_float(target.parameters->bias[size_t(d)]))) : 0;
    for (int i = 0; i < tokens; ++i) {
      const uint16_t weight = target.parameters->weight[size_t(d) * size_t(spec.width) + size_t(spec.width - tokens + i)];
      magnitude += std::abs(double(bf16_to_float(weight)) * value(i, 0, d) * (gated ? value(i, 2, d) : 1));
    }
    const double expected = bf16_to_float(w.conv_out[size_t(tokens - 1) * size_t(dim) + size_t(d)]);
    const double bound = 0x1p-7 * std::abs(expected) + 0x1p-20 * (gated ? std::abs(value(tokens - 1, 1, d)) : 1.1) * magnitude + 1e-6;
    worst.add(expected, bf16_to_float(sample.actual[size_t(d)]), bound, -1, d);
  }
  // A plan of the reference has written to the slot what the layer's has: rows of no token are zero in both.
  for (size_t i = 0; i < sample.state.size() / sizeof(uint16_t); ++i)
    worst.add(bf16_to_float(w.state[i]), load_as_double(sample.state.data(), DType::bf16, int64_t(i)), 0, -1, int(i), true);
  return worst;
}

void Verifier::run(const std::vector<VerifySample>& samples) {
  if (samples.empty()) return;
  std::vector<Outcome> outcomes(samples.size());
  std::vector<std::exception_ptr> errors(workers_.size());  // a worker must not throw through the pool
  std::vector<size_t> order(samples.size());                // those that take longest first, so that workers end together
  std::iota(order.begin(), order.end(), size_t(0));
  std::ranges::stable_sort(order, std::greater(), [&](size_t i) { return samples[i].position; });
  std::atomic<size_t> next{0};
  run_parallel(threads_, [&](int worker) {
    try {
      for (size_t n = next++; n < samples.size(); n = next++) {
        const VerifySample& sample = samples[order[n]];
        outcomes[order[n]] =
            std::visit([&](const auto& target) { return recompute(sample, target, *workers_[size_t(worker)]); }, sample.target);
      }
    } catch (...) {
      errors[size_t(worker)] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    const Outcome& o = outcomes[i];
    const VerifySample& s = samples[i];
    check(o.max_ratio <= 1, "replay.verify",
          "request {}, token {} of {} + {}, layer {}{}, {}: expected {:.6g} within {:.3g}, got {:.6g} ({})", s.request, s.position,
          s.trace->input_length, s.trace->output_length, s.name, o.head < 0 ? "" : fmt::format(", head {}", o.head),
          o.element == kRootMeanSquare ? "root mean square of errors"
                                       : fmt::format("{} {}", o.of_state ? "number of the state" : "element", o.element),
          o.expected, o.bound, o.actual, std::visit([](const auto& target) { return target.spec->str(); }, s.target));
    const auto [outputs, values] = std::visit([](const auto& target) { return size_of_output(*target.spec); }, s.target);
    summary_.outputs += outputs;
    summary_.values += values;
    summary_.states += s.state.empty() ? 0 : outputs;
    summary_.max_error = std::max(summary_.max_error, o.max_error);
    summary_.max_ratio = std::max(summary_.max_ratio, o.max_ratio);
  }
}

}  // namespace imbrex::serve
