// Synthetic inputs for the replay (see synthetic.h).
#include "serve/synthetic.h"

#include <algorithm>
#include <cmath>

#include "core/float_types.h"
#include "recurrent/conv_plan.h"

namespace imbrex::serve {

namespace {

// Close to a standard normal number: the sum of four 16-bit numbers. Integers and one product, so the same bits everywhere.
float normal(uint64_t bits) {
  const auto sum = int64_t((bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48));
  return float(sum - 2 * 0xffff) * (1.f / 37837.f);  // sqrt(4 * (2^32 - 1) / 12)
}

}  // namespace

Synthetic::Synthetic(uint64_t seed) : seed_(hash_numbers(seed, 0x716b76u)), pool_(size_t(kOffsets) + kMaxDim) {
  for (size_t i = 0; i < pool_.size(); ++i) pool_[i] = float_to_bf16(normal(hash_numbers(seed_, i)));
}

void Synthetic::offsets(Side side, int layer, std::span<const uint64_t> keys, int num_heads, int32_t* to) const {
  for (const uint64_t key : keys) {
    for (int h = 0; h < num_heads; ++h) *to++ = int32_t(offset(side, layer, h, key));
  }
}

int Synthetic::piece(int numbers) {
  int pieces = (numbers + kMaxDim - 1) / kMaxDim;
  while (numbers % pieces != 0) ++pieces;
  return numbers / pieces;
}

void Synthetic::copy(Side side, int layer, int numbers, int first, uint64_t key, std::span<uint16_t> to) const {
  const int each = piece(numbers);
  for (size_t done = 0, count = 0; done < to.size(); done += count) {
    const int at = first + int(done), row = at / each, within = at % each;
    count = std::min(to.size() - done, size_t(each - within));
    std::copy_n(pool_.begin() + offset(side, layer, row, key) + within, count, to.begin() + int64_t(done));
  }
}

LayerParameters::LayerParameters(const AttentionSpec& spec, uint64_t seed, int layer) : num_q_heads(spec.num_q_heads) {
  const auto numbers = [&](int count, uint64_t what, float mean, float deviation) {
    std::vector<float> values;
    values.reserve(size_t(count));
    for (int i = 0; i < count; ++i) values.push_back(mean + deviation * normal(hash_numbers(seed, what, uint64_t(layer), uint64_t(i))));
    return values;
  };
  const int heads = spec.num_q_heads;
  if (spec.score.sinks) sinks = numbers(heads, 1, 0.f, 1.f);
  if (spec.score.head_scales) head_scales = numbers(heads, 2, 1.f, 0.1f);
  if (spec.score.relative_buckets > 0) relative_bias = numbers(spec.score.relative_buckets * heads, 3, 0.f, 1.f);
  if (spec.score.alibi) {
    for (int h = 0; h < heads; ++h) alibi_slopes.push_back(std::exp2(-8.f * float(h + 1) / float(heads)));
  }
}

void LayerParameters::view(AttentionInputs& inputs, int first, int count) const {
  const auto heads = [&](const std::vector<float>& values) {
    return values.empty() ? TensorView{} : TensorView::contiguous(const_cast<float*>(values.data()) + first, DType::f32, {count});
  };
  inputs.sinks = heads(sinks);
  inputs.alibi_slopes = heads(alibi_slopes);
  inputs.head_scales = heads(head_scales);
  if (!relative_bias.empty()) {
    const int64_t buckets = int64_t(relative_bias.size()) / num_q_heads;
    inputs.relative_bias =
        TensorView::contiguous(const_cast<float*>(relative_bias.data()), DType::f32, {buckets, num_q_heads}).slice(1, first, first + count);
  }
}

ShortConvParameters::ShortConvParameters(const ShortConvSpec& spec, uint64_t seed, int layer) : dim(spec.dim), width(spec.width) {
  const auto numbers = [&](int count, uint64_t what) {
    std::vector<uint16_t> values;
    values.reserve(size_t(count));
    for (int i = 0; i < count; ++i) values.push_back(float_to_bf16(normal(hash_numbers(seed, what, uint64_t(layer), uint64_t(i)))));
    return values;
  };
  weight = numbers(dim * width, 4);
  if (spec.bias) bias = numbers(dim, 5);
}

void ShortConvParameters::view(ShortConvInputs& inputs) const {
  inputs.weight = TensorView::contiguous(const_cast<uint16_t*>(weight.data()), DType::bf16, {dim, width});
  if (!bias.empty()) inputs.bias = TensorView::contiguous(const_cast<uint16_t*>(bias.data()), DType::bf16, {dim});
}

MlaParameters::MlaParameters(const MlaSpec& spec, uint64_t seed, int layer)
    : heads(spec.num_heads), rows(spec.qk_nope_dim + spec.v_dim), rank(spec.kv_lora_rank) {
  kv_b.resize(size_t(heads) * size_t(rows) * size_t(rank));
  for (size_t i = 0; i < kv_b.size(); ++i) kv_b[i] = float_to_bf16(kGain * normal(hash_numbers(seed, 6, uint64_t(layer), i)));
  if (spec.sinks) sinks = LayerParameters(spec.latent_spec(), seed, layer).sinks;
}

void MlaParameters::view(MlaInputs& inputs) const {
  inputs.kv_b = TensorView::contiguous(const_cast<uint16_t*>(kv_b.data()), DType::bf16, {heads, rows, rank});
  if (!sinks.empty()) inputs.sinks = TensorView::contiguous(const_cast<float*>(sinks.data()), DType::f32, {heads});
}

std::vector<RecurrentRow> recurrent_rows(const RecurrentSpec& spec) {
  const int keys = spec.num_k_heads * spec.head_dim_k, values = spec.num_v_heads * spec.head_dim_v;
  std::vector<RecurrentRow> rows{{Side::q, keys}, {Side::k, keys}, {Side::v, values}};
  if (spec.conv != RecurrentConv::none) rows = {{Side::conv, int(spec.conv_channels())}};
  if (spec.gate != RecurrentGate::fixed) rows.push_back({Side::gate, spec.num_v_heads * (spec.channel_gate ? spec.head_dim_k : 1)});
  if (spec.delta) rows.push_back({Side::beta, spec.num_v_heads});
  if (spec.out_gate != OutputGate::none) rows.push_back({Side::z, values});
  return rows;
}

std::array<ConvStretch, 3> conv_stretches(const RecurrentSpec& spec, int first, int heads) {
  const int sharing = spec.num_v_heads / spec.num_k_heads, keys = spec.num_k_heads * spec.head_dim_k,
            values = spec.num_v_heads * spec.head_dim_v;
  const ConvStretch of_keys{first / sharing * spec.head_dim_k, std::max(heads / sharing, 1) * spec.head_dim_k},
      of_values{first * spec.head_dim_v, heads * spec.head_dim_v};
  const auto behind = [](ConvStretch stretch, int others) { return ConvStretch{stretch.first + others, stretch.count}; };
  if (spec.conv == RecurrentConv::vkq) return {of_values, behind(of_keys, values), behind(of_keys, values + keys)};
  return {of_keys, behind(of_keys, keys), behind(of_values, 2 * keys)};
}

RecurrentParameters::RecurrentParameters(const RecurrentSpec& spec, uint64_t seed, int layer)
    : heads(spec.num_v_heads),
      dim_k(spec.head_dim_k),
      channel_gate(spec.channel_gate),
      channel_rates(spec.channel_rates),
      dim_v(spec.head_dim_v) {
  const auto fill = [&](std::vector<float>& values, bool of_channels, uint64_t what, const auto& make) {
    values.resize(size_t(heads) * size_t(of_channels ? dim_k : 1));
    for (size_t i = 0; i < values.size(); ++i) values[i] = make(hash_numbers(seed, what, uint64_t(layer), i));
  };
  constexpr float kSlowest = -6.f;  // logarithm of the smallest rate; the largest is 1
  if (spec.gate == RecurrentGate::fixed)
    fill(rates, channel_rates, 7, [](uint64_t bits) { return std::exp(kSlowest * float(bits >> 40) * 0x1p-24f); });
  if (spec.gate == RecurrentGate::softplus || spec.gate == RecurrentGate::sigmoid) {
    fill(rates, channel_rates, 7, [](uint64_t bits) { return kSlowest * float(bits >> 40) * 0x1p-24f; });
    const float mean = spec.gate == RecurrentGate::softplus ? -1.f : -3.f;
    fill(gate_bias, channel_gate, 8, [mean](uint64_t bits) { return mean + 0.5f * normal(bits); });
  }
  if (spec.skip) fill(skip, false, 9, [](uint64_t bits) { return 1 + 0.1f * normal(bits); });
  if (spec.out_norm != OutputNorm::none) {
    norm_weight.resize(size_t(heads) * size_t(dim_v));
    for (size_t i = 0; i < norm_weight.size(); ++i) norm_weight[i] = 1 + 0.1f * normal(hash_numbers(seed, 10, uint64_t(layer), i));
  }
  if (spec.conv != RecurrentConv::none) conv.emplace(conv_of(spec), seed, layer);
}

void RecurrentParameters::view(RecurrentInputs& inputs, int first, int count) const {
  const auto part = [&](const std::vector<float>& values, bool of_channels) {
    auto* const data = const_cast<float*>(values.data()) + size_t(first) * size_t(of_channels ? dim_k : 1);
    if (values.empty()) return TensorView{};
    return of_channels ? TensorView::contiguous(data, DType::f32, {count, dim_k}) : TensorView::contiguous(data, DType::f32, {count});
  };
  inputs.rates = part(rates, channel_rates);
  inputs.gate_bias = part(gate_bias, channel_gate);
  inputs.skip = part(skip, false);
  if (!norm_weight.empty())
    inputs.norm_weight =
        TensorView::contiguous(const_cast<float*>(norm_weight.data()) + size_t(first) * size_t(dim_v), DType::f32, {count, dim_v});
  if (!conv) return;
  ShortConvInputs of_conv;
  conv->view(of_conv);
  inputs.conv_weight = of_conv.weight, inputs.conv_bias = of_conv.bias;
}

}  // namespace imbrex::serve
