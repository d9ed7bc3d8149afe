// Pairs of 16-bit numbers out of two rows, as products of pairs of bf16 want them. Included after immintrin.h.

namespace imbrex::cpu {
namespace {

// Pairs (a[i], b[i]) of i from 0 to 15, and of the others.
struct Pairs {
  __m512i first, second;
};
inline __attribute__((always_inline)) Pairs interleave(__m512i a, __m512i b) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34,
                                       2, 33, 1, 32, 0);
  return {_mm512_permutex2var_epi16(a, low, b), _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b)};
}

}  // namespace
}  // namespace imbrex::cpu
