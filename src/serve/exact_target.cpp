// See exact_target.h.
#include "serve/exact_target.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "conformance/precision.h"
#include "conformance/recurrent/bounds.h"
#include "core/float_types.h"
#include "serve/state_scan.h"

namespace imbrex::serve {
namespace {

constexpr double kForgotten = -50;  // a logarithm: exp of it is below 2^-72

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

// Some channels of what is convolved, in the order that a scan has them, and what comes of them.
class Channels {
 public:
  Channels(const RecurrentSpec& spec, const RecurrentInputs& parameters, std::vector<ConvStretch> stretches)
      : stretches_(std::move(stretches)), conv_(spec.conv != RecurrentConv::none) {
    for (const ConvStretch& stretch : stretches_) {
      starts_.push_back(count_);
      count_ += (stretch.count + 7) / 8 * 8;
    }
    const int width = conv_ ? spec.conv_width : 1;
    std::vector<double> weights(size_t(width) * size_t(count_)), bias(spec.conv_bias ? size_t(count_) : 0);
    for (size_t s = 0; conv_ && s < stretches_.size(); ++s) {
      for (int i = 0; i < stretches_[s].count; ++i) {
        const int channel = stretches_[s].first + i;
        for (int tap = 0; tap < width; ++tap)
          weights[size_t(tap) * size_t(count_) + size_t(starts_[s]) + size_t(i)] =
              bf16_to_float(parameters.conv_weight.as<uint16_t>()[channel * width + tap]);
        if (spec.conv_bias) bias[size_t(starts_[s]) + size_t(i)] = bf16_to_float(parameters.conv_bias.as<uint16_t>()[channel]);
      }
    }
    scan_.emplace(std::move(weights), std::move(bias), width, spec.conv_silu);
    rows_.resize(size_t(width - 1 + HeadRows::kMost) * size_t(count_));
    numbers_.resize(size_t(HeadRows::kMost) * size_t(count_)), off_.resize(numbers_.size());
  }

  // Takes the tokens from `first` on: what is read of a token comes from `copy`, which writes the numbers of a stretch.
  template <class Copy>
  void take(int first, int count, const Copy& copy) {
    const int before = scan_->width() - 1;
    if (first != next_) std::fill_n(rows_.begin(), size_t(before) * size_t(count_), 0.);
    const int begin = first == next_ ? first : std::max(first - before, 0);
    std::vector<uint16_t> numbers;
    for (int p = begin; p < first + count; ++p) {
      for (size_t s = 0; s < stretches_.size(); ++s) {
        numbers.resize(size_t(stretches_[s].count));
        copy(p, s, stretches_[s], numbers);
        double* const to = rows_.data() + size_t(p - first + before) * size_t(count_) + size_t(starts_[s]);
        for (size_t i = 0; i < numbers.size(); ++i) to[i] = bf16_to_float(numbers[i]);
      }
    }
    if (conv_) {
      scan_->run(rows_.data(), count, numbers_.data(), off_.data());
      std::copy_n(rows_.begin() + int64_t(count) * count_, int64_t(before) * count_, rows_.begin());
    } else {
      std::copy_n(rows_.begin(), int64_t(count) * count_, numbers_.begin());
    }
    next_ = first + count;
  }
  const double* numbers(int token, size_t stretch) const { return numbers_.data() + at(token, stretch); }
  const double* off(int token, size_t stretch) const { return off_.data() + at(token, stretch); }

 private:
  size_t at(int token, size_t stretch) const { return size_t(token) * size_t(count_) + size_t(starts_[stretch]); }

  std::vector<ConvStretch> stretches_;
  bool conv_;
  std::vector<int> starts_;  // of the stretches, at multiples of 8
  int count_ = 0, next_ = -1;
  std::optional<ChannelScan> scan_;
  std::vector<double> rows_, numbers_, off_;
};

// The tokens of one target.
class TargetScan {
 public:
  TargetScan(const RecurrentTarget& target, const Synthetic& synthetic, int layer, std::span<const uint64_t> keys)
      : target_(target),
        spec_(*target.spec),
        part_(spec_of_target(spec_)),
        synthetic_(synthetic),
        layer_(layer),
        keys_(keys),
        stretches_(conv_stretches(spec_, target.first_head, part_.num_v_heads)) {
    target.parameters->view(parameters_, target.first_head, part_.num_v_heads);
    for (const RecurrentRow& row : recurrent_rows(spec_)) numbers_of_[size_t(row.side)] = row.numbers;
    if (spec_.conv == RecurrentConv::none) {
      const int key = target.first_head / num_shared(spec_) * spec_.head_dim_k, keys_of = part_.num_k_heads * spec_.head_dim_k;
      stretches_ = {
          ConvStretch{key, keys_of}, {key, keys_of}, {target.first_head * spec_.head_dim_v, part_.num_v_heads * spec_.head_dim_v}};
    } else if (spec_.conv == RecurrentConv::vkq) {
      std::swap(stretches_[0], stretches_[2]);
    }
  }

  RecurrentExpected run() {
    const int heads = part_.num_v_heads, end = int(keys_.size());
    const double of_factors = target_.rounded_products ? kFactorRoundings * precision_of(spec_.dtype).rounding : 0;
    const std::vector<int> first = first_tokens();
    std::vector<HeadScan> scans(size_t(heads), HeadScan(spec_.head_dim_k, spec_.head_dim_v, spec_.delta, of_factors));
    std::vector<HeadRows> rows(size_t(heads), HeadRows(spec_.head_dim_k, spec_.head_dim_v));
    Channels channels(spec_, parameters_, {stretches_[1], stretches_[2]});
    int count = 0;
    for (int p = std::ranges::min(first); p < end; p += count) {
      count = std::min(HeadRows::kMost, end - p);
      channels.take(p, count, [&](int token, size_t s, const ConvStretch& stretch, std::span<uint16_t> to) {
        read(side_of(s == 0 ? Side::k : Side::v), stretch.first, token, to);
      });
      for (int h = 0; h < heads; ++h) {
        if (p + count <= first[size_t(h)]) continue;
        fill(rows[size_t(h)], channels, h, p, count);
        scans[size_t(h)].run(rows[size_t(h)]);
      }
    }
    return result(scans, channels, count - 1, of_factors);
  }

 private:
  Side side_of(Side plain) const { return spec_.conv == RecurrentConv::none ? plain : Side::conv; }
  void read(Side side, int first, int token, std::span<uint16_t> to) const {
    synthetic_.copy(side, layer_, numbers_of_[size_t(side)], first, keys_[size_t(token)], to);
  }
  double parameter(const TensorView& t, bool of_channels, int head, int c) const {
    return t.empty() ? 0 : double(t.as<float>()[of_channels ? head * spec_.head_dim_k + c : head]);
  }
  // The gates of a head's channels with their bias; the one of a head that has one.
  void gates(int head, int token, std::vector<double>& to) const {
    to.assign(spec_.channel_gate ? size_t(spec_.head_dim_k) : 1, 0.);
    if (spec_.gate == RecurrentGate::fixed) return;
    std::vector<uint16_t> given(to.size());
    read(Side::gate, (target_.first_head + head) * int(to.size()), token, given);
    for (size_t c = 0; c < to.size(); ++c)
      to[c] = bf16_to_float(given[c]) + parameter(parameters_.gate_bias, spec_.channel_gate, head, int(c));
  }
  double rate(int head, int c) const { return parameter(parameters_.rates, spec_.channel_rates, head, c); }

  // Of each head, the first token that is not forgotten.
  std::vector<int> first_tokens() const {
    std::vector<int> first(size_t(part_.num_v_heads), 0);
    std::vector<double> gate;
    for (int h = 0; !spec_.channel_gate && !spec_.channel_rates && std::abs(spec_.beta_scale) <= 1 && h < part_.num_v_heads; ++h) {
      double sum = 0;
      int p = int(keys_.size());
      while (p > 0 && sum > kForgotten) {
        gates(h, --p, gate);
        sum += log_decay(spec_, rate(h, 0), gate[0]);
      }
      first[size_t(h)] = p;
    }
    return first;
  }

  void fill(HeadRows& rows, const Channels& channels, int head, int first, int count) {
    const auto dim_k = size_t(spec_.head_dim_k), dim_v = size_t(spec_.head_dim_v);
    const size_t key_head = size_t(head / num_shared(part_));
    rows.count = count;
    for (int t = 0; t < count; ++t) {
      const size_t k = size_t(t) * dim_k, v = size_t(t) * dim_v;
      std::copy_n(channels.numbers(t, 0) + key_head * dim_k, dim_k, rows.keys.begin() + int64_t(k));
      std::copy_n(channels.off(t, 0) + key_head * dim_k, dim_k, rows.keys_off.begin() + int64_t(k));
      finish_key(spec_, 1, rows.keys.data() + k, rows.keys_off.data() + k);
      gates(head, first + t, gates_);
      double g = 0, decay = 0;
      for (size_t c = 0; c < dim_k; ++c) {
        if (c == 0 || spec_.channel_gate || spec_.channel_rates) {
          g = log_decay(spec_, rate(head, int(c)), gates_[spec_.channel_gate ? c : 0]);
          decay = std::exp(g);
        }
        rows.log_decays[k + c] = g, rows.decays[k + c] = decay;
      }
      const double scaled = spec_.scaled_values ? step_size(spec_, gates_[0]) : 1;
      for (size_t i = 0; i < dim_v; ++i) {
        rows.values[v + i] = channels.numbers(t, 1)[size_t(head) * dim_v + i] * scaled;
        rows.values_off[v + i] = channels.off(t, 1)[size_t(head) * dim_v + i] * scaled;
      }
      rows.shares[size_t(t)] = share_of_step(spec_, gates_[0]);
      if (!spec_.delta) continue;
      uint16_t beta = 0;
      read(Side::beta, target_.first_head + head, first + t, {&beta, 1});
      rows.betas[size_t(t)] = beta_of(spec_, bf16_to_float(beta));
    }
  }

  RecurrentExpected result(const std::vector<HeadScan>& scans, const Channels& channels, int last, double of_factors) {
    const auto heads = size_t(part_.num_v_heads), dim_k = size_t(spec_.head_dim_k), dim_v = size_t(spec_.head_dim_v);
    const int token = int(keys_.size()) - 1;
    const double unit = kRecurrentRoundings * kFloatRounding, scale = spec_.scale != 0 ? double(spec_.scale) : 1 / std::sqrt(double(dim_k));
    const Precision precision = precision_of(spec_.dtype), of_state = precision_of(spec_.state_dtype);
    Channels queries(spec_, parameters_, {stretches_[0]});
    queries.take(token, 1,
                 [&](int p, size_t, const ConvStretch& stretch, std::span<uint16_t> to) { read(side_of(Side::q), stretch.first, p, to); });
    RecurrentExpected expected;
    for (size_t h = 0; h < heads; ++h) {
      const size_t key_head = h / size_t(num_shared(part_));
      std::vector<double> q(queries.numbers(0, 0) + key_head * dim_k, queries.numbers(0, 0) + (key_head + 1) * dim_k);
      std::vector<double> q_off(queries.off(0, 0) + key_head * dim_k, queries.off(0, 0) + (key_head + 1) * dim_k);
      finish_key(spec_, scale, q.data(), q_off.data());
      const double skip = parameter(parameters_.skip, false, int(h), 0), length = length_of(q.data(), dim_k);
      for (size_t v = 0; v < dim_v; ++v) {
        double y = skip * channels.numbers(last, 1)[h * dim_v + v], terms = std::abs(y);
        double error = std::abs(skip) * channels.off(last, 1)[h * dim_v + v] + length * scans[h].spread(int(v));
        for (size_t c = 0; c < dim_k; ++c) {
          const double x = scans[h].number(int(c), int(v)), off = scans[h].error(int(c), int(v));
          y += q[c] * x;
          terms += std::abs(q[c] * x);
          error += std::abs(q[c]) * (off - scans[h].spread(int(v))) + q_off[c] * (std::abs(x) + off);
        }
        expected.out.push_back(y);
        expected.allowed.push_back(error + (unit + of_factors) * terms + precision.rounding * std::abs(y) + precision.smallest);
      }
      for (size_t i = 0; i < dim_k * dim_v; ++i) {
        const bool k_first = spec_.layout == StateLayout::k_first;
        const int c = int(k_first ? i / dim_v : i % dim_k), v = int(k_first ? i % dim_v : i / dim_k);
        const double x = scans[h].number(c, v);
        expected.state.push_back(x);
        expected.allowed_state.push_back(scans[h].error(c, v) + of_state.rounding * std::abs(x) + of_state.smallest);
      }
    }
    finish(expected);
    return expected;
  }

  // The norm and the gate behind the last token, and the rows of the convolution.
  void finish(RecurrentExpected& expected) const {
    RecurrentCaseInputs in;
    in.spec = part_;
    const int token = int(keys_.size()) - 1;
    if (spec_.out_gate != OutputGate::none) {
      in.z = HostTensor::make(DType::bf16, {1, part_.num_v_heads, spec_.head_dim_v});
      read(Side::z, target_.first_head * spec_.head_dim_v, token,
           {reinterpret_cast<uint16_t*>(in.z.bytes.data()), size_t(in.z.num_elements())});
    }
    in.norm_weight = copy_of(parameters_.norm_weight);
    finish_outputs(in, 0, expected);
    if (spec_.conv == RecurrentConv::none) return;
    expected.conv_state = HostTensor::make(DType::bf16, {1, spec_.conv_width - 1, part_.conv_channels()});
    auto* to = reinterpret_cast<uint16_t*>(expected.conv_state.bytes.data());
    for (int p = token + 2 - spec_.conv_width; p <= token; ++p) {
      for (const ConvStretch& stretch : conv_stretches(spec_, target_.first_head, part_.num_v_heads)) {
        if (p >= 0) read(Side::conv, stretch.first, p, {to, size_t(stretch.count)});
        to += stretch.count;
      }
    }
  }

  const RecurrentTarget& target_;
  const RecurrentSpec& spec_;
  const RecurrentSpec part_;
  const Synthetic& synthetic_;
  int layer_;
  std::span<const uint64_t> keys_;
  std::array<ConvStretch, 3> stretches_;  // of q, k and v
  RecurrentInputs parameters_;
  std::array<int, size_t(Side::z) + 1> numbers_of_{};  // of a token's row
  std::vector<double> gates_;
};

}  // namespace

RecurrentSpec spec_of_target(const RecurrentSpec& spec) {
  RecurrentSpec part = spec;
  part.num_v_heads = RecurrentTarget::heads_of(spec);
  part.num_k_heads = std::max(part.num_v_heads / num_shared(spec), 1);
  if (spec.norm_groups > 0) part.norm_groups = part.num_v_heads / spec.norm_heads();
  part.num_drafts = 0, part.tree_drafts = false;
  return part;
}

RecurrentExpected expected_of_target(const RecurrentTarget& target, const Synthetic& synthetic, int layer, std::span<const uint64_t> keys) {
  const RecurrentSpec& spec = *target.spec;
  const bool scanned = spec.state_dtype == DType::f32 && spec.dtype == DType::bf16 && spec.head_dim_v % HeadScan::kColumns == 0;
  return scanned ? TargetScan(target, synthetic, layer, keys).run() : judged_target(target, synthetic, layer, keys);
}

// The tokens as one step: the heads' rows of what the synthesis made of each.
RecurrentExpected judged_target(const RecurrentTarget& target, const Synthetic& synthetic, int layer, std::span<const uint64_t> keys) {
  const RecurrentSpec& spec = *target.spec;
  RecurrentCaseInputs in;
  in.spec = spec_of_target(spec);
  const int heads = in.spec.num_v_heads, key_head = target.first_head / num_shared(spec);
  const int64_t tokens = int64_t(keys.size()), k_heads = in.spec.num_k_heads, dim_k = spec.head_dim_k, dim_v = spec.head_dim_v;
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
  for (size_t p = 0; p < keys.size(); ++p) {
    for (const RecurrentRow& row : recurrent_rows(spec)) {
      HostTensor& t = tensor_of(row.side);
      const size_t count = size_t(t.sizes[1] * t.sizes[2]);
      auto* to = reinterpret_cast<uint16_t*>(t.bytes.data()) + p * count;
      const auto copy = [&](int first, size_t numbers) {
        synthetic.copy(row.side, layer, row.numbers, first, keys[p], {to, numbers});
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
  RecurrentExpected expected = expect(in, spec.state_dtype == DType::f32 ? 0 : 1, target.rounded_products);
  const auto before = int64_t(expected.out.size()) - heads * dim_v;
  expected.out.erase(expected.out.begin(), expected.out.begin() + before);
  expected.allowed.erase(expected.allowed.begin(), expected.allowed.begin() + before);
  return expected;
}

}  // namespace imbrex::serve
