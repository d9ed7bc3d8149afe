#pragma once
// What a recurrence in double precision and the bounds beside it are made of, for everything that computes them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "imbrex/recurrent.h"

namespace imbrex {

// Roundings of a number that an operation, or a short chain of them, may have.
constexpr double kRecurrentRoundings = 8;
// And of a factor of a product of matrices, of which some are products themselves.
constexpr double kFactorRoundings = 4;
// And what of a factor that is f16 is no different from 0: what a token with a small beta takes off for those before it may be lost.
constexpr double kSmallestFactor = 0x1p-24;

// The softplus of the gate, with its bias.
inline double step_size(const RecurrentSpec& spec, double gate) {
  const double s = gate > 0 ? gate + std::log1p(std::exp(-gate)) : std::log1p(std::exp(gate));
  return std::max(double(spec.gate_min), spec.gate_max > 0 ? std::min(s, double(spec.gate_max)) : s);
}

inline double log_decay(const RecurrentSpec& spec, double rate, double gate) {
  switch (spec.gate) {
    case RecurrentGate::fixed: return -rate;
    case RecurrentGate::log: return gate;
    case RecurrentGate::softplus: return -std::exp(rate) * step_size(spec, gate);
    case RecurrentGate::sigmoid: return spec.gate_min / (1 + std::exp(-std::exp(rate) * gate));
  }
  return 0;
}

inline double beta_of(const RecurrentSpec& spec, double given) {
  return double(spec.beta_scale) * (spec.sigmoid_beta ? 1 / (1 + std::exp(-given)) : given);
}

// A softplus far below zero is an exponential: what rounding takes off the sum of gate and bias is a share of the result.
inline double share_of_step(const RecurrentSpec& spec, double gate) { return spec.scaled_values ? 1 + std::max(-gate, 0.) : 1; }

inline double length_of(const double* x, size_t count) {
  double squares = 0;
  for (size_t i = 0; i < count; ++i) squares += x[i] * x[i];
  return std::sqrt(squares);
}

// Makes of a row of q or k, and of how far the convolution may have taken it, what the recurrence multiplies. Whether any number is off.
inline bool finish_key(const RecurrentSpec& spec, double factor, double* numbers, double* off) {
  const auto count = size_t(spec.head_dim_k);
  double squares = spec.qk_norm ? 1e-6 : 1, off_squares = 0;
  bool is_off = false;
  for (size_t i = 0; i < count; ++i) {
    const double x = numbers[i], e = off[i];
    is_off = is_off || e > 0;
    if (spec.qk_norm) squares += x * x, off_squares += (2 * std::abs(x) + e) * e;
  }
  const double root = std::sqrt(squares), of_root = off_squares / (2 * squares);  // the share of the root that may be off
  for (size_t i = 0; i < count; ++i) {
    off[i] = (off[i] + std::abs(numbers[i]) * of_root) * factor / root * (1 + of_root);
    numbers[i] *= factor / root;
  }
  return is_off;
}

}  // namespace imbrex
