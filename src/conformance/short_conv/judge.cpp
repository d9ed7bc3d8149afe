// See judge.h.
#include "conformance/short_conv/judge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "conformance/precision.h"
#include "core/check.h"
#include "core/float_types.h"
#include "short_conv/reference.h"

namespace imbrex {
namespace {

double rounded_to(DType dtype, double x) {
  char element[sizeof(int64_t)];  // of the widest type
  store_from_double(element, dtype, 0, x);
  return load_as_double(element, dtype, 0);
}

double silu(double s) { return s / (1 + std::exp(-s)); }

// How far the activation of a sum may be off where the sum is off by `error`: the slope of SiLU there, and its own arithmetic. Its
// exponential is off by a unit for each unit of s, and has no float from some s near -87 on, where the result is 0.
double allowed_of_silu(double s, double error) {
  constexpr double kUnits = 12, kSmallest = 0x1p-119;
  const double slope = std::max(std::abs(silu(s + error) - silu(s)), std::abs(silu(s - error) - silu(s)));
  return slope + (kUnits + 2 * std::abs(s)) * kFloatRounding * std::abs(silu(s)) + kSmallest;
}

// The convolution of one channel of a request, its tokens gone by from the state that it has.
void compute_channel(const ShortConvCaseInputs& in, size_t request, int64_t token, int d, ShortConvExpected& expected) {
  const ShortConvSpec& spec = in.spec;
  const int64_t dim = spec.dim;
  const ShortConvCaseInputs::Rows gone = in.past_rows(request);
  const size_t before = size_t(spec.width) - 1, tokens = size_t(in.requests[request].q_len);
  const auto load = [](const HostTensor& t, int64_t first, int64_t stride, std::span<double> to) {
    load_as_doubles(t.bytes.data(), t.dtype, first, stride, to);
  };
  std::vector<double> h(before + tokens), weight(before + 1), c(tokens, 1.), x(tokens, 1.);
  const std::span<double> mine = std::span(h).subspan(before);  // of the step's tokens
  const int64_t row = spec.input_channels();
  load(in.input, token * row + d, row, mine);
  if (spec.form == ShortConvForm::gated) load(in.input, token * row + dim + d, row, c), load(in.input, token * row + 2 * dim + d, row, x);
  load(in.weight, int64_t(d) * spec.width, 1, weight);
  load(in.state, (int64_t(request) * spec.state_rows() + gone.begin) * dim + d, dim, std::span(h).first(size_t(gone.end - gone.begin)));
  const double bias = spec.bias ? in.bias.get(d) : 0;
  const Precision precision = precision_of(spec.dtype);
  // Where in h what a sum is over lies, from the token's own back along its path.
  const int first = int(before);
  const auto before_it = [&](int at) { return first + in.requests[request].parent_of(at - first); };
  for (size_t t = 0; t < tokens; ++t) {
    mine[t] = rounded_to(spec.dtype, mine[t] * x[t]);
    double sum = bias, size = std::abs(bias);
    int of_path = first + int(t);
    for (size_t i = weight.size(); i-- > 0; of_path = i > 0 ? before_it(of_path) : 0) {
      const double term = weight[i] * h[size_t(of_path)];
      sum += term;
      size += std::abs(term);
    }
    const size_t at = (size_t(token) + t) * size_t(dim) + size_t(d);
    const bool activated = spec.activation == ShortConvActivation::silu;
    const double y = activated ? silu(sum) : sum * c[t], error = (spec.width + 3) * (kFloatRounding * size + kSmallestFloat);
    expected.out[at] = y;
    expected.allowed[at] = (activated ? allowed_of_silu(sum, error) : error * std::abs(c[t])) + precision.rounding * std::abs(y) +
                           precision.smallest / 2 + kSmallestFloat;
  }
}

}  // namespace

ShortConvExpected expected_outputs(const ShortConvCaseInputs& in) {
  ShortConvExpected expected;
  expected.out.resize(size_t(in.num_tokens()) * size_t(in.spec.dim));
  expected.allowed.resize(expected.out.size());
  int64_t token = 0;
  for (size_t r = 0; r < in.requests.size(); token += in.requests[r].q_len, ++r)
    for (int d = 0; d < in.spec.dim && !in.requests[r].is_padding; ++d) compute_channel(in, r, token, d, expected);
  return expected;
}

ShortConvExpected expect(const ShortConvCaseInputs& in) {
  ShortConvExpected expected = expected_outputs(in);
  expected.state = run_case(short_conv_reference(), probe_cpu(), in, {}).state;
  return expected;
}

ShortConvExpected expect(const ShortConvCaseInputs& in, const std::vector<float>& out, HostTensor state) {
  ShortConvExpected expected = expected_outputs(in);
  check(out.size() == expected.out.size(), "conformance.size", "expected {} values, got {}", expected.out.size(), out.size());
  expected.out.assign(out.begin(), out.end());
  expected.state = std::move(state);
  return expected;
}

ShortConvJudgement judge(const ShortConvExpected& expected, const ShortConvCaseInputs& in, const ShortConvRunResult& result) {
  const ShortConvSpec& spec = in.spec;
  check(result.out.size() == expected.out.size(), "conformance.size", "expected {} values, got {}", expected.out.size(), result.out.size());
  ShortConvJudgement j;
  double worst = -1;
  size_t worst_at = 0;
  for (size_t i = 0; i < result.out.size(); ++i) {
    const double actual = double(result.out[i]), wanted = expected.out[i], allowed = expected.allowed[i];
    double error = std::abs(actual - wanted);
    // Beyond the largest number of the type, and what is not finite at all.
    if (actual == rounded_to(spec.dtype, wanted) || (std::isnan(actual) && std::isnan(wanted))) error = 0;
    if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
    const double share = error == 0 ? 0 : std::isfinite(allowed) ? error / allowed : error;
    if (share > worst) worst = share, worst_at = i, j.bound.max = allowed;
    j.error.max = std::max(j.error.max, error);
    j.error.mean += error / double(result.out.size());
    j.bound.mean += allowed / double(result.out.size());
  }
  if (!result.violations.empty()) {
    j.failure = result.violations.front();
  } else if (worst > 1) {
    j.failure = fmt::format("out: channel {} of token {} is {:.9g}, not {:.9g}, and may be {:.3g} off", worst_at % size_t(spec.dim),
                            worst_at / size_t(spec.dim), result.out[worst_at], expected.out[worst_at], expected.allowed[worst_at]);
  } else if (result.state.bytes != expected.state.bytes) {
    for (int64_t i = 0; i < expected.state.num_elements(); ++i) {
      const int64_t size = size_of(spec.dtype);
      if (std::memcmp(&result.state.bytes[size_t(i * size)], &expected.state.bytes[size_t(i * size)], size_t(size)) == 0) continue;
      j.failure =
          fmt::format("state: channel {} of row {} of request {} is {:.9g}, not {:.9g}", i % spec.dim, i / spec.dim % spec.state_rows(),
                      i / spec.dim / spec.state_rows(), result.state.get(i), expected.state.get(i));
      break;
    }
  }
  return j;
}

}  // namespace imbrex
