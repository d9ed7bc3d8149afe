// See inputs.h. Contents come from a hash of (seed, tensor, request, position, number), so that they do not depend on the batch.
#include "conformance/recurrent/inputs.h"

#include <cmath>
#include <utility>

#include "conformance/case_random.h"
#include "recurrent/conv_plan.h"

namespace imbrex {
namespace {

enum class RecurrentSequence : uint64_t { queries, keys, values, gates, betas, rates, biases, skips, states, output_gates, weights };

// A stream of numbers.
struct RecurrentRandom {
  uint64_t key;
  RecurrentRandom(uint64_t seed, RecurrentSequence sequence, uint64_t position)
      : key(splitmix(splitmix(seed ^ uint64_t(sequence)) + position)) {}
  uint64_t hash(int64_t i) const { return splitmix(key + uint64_t(i)); }
  double normal(int64_t i) const { return imbrex::normal(hash(i)); }
  double uniform(int64_t i) const { return imbrex::uniform(hash(i)); }
};

// The gate of a token: what RecurrentGate makes decays of 0.5 to 1 of, but for what the case wants.
double gate_value(const RecurrentCase& c, const RecurrentRandom& random, int64_t i, int64_t position) {
  const bool is_log = c.spec.gate == RecurrentGate::log;
  const double usual = is_log ? -0.3 * std::abs(random.normal(i)) : random.normal(i) - (c.spec.gate == RecurrentGate::sigmoid ? 3 : 1);
  switch (c.values) {
    case RecurrentValues::none: return is_log ? 0 : -120;
    case RecurrentValues::forgetful: return position % 7 == 3 ? (is_log ? -90 : 150) : usual;
    case RecurrentValues::extreme:
      return random.hash(i) % 3 == 0 ? (is_log ? -20 : 30) : random.hash(i) % 3 == 1 ? (is_log ? -1e-6 : -30) : usual;
    default: return usual;
  }
}

double beta_value(const RecurrentCase& c, const RecurrentRandom& random, int64_t i) {
  const bool raw = c.spec.sigmoid_beta;
  if (c.values == RecurrentValues::extreme && random.hash(i) % 2 == 0)
    return raw ? (random.hash(i) % 4 == 0 ? -60 : 60) : (random.hash(i) % 4 == 0 ? 0 : 1);
  return raw ? random.normal(i) : random.uniform(i);
}

// The row [heads, dim] of a token. What keys of a delta rule are multiplied by keeps them from growing what they take off.
void fill_keys(const RecurrentCase& c, uint64_t request_seed, RecurrentSequence sequence, int64_t position, HostTensor& t, int64_t token) {
  const RecurrentRandom random(request_seed, sequence, uint64_t(position)), common(request_seed, sequence, ~uint64_t(0));
  const bool same = c.values == RecurrentValues::same_keys && sequence == RecurrentSequence::keys;
  const int64_t heads = t.sizes[1], dim = t.sizes[2];
  const double factor = sequence == RecurrentSequence::values || c.spec.qk_norm ? 1 : 1 / std::sqrt(double(dim));
  for (int64_t i = 0; i < heads * dim; ++i)
    t.set(token * heads * dim + i, factor * (same ? common.normal(i) + 0.01 * random.normal(i) : random.normal(i)));
}

HostTensor floats(std::vector<int64_t> sizes, const auto& value) {
  HostTensor t = HostTensor::make(DType::f32, std::move(sizes));
  for (int64_t i = 0; i < t.num_elements(); ++i) t.set(i, value(i));
  return t;
}

void fill_parameters(const RecurrentCase& c, RecurrentCaseInputs& in) {
  const RecurrentSpec& spec = c.spec;
  const auto of = [&](RecurrentSequence sequence) { return RecurrentRandom(c.seed << 4, sequence, 0); };
  const auto sizes = [&](bool of_channels) {
    return of_channels ? std::vector<int64_t>{spec.num_v_heads, spec.head_dim_k} : std::vector<int64_t>{spec.num_v_heads};
  };
  const bool fixed = spec.gate == RecurrentGate::fixed;
  if (spec.gate != RecurrentGate::log)
    in.rates = floats(sizes(spec.channel_rates), [&](int64_t i) {
      if (!fixed) return 0.3 * of(RecurrentSequence::rates).normal(i) - 0.5;
      if (c.values == RecurrentValues::none) return 0.;
      return c.values == RecurrentValues::forgetful && i % 2 == 1 ? 70 : 0.02 + 0.6 * of(RecurrentSequence::rates).uniform(i);
    });
  if (!fixed && spec.gate != RecurrentGate::log && c.seed % 5 != 0)
    in.gate_bias = floats(sizes(spec.channel_gate), [&](int64_t i) { return 0.5 * of(RecurrentSequence::biases).normal(i); });
  if (spec.out_norm != OutputNorm::none) {
    in.norm_weight =
        HostTensor::make(c.float_gates ? DType::f32 : spec.dtype,
                         c.shared_weight ? std::vector<int64_t>{spec.head_dim_v} : std::vector<int64_t>{spec.num_v_heads, spec.head_dim_v});
    for (int64_t i = 0; i < in.norm_weight.num_elements(); ++i) in.norm_weight.set(i, 1 + 0.3 * of(RecurrentSequence::weights).normal(i));
  }
  if (spec.skip) in.skip = floats({spec.num_v_heads}, [&](int64_t i) { return of(RecurrentSequence::skips).normal(i); });
}

// What is convolved to q, k and v, in the place of these.
void fill_conv(const RecurrentCase& c, RecurrentCaseInputs& in) {
  ShortConvCaseInputs conv = make_inputs(ShortConvCase{.name = c.name, .spec = conv_of(c.spec), .requests = c.requests, .seed = c.seed});
  in.input = std::move(conv.input), in.conv_weight = std::move(conv.weight), in.conv_bias = std::move(conv.bias);
  in.input.sizes = {in.input.sizes[0], 1, in.input.sizes[1]};
  in.conv_state = std::move(conv.state);
}

}  // namespace

ShortConvCaseInputs RecurrentCaseInputs::conv() const {
  ShortConvCaseInputs all{
      .spec = conv_of(spec), .requests = requests, .input = input, .weight = conv_weight, .bias = conv_bias, .state = conv_state};
  all.input.sizes = {input.sizes[0], input.sizes[2]};
  return all;
}

RecurrentCaseInputs make_inputs(const RecurrentCase& c) {
  const RecurrentSpec& spec = c.spec;
  const int64_t tokens = num_tokens(c.requests), v_heads = spec.num_v_heads, k = spec.head_dim_k, v = spec.head_dim_v;
  const DType gates = c.float_gates ? DType::f32 : spec.dtype;
  RecurrentCaseInputs in{.spec = spec,
                         .requests = c.requests,
                         .q = {},
                         .k = {},
                         .v = {},
                         .gate = {},
                         .beta = {},
                         .rates = {},
                         .gate_bias = {},
                         .skip = {},
                         .state = HostTensor::make(spec.state_dtype, {int64_t(c.requests.size()), spec.state_rows(), v_heads, k, v}),
                         .z = {},
                         .norm_weight = {}};
  if (in.has_conv()) {
    fill_conv(c, in);
  } else {
    in.q = HostTensor::make(spec.dtype, {tokens, spec.num_k_heads, k}), in.k = in.q;
    in.v = HostTensor::make(spec.dtype, {tokens, v_heads, v});
  }
  if (spec.out_gate != OutputGate::none) in.z = HostTensor::make(spec.dtype, {tokens, v_heads, v});
  if (spec.gate != RecurrentGate::fixed)
    in.gate = HostTensor::make(gates, {tokens, spec.channel_gate ? v_heads : 1, spec.channel_gate ? k : v_heads});
  if (spec.delta) in.beta = HostTensor::make(gates, {tokens, 1, v_heads});
  fill_parameters(c, in);
  int64_t token = 0;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    const StateCaseRequest& request = c.requests[r];
    const uint64_t seed = splitmix(c.seed * 0x10001 + uint64_t(request.id)) << 4;  // room for the number of a sequence
    for (int t = 0; t < request.q_len; ++t, ++token) {
      const int64_t position = request.context_len + t;
      for (const auto& [sequence, t] :
           {std::pair{RecurrentSequence::queries, &in.q}, {RecurrentSequence::keys, &in.k}, {RecurrentSequence::values, &in.v}})
        if (!t->empty()) fill_keys(c, seed, sequence, position, *t, token);
      if (!in.z.empty()) {
        const RecurrentRandom z(seed, RecurrentSequence::output_gates, uint64_t(position));
        for (int64_t i = 0; i < v_heads * v; ++i)
          in.z.set(token * v_heads * v + i, (c.values == RecurrentValues::extreme && z.hash(i) % 3 == 0 ? 40 : 2) * z.normal(i));
      }
      const RecurrentRandom gate(seed, RecurrentSequence::gates, uint64_t(position)),
          beta(seed, RecurrentSequence::betas, uint64_t(position));
      const int64_t each = in.gate.empty() ? 0 : in.gate.sizes[1] * in.gate.sizes[2];
      for (int64_t i = 0; i < each; ++i) in.gate.set(token * each + i, gate_value(c, gate, i, position));
      for (int64_t i = 0; spec.delta && i < v_heads; ++i) in.beta.set(token * v_heads + i, beta_value(c, beta, i));
    }
    if (request.context_len == 0) continue;
    const RecurrentRandom state(seed, RecurrentSequence::states, uint64_t(request.context_len));
    const int64_t first = (int64_t(r) * spec.state_rows() + request.accepted) * in.row_numbers();
    for (int64_t i = 0; i < in.row_numbers(); ++i) in.state.set(first + i, 0.5 * state.normal(i));
  }
  return in;
}

}  // namespace imbrex
