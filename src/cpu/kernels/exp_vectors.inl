// e^x of the vectors of vectors.inl, and what it takes of choices between two vectors. Included after that.

namespace imbrex::cpu {
namespace {

constexpr float kInfinite = __builtin_inff();

// a where the comparison holds, b elsewhere.
inline Floats chosen(auto comparison, Floats a, Floats b) { return comparison ? a : b; }
inline Floats least(Floats a, Floats b) { return chosen(a < b, a, b); }
inline Floats greatest(Floats a, Floats b) { return chosen(a > b, a, b); }

// e^x to 2 units in the last place: 2^n times a polynomial of Taylor in ln 2 (x / ln 2 - n). 0 from -87.3 down, so that nothing is made of
// numbers below the normal ones; infinite from 88.7 up; NaN of NaN.
inline Floats exp_vector(Floats x) {
  const Floats bounded = greatest(least(x, Floats{} + 88.8f), Floats{} - 87.4f);
  const Floats magic = Floats{} + 0x1.8p23f;
  const Floats n = bounded * kLog2e + magic, whole = n - magic;
  const Floats r = (bounded - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;  // ln 2 in two parts
  constexpr float kInverseFactorials[] = {
      0x1.a01a02p-13f, 0x1.6c16c2p-10f, 0x1.111112p-7f, 0x1.555556p-5f, 0x1.555556p-3f, 0x1p-1f, 1.f, 1.f};
  Floats sum = {};
  for (const float c : kInverseFactorials) sum = sum * r + c;
  const Words exponent = ((Words)n - (Words)magic) << 23;
  Floats result = (Floats)((Words)sum + exponent);
  result = chosen(x < -87.3f, Floats{}, result);
  result = chosen(x > 88.7f, Floats{} + kInfinite, result);
  return chosen(x != x, x, result);
}

}  // namespace
}  // namespace imbrex::cpu
