// Recomputes sampled outputs of recurrent layers (see verify.h).
#include <algorithm>

#include "conformance/recurrent/judge.h"
#include "core/float_types.h"
#include "serve/verify.h"

namespace imbrex::serve {
namespace {

int num_shared(const RecurrentSpec& spec) { return spec.num_v_heads / spec.num_k_heads; }  // value heads of a key head

HostTensor copy_of(const TensorView& t) {
  HostTensor copy;
  if (t.empty()) return copy;
  copy = HostTensor::make(t.dtype, {t.sizes.begin(), t.sizes.begin() + t.rank});
  std::copy_n(t.as<char>(), copy.bytes.size(), copy.bytes.begin());
  return copy;
}

// The rows of a tensor of parameters that are of these channels.
HostTensor channels_of(const TensorView& t, const std::array<ConvStretch, 3>& stretches) {
  HostTensor part;
  for (const ConvStretch& stretch : stretches) {
    const HostTensor rows = copy_of(t.empty() ? t : t.slice(0, stretch.first, stretch.first + stretch.count));
    part.dtype = rows.dtype, part.bytes.insert(part.bytes.end(), rows.bytes.begin(), rows.bytes.end());
    if (part.sizes.empty()) {
      part.sizes = rows.sizes;
    } else {
      part.sizes[0] += rows.sizes[0];
    }
  }
  return part;
}

// A target as a layer of its own.
RecurrentSpec spec_of_target(const RecurrentSpec& spec) {
  RecurrentSpec part = spec;
  part.num_v_heads = RecurrentTarget::heads_of(spec);
  part.num_k_heads = std::max(part.num_v_heads / num_shared(spec), 1);
  if (spec.norm_groups > 0) part.norm_groups = part.num_v_heads / spec.norm_heads();
  part.num_drafts = 0, part.tree_drafts = false;
  return part;
}

}  // namespace

int RecurrentTarget::heads_of(const RecurrentSpec& spec) {
  const int sharing = num_shared(spec);
  if (spec.norm_groups > 0) {
    const int heads = spec.norm_heads();
    return heads % sharing == 0 || sharing % heads == 0 ? heads : spec.num_v_heads;
  }
  constexpr int kMostNumbers = 128;
  int heads = std::clamp(kMostNumbers / spec.head_dim_v, 1, sharing);
  while (sharing % heads != 0) --heads;
  return heads;
}

// The request's tokens up to this one, as one step: the heads' rows of what the synthesis made of each.
Verifier::Outcome Verifier::recompute(const VerifySample& sample, const RecurrentTarget& target, Worker&) const {
  const RecurrentSpec& spec = *target.spec;
  RecurrentCaseInputs in;
  in.spec = spec_of_target(spec);
  const int heads = in.spec.num_v_heads, key_head = target.first_head / num_shared(spec);
  const int64_t tokens = sample.position + 1, k_heads = in.spec.num_k_heads, dim_k = spec.head_dim_k, dim_v = spec.head_dim_v;
  in.requests = {{.q_len = int(tokens)}};
  const auto stretches = conv_stretches(spec, target.first_head, heads);
  RecurrentInputs parameters;
  target.parameters->view(parameters, target.first_head, heads);
  if (in.has_conv()) {
    in.input = HostTensor::make(DType::bf16, {tokens, 1, in.spec.conv_channels()});
    in.conv_weight = channels_of(parameters.conv_weight, stretches), in.conv_bias = channels_of(parameters.conv_bias, stretches);
    in.conv_state = HostTensor::make(DType::bf16, {1, in.spec.conv_state_rows(), in.spec.conv_channels()});
  } else {
    in.q = HostTensor::make(DType::bf16, {tokens, k_heads, dim_k}), in.k = in.q;
    in.v = HostTensor::make(DType::bf16, {tokens, heads, dim_v});
  }
  if (spec.gate != RecurrentGate::fixed)
    in.gate = HostTensor::make(DType::bf16, {tokens, spec.channel_gate ? heads : 1, spec.channel_gate ? dim_k : heads});
  if (spec.delta) in.beta = HostTensor::make(DType::bf16, {tokens, 1, heads});
  if (spec.out_gate != OutputGate::none) in.z = HostTensor::make(DType::bf16, {tokens, heads, dim_v});
  in.rates = copy_of(parameters.rates), in.gate_bias = copy_of(parameters.gate_bias), in.skip = copy_of(parameters.skip);
  in.norm_weight = copy_of(parameters.norm_weight);
  in.state = HostTensor::make(spec.state_dtype, {1, 1, heads, dim_k, dim_v});

  const auto tensor_of = [&](Side side) -> HostTensor& {
    switch (side) {
      case Side::q: return in.q;
      case Side::k: return in.k;
      case Side::v: return in.v;
      case Side::conv: return in.input;
      case Side::gate: return in.gate;
      case Side::beta: return in.beta;
      case Side::z: break;
    }
    return in.z;
  };
  for (int p = 0; p <= sample.position; ++p) {
    const uint64_t key = key_of(sample, p);
    for (const RecurrentRow& row : recurrent_rows(spec)) {
      HostTensor& t = tensor_of(row.side);
      const size_t count = size_t(t.sizes[1] * t.sizes[2]);
      auto* to = reinterpret_cast<uint16_t*>(t.bytes.data()) + size_t(p) * count;
      const auto copy = [&](int first, size_t numbers) {
        synthetic_.copy(row.side, sample.layer, row.numbers, first, key, {to, numbers});
        to += numbers;
      };
      const bool of_keys = row.side == Side::q || row.side == Side::k;
      if (row.side != Side::conv) {
        copy(of_keys ? key_head * spec.head_dim_k : target.first_head * (row.numbers / spec.num_v_heads), count);
        continue;
      }
      for (const ConvStretch& stretch : stretches) copy(stretch.first, size_t(stretch.count));
    }
  }

  // A state of fewer bits than a float may have been rounded behind any token.
  const RecurrentExpected expected = expect(in, spec.state_dtype == DType::f32 ? 0 : 1, target.rounded_products);
  Outcome worst;
  const size_t row = size_t(heads) * size_t(dim_v), last = size_t(sample.position) * row;
  for (size_t i = 0; i < row; ++i) {
    worst.add(expected.out[last + i], bf16_to_float(sample.actual[i]), expected.allowed[last + i], target.first_head + int(i) / int(dim_v),
              int(i) % int(dim_v));
  }
  if (sample.state.empty()) return worst;
  const size_t head_numbers = size_t(in.head_numbers()), numbers = size_t(heads) * head_numbers;
  for (size_t i = 0; i < numbers; ++i)
    worst.add(expected.state[i], load_as_double(sample.state.data(), spec.state_dtype, int64_t(i)), expected.allowed_state[i],
              target.first_head + int(i / head_numbers), int(i % head_numbers), true);
  const char* const kept = sample.state.data() + numbers * size_t(size_of(spec.state_dtype));
  const int64_t of_conv = in.has_conv() ? (spec.conv_width - 1) * in.spec.conv_channels() : 0;
  for (int64_t i = 0; i < of_conv; ++i) worst.add(expected.conv_state.get(i), load_as_double(kept, DType::bf16, i), 0, -1, int(i), true);
  return worst;
}

}  // namespace imbrex::serve
