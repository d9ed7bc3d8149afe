// See judge.h.
#include "conformance/recurrent/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "conformance/precision.h"
#include "conformance/recurrent/bounds.h"
#include "conformance/recurrent/convolved.h"
#include "conformance/short_conv/judge.h"
#include "core/check.h"

namespace imbrex {
namespace {

// What of a gate of outputs is no different from 0: of an exponential below the normal floats, times a large z.
constexpr double kSmallestGate = 0x1p-118;

// A value head of a request, from the state before the step on.
class ExactHead {
 public:
  // `rows`: with a convolution in front.
  ExactHead(const RecurrentCaseInputs& in, const ConvolvedRows* rows, size_t request, int head, int64_t first_token, bool products,
            RecurrentExpected& expected)
      : in_(in),
        rows_of_conv_(rows),
        spec_(in.spec),
        request_(request),
        head_(head),
        token_(first_token),
        of_factors_(products ? kFactorRoundings * precision_of(in.spec.dtype).rounding : 0),
        expected_(expected),
        s_(size_t(in.head_numbers())),
        error_(s_.size()),
        spread_(size_t(in.spec.head_dim_v)),
        rounded_(size_t(in.spec.head_dim_v)) {}

  void run(int chunk) {
    const StateCaseRequest& r = in_.requests[request_];
    if (r.context_len > 0)
      for (size_t i = 0; i < s_.size(); ++i) s_[i] = in_.state.get(at_of(r.accepted) + index_of(i));
    rows_.resize(1 + size_t(r.drafts));
    for (int row = 0; row < spec_.state_rows(); ++row)
      for (size_t i = 0; i < s_.size(); ++i) expected_.state[size_t(at_of(row)) + i] = expected_.allowed_state[size_t(at_of(row)) + i] = 0;
    if (r.q_len == r.drafts) take_state(0);
    for (int t = 0; t < r.q_len; ++t, ++token_) {
      if (chunk > 0 && t > 0 && t % chunk == 0) hand_on();
      if (t >= r.q_len - r.drafts && spec_.tree_drafts) {
        const Row& parent = rows_[size_t(r.parent_of(t) + 1 - (r.q_len - r.drafts))];
        s_ = parent.numbers, error_ = parent.errors, spread_ = parent.spread, rounded_ = parent.rounded;
      }
      step();
      if (t + 1 >= r.q_len - r.drafts) take_state(t + 1 - (r.q_len - r.drafts));
    }
  }

 private:
  // Numbers here are in the order [head_dim_k, head_dim_v], in memory in that of the layout.
  int64_t index_of(size_t i) const {
    const auto k = int64_t(i) / spec_.head_dim_v, v = int64_t(i) % spec_.head_dim_v;
    return spec_.layout == StateLayout::k_first ? int64_t(i) : v * spec_.head_dim_k + k;
  }
  int64_t at_of(int row) const { return ((int64_t(request_) * spec_.state_rows() + row) * spec_.num_v_heads + head_) * in_.head_numbers(); }
  void take_state(int row) {
    const Precision precision = precision_of(spec_.state_dtype);
    for (size_t i = 0; i < s_.size(); ++i) {
      const auto at = size_t(at_of(row) + index_of(i));
      expected_.state[at] = s_[i];
      expected_.allowed_state[at] =
          error_[i] + of_others(i % size_t(spec_.head_dim_v)) + precision.rounding * std::abs(s_[i]) + precision.smallest;
    }
    if (!spec_.tree_drafts) return;
    hand_on();
    rows_[size_t(row)] = {s_, error_, spread_, rounded_};
  }

  // A step ends, or a draft begins from a row: the state is rounded. The delta rule spreads what that makes of the channels of a value over
  // all of them.
  void hand_on() {
    const auto dim_v = size_t(spec_.head_dim_v);
    const double rounding = precision_of(spec_.state_dtype).rounding;
    for (size_t v = 0; v < dim_v; ++v) {
      double squares = 0;
      for (size_t i = v; i < s_.size(); i += dim_v) squares += s_[i] * s_[i];
      const double mean = std::sqrt(squares * double(dim_v) / double(s_.size()));
      for (size_t i = v; i < s_.size(); i += dim_v) error_[i] += rounding * std::abs(s_[i]);
      if (spec_.delta) rounded_[v] += rounding * mean;
    }
  }

  // What a number of a value's column may have from the column's other channels.
  double of_others(size_t v) const { return spread_[v] + rounded_[v]; }
  double number(const HostTensor& t, int64_t head, int64_t i) const { return t.get((token_ * t.sizes[1] + head) * t.sizes[2] + i); }
  static double of_channel(const HostTensor& t, int head, int k) {
    return t.empty() ? 0 : t.sizes.size() == 2 ? t.get(head * t.sizes[1] + k) : t.get(head);
  }
  double gate_of(int k) const {
    if (in_.gate.empty()) return 0;
    const double x = spec_.channel_gate ? number(in_.gate, head_, k) : number(in_.gate, 0, head_);
    return spec_.gate == RecurrentGate::log ? x : x + of_channel(in_.gate_bias, head_, k);
  }
  // A row of q or k, and how far the convolution may have taken it.
  struct Key {
    std::vector<double> numbers, off;
    bool is_off = false;
    static double length(const std::vector<double>& x) { return length_of(x.data(), x.size()); }
  };
  Key key(const HostTensor& t, const HostTensor* off, double factor) const {
    const int head = head_ / (spec_.num_v_heads / spec_.num_k_heads);
    Key row{.numbers = std::vector<double>(size_t(spec_.head_dim_k)), .off = std::vector<double>(size_t(spec_.head_dim_k))};
    for (size_t i = 0; i < row.numbers.size(); ++i) {
      row.numbers[i] = number(t, head, int64_t(i));
      if (off != nullptr) row.off[i] = number(*off, head, int64_t(i));
    }
    row.is_off = finish_key(spec_, factor, row.numbers.data(), row.off.data());
    return row;
  }

  // What roundings of rows of few bits make of S^T k, where drafts begin from such rows: they are of either sign, and several times their
  // root of mean squares is hardly ever reached. Channels that have forgotten more than others have it from those.
  double error_of_known(const std::vector<double>& k, size_t v) const {
    constexpr double kTimes = 3;
    if (!spec_.tree_drafts || !spec_.delta || spec_.state_dtype == DType::f32) return 0;
    double squares = 0;
    for (size_t c = 0; c < k.size(); ++c) squares += std::pow(k[c] * (error_[c * size_t(spec_.head_dim_v) + v] + rounded_[v]), 2);
    return kTimes * std::sqrt(squares);
  }

  void step() {
    const double scale = spec_.scale != 0 ? double(spec_.scale) : 1 / std::sqrt(double(spec_.head_dim_k));
    const ConvolvedRows* const conv = rows_of_conv_;
    const Key query = conv == nullptr ? key(in_.q, nullptr, scale) : key(conv->q, &conv->q_off, scale),
              written = conv == nullptr ? key(in_.k, nullptr, 1) : key(conv->k, &conv->k_off, 1);
    const std::vector<double>&q = query.numbers, &k = written.numbers;
    const auto dim_v = size_t(spec_.head_dim_v);
    const double unit = kRecurrentRoundings * kFloatRounding;
    double slowest = 0;
    for (size_t c = 0; c < k.size(); ++c) {
      const double g = log_decay(spec_, of_channel(in_.rates, head_, int(c)), gate_of(int(c))), factor = std::exp(g);
      slowest = std::max(slowest, factor);
      for (size_t v = 0; v < dim_v; ++v) {
        double& x = s_[c * dim_v + v];
        x *= factor;
        error_[c * dim_v + v] = factor * error_[c * dim_v + v] + unit * (1 + std::abs(g)) * std::abs(x) + kSmallestFloat;
      }
    }
    for (size_t v = 0; v < dim_v; ++v) spread_[v] *= slowest, rounded_[v] *= slowest;
    const double beta = spec_.delta ? beta_of(spec_, in_.beta.get(token_ * spec_.num_v_heads + head_)) : 1;
    const double scaled = spec_.scaled_values ? step_size(spec_, gate_of(0)) : 1, share = share_of_step(spec_, gate_of(0));
    for (size_t v = 0; v < dim_v; ++v) {
      const double given = number(conv == nullptr ? in_.v : conv->v, head_, int64_t(v));
      const double given_off = conv == nullptr ? 0 : number(conv->v_off, head_, int64_t(v));
      double u = given * scaled, size = std::abs(u) * share, off_u = given_off * scaled;
      for (size_t c = 0; spec_.delta && c < k.size(); ++c) {
        const double x = s_[c * dim_v + v];
        u -= k[c] * x;
        size += std::abs(k[c] * x);
        if (written.is_off) off_u += written.off[c] * std::abs(x);
      }
      const double lost = of_factors_ > 0 ? kSmallestFactor * size : 0;
      const double of_rows = std::abs(beta) * error_of_known(k, v);
      u *= beta, size *= std::abs(beta), off_u *= std::abs(beta);
      const double skipped = spec_.skip ? in_.skip.get(head_) * given : 0;
      double y = skipped, terms = std::abs(skipped), error = spec_.skip ? std::abs(in_.skip.get(head_)) * given_off : 0;
      const bool is_off = written.is_off || off_u > 0;
      if (is_off && spec_.delta) spread_[v] += Key::length(written.off) * std::abs(u) + (Key::length(k) + Key::length(written.off)) * off_u;
      if (spread_[v] > 0) error += Key::length(q) * spread_[v];
      for (size_t c = 0; c < k.size(); ++c) {
        double& x = s_[c * dim_v + v];
        x += k[c] * u;
        double& off = error_[c * dim_v + v];
        off += unit * (std::abs(k[c]) * size + std::abs(x)) + std::abs(k[c]) * (of_factors_ * size + lost + of_rows);
        if (is_off && !spec_.delta) off += written.off[c] * std::abs(u) + (std::abs(k[c]) + written.off[c]) * off_u;
        if (query.is_off) error += query.off[c] * (std::abs(x) + off + of_others(v));
        y += q[c] * x;
        terms += std::abs(q[c] * x);
        error += std::abs(q[c]) * (off + rounded_[v]);
      }
      const size_t at = (size_t(token_) * size_t(spec_.num_v_heads) + size_t(head_)) * dim_v + v;
      const Precision precision = precision_of(spec_.dtype);
      expected_.out[at] = y;
      expected_.allowed[at] = error + (unit + of_factors_) * terms + precision.rounding * std::abs(y) + precision.smallest;
    }
  }

  const RecurrentCaseInputs& in_;
  const ConvolvedRows* rows_of_conv_;
  const RecurrentSpec& spec_;
  size_t request_;
  int head_;
  int64_t token_;
  double of_factors_;  // the rounding of factors of products; 0: there are none
  RecurrentExpected& expected_;
  std::vector<double> s_, error_;
  // How long the difference of a value's column may be because the convolution rounds otherwise: of one token, it is in the channels where
  // its key is off. The delta rule takes it to others, and makes it no longer; without that rule it is a part of error_.
  std::vector<double> spread_;
  // What roundings between steps may have made of each number of a value's column, at the root of its mean square. The delta rule takes it
  // from channels to others, also to those that forget more; the column's length it only takes down, so it decays as its slowest channel.
  std::vector<double> rounded_;
  struct Row {
    std::vector<double> numbers, errors, spread, rounded;
  };
  std::vector<Row> rows_;  // of drafts that may be a tree: where they may begin
};

// The gate and the norm of the outputs of a token, for a group of heads from `head` on, and how far they may take errors: an output that is
// off is off by as much times what it is multiplied by, and so is a root that is of outputs which are off.
class ExactOutputs {
 public:
  ExactOutputs(const RecurrentCaseInputs& in, RecurrentExpected& expected) : in_(in), spec_(in.spec), expected_(expected) {}

  void finish(int64_t token, int head) const {
    const size_t dim = size_t(spec_.head_dim_v), count = size_t(spec_.norm_heads()) * dim;
    const size_t first = (size_t(token) * size_t(spec_.num_v_heads) + size_t(head)) * dim;
    const bool shared = in_.norm_weight.sizes.size() == 1, gate_last = spec_.out_norm == OutputNorm::before_gate;
    for (size_t i = first; !gate_last && i < first + count; ++i) multiply(i, gate_of(i));
    if (spec_.out_norm != OutputNorm::none) {
      double mean = double(spec_.norm_eps), off = 0;
      for (size_t i = first; i < first + count; ++i) {
        const double x = expected_.out[i], e = expected_.allowed[i];
        mean += x * x / double(count), off += (2 * std::abs(x) + e) * e / double(count);
      }
      const double factor = 1 / std::sqrt(mean), most = 1 / std::sqrt(std::max(mean - off, double(spec_.norm_eps)));
      for (size_t i = first; i < first + count; ++i) {
        const double weight = in_.norm_weight.get(int64_t(shared ? i % dim : i % (size_t(spec_.num_v_heads) * dim)));
        expected_.allowed[i] = std::abs(weight) * (most * expected_.allowed[i] + (most - factor) * std::abs(expected_.out[i]));
        expected_.out[i] *= weight * factor;
        round(i);
      }
    }
    for (size_t i = first; gate_last && i < first + count; ++i) multiply(i, gate_of(i));
    const Precision precision = precision_of(spec_.dtype);
    for (size_t i = first; i < first + count; ++i)
      expected_.allowed[i] += precision.rounding * std::abs(expected_.out[i]) + precision.smallest;
  }

 private:
  double gate_of(size_t i) const {
    if (spec_.out_gate == OutputGate::none) return 1;
    const double z = in_.z.get(int64_t(i));
    return (spec_.out_gate == OutputGate::silu ? z : 1) / (1 + std::exp(-z));
  }
  void multiply(size_t i, double factor) const {
    expected_.allowed[i] = (std::abs(factor) + kSmallestGate) * expected_.allowed[i] + kSmallestGate * std::abs(expected_.out[i]);
    expected_.out[i] *= factor;
    round(i);
  }
  void round(size_t i) const { expected_.allowed[i] += kRecurrentRoundings * kFloatRounding * std::abs(expected_.out[i]) + kSmallestFloat; }

  const RecurrentCaseInputs& in_;
  const RecurrentSpec& spec_;
  RecurrentExpected& expected_;
};

// The first number whose bits differ; -1: none.
int64_t first_difference(const HostTensor& a, const HostTensor& b) {
  const auto at = std::ranges::mismatch(a.bytes, b.bytes).in1;
  return at == a.bytes.end() ? -1 : (at - a.bytes.begin()) / size_of(a.dtype);
}

// The share of what is allowed that an error is.
double share_of(double actual, double wanted, double allowed) {
  const double error = std::abs(actual - wanted);
  return std::isfinite(error) ? error / allowed : std::numeric_limits<double>::infinity();
}

}  // namespace

void finish_outputs(const RecurrentCaseInputs& in, int64_t token, RecurrentExpected& expected) {
  for (int head = 0; in.spec.has_output_stage() && head < in.spec.num_v_heads; head += in.spec.norm_heads())
    ExactOutputs(in, expected).finish(token, head);
}

RecurrentExpected expect(const RecurrentCaseInputs& in, int chunk, bool products) {
  RecurrentExpected expected;
  expected.out.resize(size_t(num_tokens(in.requests)) * size_t(in.spec.num_v_heads) * size_t(in.spec.head_dim_v));
  expected.allowed.resize(expected.out.size());
  expected.state.resize(size_t(in.state.num_elements()));
  expected.allowed_state.resize(expected.state.size());
  for (size_t i = 0; i < expected.state.size(); ++i) expected.state[i] = in.state.get(int64_t(i));
  ConvolvedRows rows;
  if (in.has_conv()) rows = convolved_rows(in), expected.conv_state = expect(in.conv()).state;
  int64_t token = 0;
  for (size_t r = 0; r < in.requests.size(); token += in.requests[r].q_len, ++r) {
    if (in.requests[r].is_padding) continue;
    for (int head = 0; in.requests[r].q_len > 0 && head < in.spec.num_v_heads; ++head)
      ExactHead(in, in.has_conv() ? &rows : nullptr, r, head, token, products, expected).run(chunk);
    for (int64_t t = token; t < token + in.requests[r].q_len; ++t) finish_outputs(in, t, expected);
  }
  return expected;
}

RecurrentJudgement judge(const RecurrentExpected& expected, const RecurrentCaseInputs& in, const RecurrentRunResult& result) {
  check(result.out.size() == expected.out.size(), "conformance.size", "expected {} values, got {}", expected.out.size(), result.out.size());
  RecurrentJudgement j;
  if (!result.violations.empty()) j.failure = result.violations.front();
  const size_t dim = size_t(in.spec.head_dim_v), heads = size_t(in.spec.num_v_heads);
  for (size_t i = 0; i < result.out.size(); ++i) {
    const double actual = double(result.out[i]), share = share_of(actual, expected.out[i], expected.allowed[i]);
    j.error.max = std::max(j.error.max, std::abs(actual - expected.out[i]));
    j.error.mean += std::abs(actual - expected.out[i]) / double(result.out.size());
    j.bound.mean += expected.allowed[i] / double(result.out.size());
    if (share <= j.worst) continue;
    j.worst = share, j.bound.max = expected.allowed[i];
    if (share > 1 && j.failure.empty())
      j.failure = fmt::format("out: value {} of head {} of token {} is {:.9g}, not {:.9g}, and may be {:.3g} off", i % dim, i / dim % heads,
                              i / dim / heads, actual, expected.out[i], expected.allowed[i]);
  }
  for (size_t i = 0; i < expected.state.size(); ++i) {
    const double actual = result.state.get(int64_t(i)), wanted = expected.state[i], allowed = expected.allowed_state[i];
    const double share = actual == wanted ? 0 : allowed == 0 ? std::numeric_limits<double>::infinity() : share_of(actual, wanted, allowed);
    j.worst = std::max(j.worst, share);
    if (share > 1 && j.failure.empty())
      j.failure =
          fmt::format("state: number {} of head {} of row {} is {:.9g}, not {:.9g}, and may be {:.3g} off", i % size_t(in.head_numbers()),
                      i / size_t(in.head_numbers()) % heads, i / size_t(in.row_numbers()), actual, wanted, allowed);
  }
  if (const int64_t at = first_difference(result.conv_state, expected.conv_state); at >= 0 && j.failure.empty())
    j.failure = fmt::format("conv_state: channel {} of row {} is {:.9g}, not {:.9g}", at % in.spec.conv_channels(),
                            at / in.spec.conv_channels(), result.conv_state.get(at), expected.conv_state.get(at));
  return j;
}

}  // namespace imbrex
