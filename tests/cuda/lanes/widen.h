#pragma once
// Many narrow floats at once as floats, for products of kernel texts that run on the host; core/small_floats.h is the definition.
#include <cstdint>
#include <cstring>

namespace imbrex::lanes {

// A code of these formats is a float's, shifted and with another bias, but for the codes from not_finite on.
struct Bf16 {
  using Code = uint16_t;
  static constexpr int kMantissaBits = 7;
  static constexpr float kScale = 1;                // of the two biases
  static constexpr uint32_t kNotFinite = 1u << 16;  // a shift alone is right for all
};
struct F16 {
  using Code = uint16_t;
  static constexpr int kMantissaBits = 10;
  static constexpr float kScale = 0x1p112f;
  static constexpr uint32_t kNotFinite = 0x7c00;
};
struct E4m3 {
  using Code = uint8_t;
  static constexpr int kMantissaBits = 3;
  static constexpr float kScale = 0x1p120f;
  static constexpr uint32_t kNotFinite = 0x7f;
};

template <int n, class Term>
struct Vector {
  using Terms [[gnu::vector_size(n * sizeof(Term))]] = Term;
};
template <int n>
using Floats = typename Vector<n, float>::Terms;
template <int n>
using Doubles = typename Vector<n, double>::Terms;

// Libraries of kernel texts are compiled at -O1, which would call these for every term. It fills a reference: how functions return vectors
// as long as these depends on the machine.
template <class Format, int n>
[[gnu::always_inline]] inline void widen(const typename Format::Code* codes, Floats<n>& value) {
  using Words = typename Vector<n, uint32_t>::Terms;
  using Codes = typename Vector<n, typename Format::Code>::Terms;
  constexpr uint32_t kSign = 1u << (8 * sizeof(typename Format::Code) - 1);
  constexpr int kSignShift = 32 - 8 * int(sizeof(typename Format::Code));
  Codes loaded;
  std::memcpy(&loaded, codes, sizeof loaded);
  const Words words = __builtin_convertvector(loaded, Words);
  const Words magnitude = words & (kSign - 1), sign = (words & kSign) << kSignShift;
  const Words bits = magnitude << (23 - Format::kMantissaBits);
  std::memcpy(&value, &bits, sizeof value);
  value *= Format::kScale;
  Words result;
  std::memcpy(&result, &value, sizeof result);
  const Words not_finite = Words(magnitude >= Format::kNotFinite);
  result |= sign | (not_finite & (0x7f800000u | bits));
  std::memcpy(&value, &result, sizeof value);
}

template <int n, class Term = float>
[[gnu::always_inline]] inline Term sum_of(const typename Vector<n, Term>::Terms& terms) {
  if constexpr (n == 1) {
    return terms[0];
  } else {
    typename Vector<n / 2, Term>::Terms halves[2];
    std::memcpy(halves, &terms, sizeof halves);
    return sum_of<n / 2, Term>(halves[0] + halves[1]);
  }
}

}  // namespace imbrex::lanes
