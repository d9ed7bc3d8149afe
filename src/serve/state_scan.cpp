// See state_scan.h.
#include "serve/state_scan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "conformance/precision.h"
#include "conformance/recurrent/bounds.h"
#include "core/cpu_features.h"

namespace imbrex::serve {
namespace {

constexpr double kUnit = kRecurrentRoundings * kFloatRounding;

// A vector of doubles, and its bits.
template <int kBytes>
struct Lanes {
  typedef double V __attribute__((vector_size(kBytes)));
  typedef int64_t I __attribute__((vector_size(kBytes)));
  static constexpr int kCount = kBytes / 8;
  [[gnu::always_inline]] static V absolute(V x) { return reinterpret_cast<V>(reinterpret_cast<I>(x) & 0x7fffffffffffffff); }
  [[gnu::always_inline]] static V load(const double* from) {
    V x;
    __builtin_memcpy(&x, from, sizeof x);
    return x;
  }
  [[gnu::always_inline]] static void store(V x, double* to) { __builtin_memcpy(to, &x, sizeof x); }
  // To the nearest number of bf16, of normal ones.
  [[gnu::always_inline]] static V to_bf16(V x) {
    constexpr int kDropped = 52 - 7;
    I bits = reinterpret_cast<I>(x);
    bits += ((bits >> kDropped) & 1) + ((int64_t(1) << (kDropped - 1)) - 1);
    return reinterpret_cast<V>((bits >> kDropped) << kDropped);
  }
  // Of numbers between -700 and 700, to 1e-15 of the result: 2^n times a polynomial of what is left.
  [[gnu::always_inline]] static V exponential(V x) {
    constexpr double kLog2 = 1.4426950408889634, kHigh = 0x1.62e42feep-1, kLow = 0x1.a39ef35793c76p-33, kMagic = 0x1.8p52;
    const V shifted = x * kLog2 + kMagic, n = shifted - kMagic, r = x - n * kHigh - n * kLow;
    V sum = r * 0 + 1. / 6227020800;  // 1 / 13!
    constexpr double kTerms[] = {1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040, 1. / 720,
                                 1. / 120,       1. / 24,       1. / 6,       1. / 2,      1.,         1.};
    for (const double term : kTerms) sum = sum * r + term;
    const I power = (reinterpret_cast<I>(shifted) - std::bit_cast<int64_t>(kMagic) + 1023) << 52;
    return sum * reinterpret_cast<V>(power);
  }
};

struct ChannelArguments {
  const double *weights, *bias, *rows;
  int width, channels, tokens;
  bool silu;
  double *out, *off;
};

template <class L>
[[gnu::always_inline]] inline void convolve(const ChannelArguments& a) {
  using V = typename L::V;
  constexpr double kSiluUnits = 12, kSmallest = 0x1p-119;  // of its arithmetic, as in conformance/short_conv/judge.cpp
  for (int t = 0; t < a.tokens; ++t) {
    for (int d = 0; d < a.channels; d += L::kCount) {
      V sum = {};
      if (a.bias != nullptr) sum = L::load(a.bias + d);
      V size = L::absolute(sum);
      for (int i = 0; i < a.width; ++i) {
        const V term = L::load(a.weights + size_t(i) * size_t(a.channels) + d) * L::load(a.rows + size_t(t + i) * size_t(a.channels) + d);
        sum += term;
        size += L::absolute(term);
      }
      V y = sum, error = (a.width + 3) * (kFloatRounding * size + kSmallestFloat);
      if (a.silu) {
        const V sigmoid = 1 / (1 + L::exponential(-sum));
        y = sum * sigmoid;
        // The slope of SiLU, which changes by less than a half of what its argument does.
        const V slope = L::absolute(sigmoid * (1 + sum * (1 - sigmoid)));
        error = error * (slope + 0.5 * error) + (kSiluUnits + 2 * L::absolute(sum)) * kFloatRounding * L::absolute(y) + kSmallest;
      }
      const V rounded = L::to_bf16(y), above = L::absolute(L::to_bf16(y + error) - rounded),
              below = L::absolute(L::to_bf16(y - error) - rounded);
      const size_t at = size_t(t) * size_t(a.channels) + size_t(d);
      L::store(rounded, a.out + at);
      L::store(above > below ? above : below, a.off + at);
    }
  }
}

struct HeadArguments {
  const HeadRows& rows;
  int dim_k, dim_v, column;  // the first of kColumns
  bool delta;
  double of_factors;
  double *numbers, *errors, *spread;  // of these columns
  const double *slowest, *key_length, *off_length;
};

// Each number is loaded once a token: the write of a token is made together with the decay of the next.
template <class L, bool kDelta>
[[gnu::always_inline]] inline void scan_columns(const HeadArguments& a) {
  using V = typename L::V;
  constexpr int kVectors = HeadScan::kColumns / L::kCount;
  const HeadRows& rows = a.rows;
  V u[kVectors] = {}, off_u[kVectors] = {}, of_key[kVectors] = {};
  V spread[kVectors];
  for (int j = 0; j < kVectors; ++j) spread[j] = L::load(a.spread + j * L::kCount);
  for (int t = 0; t <= rows.count; ++t) {
    V known[kVectors] = {}, terms[kVectors] = {}, known_off[kVectors] = {};
    const size_t row = size_t(t) * size_t(a.dim_k), before = row - size_t(a.dim_k);
    for (int c = 0; c < a.dim_k; ++c) {
      double* const numbers = a.numbers + c * HeadScan::kColumns;
      double* const errors = a.errors + c * HeadScan::kColumns;
      V x[kVectors], e[kVectors];
      for (int j = 0; j < kVectors; ++j) x[j] = L::load(numbers + j * L::kCount), e[j] = L::load(errors + j * L::kCount);
      if (t > 0) {  // the token before writes
        const double k = rows.keys[before + size_t(c)], size = std::abs(k), off = kDelta ? 0 : rows.keys_off[before + size_t(c)];
        for (int j = 0; j < kVectors; ++j) {
          x[j] += k * u[j];
          e[j] += size * of_key[j] + kUnit * L::absolute(x[j]);
          if (!kDelta) e[j] += off * L::absolute(u[j]) + (size + off) * off_u[j];
        }
      }
      if (t < rows.count) {  // this one forgets, and looks at what it has for its key
        const double decay = rows.decays[row + size_t(c)], cost = kUnit * (1 - rows.log_decays[row + size_t(c)]);
        const double k = rows.keys[row + size_t(c)], size = std::abs(k), off = rows.keys_off[row + size_t(c)];
        for (int j = 0; j < kVectors; ++j) {
          x[j] *= decay;
          const V magnitude = L::absolute(x[j]);
          e[j] = decay * e[j] + (cost * magnitude + kSmallestFloat);
          if (!kDelta) continue;
          known[j] += k * x[j];
          terms[j] += size * magnitude;
          known_off[j] += off * magnitude;
        }
      }
      for (int j = 0; j < kVectors; ++j) L::store(x[j], numbers + j * L::kCount), L::store(e[j], errors + j * L::kCount);
    }
    if (t == rows.count) break;
    const double beta = rows.betas[size_t(t)], beta_size = std::abs(beta), share = rows.shares[size_t(t)];
    const double key_length = a.key_length[t], off_length = a.off_length[t];
    for (int j = 0; j < kVectors; ++j) {
      const size_t at = size_t(t) * size_t(a.dim_v) + size_t(a.column + j * L::kCount);
      const V given = L::load(rows.values.data() + at);
      const V size = L::absolute(given) * share + terms[j];
      u[j] = beta * (given - known[j]);
      off_u[j] = beta_size * (L::load(rows.values_off.data() + at) + known_off[j]);
      of_key[j] = (kUnit + a.of_factors) * beta_size * size + (a.of_factors > 0 ? kSmallestFactor : 0) * size;
      spread[j] *= a.slowest[t];
      if (kDelta) spread[j] += off_length * L::absolute(u[j]) + (key_length + off_length) * off_u[j];
    }
  }
  for (int j = 0; j < kVectors; ++j) L::store(spread[j], a.spread + j * L::kCount);
}

template <class L>
[[gnu::always_inline]] inline void scan(const HeadArguments& a) {
  a.delta ? scan_columns<L, true>(a) : scan_columns<L, false>(a);
}

[[gnu::noinline]] void convolve_portable(const ChannelArguments& a) { convolve<Lanes<16>>(a); }
[[gnu::noinline]] void scan_portable(const HeadArguments& a) { scan<Lanes<16>>(a); }
#if defined(__x86_64__)
[[gnu::target("avx2,fma"), gnu::noinline]] void convolve_avx2(const ChannelArguments& a) { convolve<Lanes<32>>(a); }
[[gnu::target("avx2,fma"), gnu::noinline]] void scan_avx2(const HeadArguments& a) { scan<Lanes<32>>(a); }
[[gnu::target("avx512f,avx512dq"), gnu::noinline]] void convolve_avx512(const ChannelArguments& a) { convolve<Lanes<64>>(a); }
[[gnu::target("avx512f,avx512dq"), gnu::noinline]] void scan_avx512(const HeadArguments& a) { scan<Lanes<64>>(a); }
#endif

struct Loops {
  void (*convolve)(const ChannelArguments&) = convolve_portable;
  void (*scan)(const HeadArguments&) = scan_portable;
};
Loops best_loops() {
#if defined(__x86_64__)
  if (cpu_features().avx512.empty()) return {convolve_avx512, scan_avx512};
  if (cpu_features().avx2.empty()) return {convolve_avx2, scan_avx2};
#endif
  return {};
}
const Loops& loops() {
  static const Loops best = best_loops();
  return best;
}

}  // namespace

ChannelScan::ChannelScan(std::vector<double> weights, std::vector<double> bias, int width, bool silu)
    : weights_(std::move(weights)), bias_(std::move(bias)), width_(width), channels_(int(weights_.size()) / width), silu_(silu) {}

void ChannelScan::run(const double* rows, int tokens, double* out, double* off) const {
  loops().convolve({.weights = weights_.data(),
                    .bias = bias_.empty() ? nullptr : bias_.data(),
                    .rows = rows,
                    .width = width_,
                    .channels = channels_,
                    .tokens = tokens,
                    .silu = silu_,
                    .out = out,
                    .off = off});
}

HeadRows::HeadRows(int dim_k, int dim_v)
    : keys(size_t(kMost) * size_t(dim_k)),
      keys_off(keys.size()),
      decays(keys.size()),
      log_decays(keys.size()),
      values(size_t(kMost) * size_t(dim_v)),
      values_off(values.size()),
      shares(kMost, 1.),
      betas(kMost, 1.) {}

HeadScan::HeadScan(int dim_k, int dim_v, bool delta, double of_factors)
    : dim_k_(dim_k),
      dim_v_(dim_v),
      delta_(delta),
      of_factors_(of_factors),
      numbers_(size_t(dim_k) * size_t(dim_v)),
      errors_(numbers_.size()),
      spread_(size_t(dim_v)) {}

void HeadScan::run(const HeadRows& rows) {
  std::array<double, HeadRows::kMost> slowest, key_length, off_length;
  for (size_t t = 0; t < size_t(rows.count); ++t) {
    const auto first = rows.decays.begin() + int64_t(t) * dim_k_;
    slowest[t] = *std::max_element(first, first + dim_k_);
    key_length[t] = length_of(rows.keys.data() + t * size_t(dim_k_), size_t(dim_k_));
    off_length[t] = length_of(rows.keys_off.data() + t * size_t(dim_k_), size_t(dim_k_));
  }
  for (int column = 0; column < dim_v_; column += kColumns)
    loops().scan({.rows = rows,
                  .dim_k = dim_k_,
                  .dim_v = dim_v_,
                  .column = column,
                  .delta = delta_,
                  .of_factors = of_factors_,
                  .numbers = numbers_.data() + at(0, column),
                  .errors = errors_.data() + at(0, column),
                  .spread = spread_.data() + column,
                  .slowest = slowest.data(),
                  .key_length = key_length.data(),
                  .off_length = off_length.data()});
}

}  // namespace imbrex::serve
