// A block of keys and values as floats for generic.inl's tiles, with AVX2: any element type whose rows are dense, keys transposed eight by
// eight. The floats are those of convert.inl, up to the payload of a NaN.
#include <immintrin.h>

namespace imbrex::cpu {
namespace {

inline bool takes_dense_rows(const AttentionParams& a) {
  const auto dense = [](const KvSide& side) { return side.dim_stride == element_size(side.type) && side.dim % 8 == 0; };
  return dense(a.k) && dense(a.v);
}

// Eight elements of a row.
template <int type>
inline __m256 load_floats(const char* p) {
  if constexpr (type == kF32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  } else if constexpr (type == kBf16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  } else if constexpr (type == kF16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else {
    // A byte is the upper one of an f16: of e5m2 as it is, of e4m3 with one bit more for the exponent, which makes it 2^8 times too small.
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), upper = _mm_unpacklo_epi8(_mm_setzero_si128(), bytes);
    if constexpr (type == kE5m2) return _mm256_cvtph_ps(upper);
    const __m128i sign = _mm_and_si128(upper, _mm_set1_epi16(short(0x8000)));
    const __m128i magnitude = _mm_srli_epi16(_mm_slli_epi16(upper, 1), 2);
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
    const __m128i half = _mm_or_si128(_mm_or_si128(magnitude, sign), _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.f));
  }
}

inline void transpose(__m256 r[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// Keys of a block as [dim][kBlockKeys].
template <int type>
void stage_keys(const BlockRows& rows, int dim, float* to, BlockFetch& fetch) {
  for (int j = 0; j < kBlockKeys; j += 8) {
    for (int d = 0; d < dim; d += 8) {
      fetch.step();
      __m256 r[8];
      for (int i = 0; i < 8; ++i) r[i] = load_floats<type>(rows.k[j + i] + d * element_size(type));
      transpose(r);
      for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + long(d + i) * kBlockKeys + j, r[i]);
    }
  }
}

// Values of a block as [kBlockKeys][stride], with zeros behind the last dim.
template <int type>
void stage_values(const BlockRows& rows, int dim, int stride, float* to, BlockFetch& fetch) {
  for (int j = 0; j < kBlockKeys; ++j, to += stride) {
    fetch.step();
    for (int d = 0; d < dim; d += 8) _mm256_storeu_ps(to + d, load_floats<type>(rows.v[j] + d * element_size(type)));
    for (int d = dim; d < stride; d += 8) _mm256_storeu_ps(to + d, _mm256_setzero_ps());
  }
}

template <int n>
struct Constant {
  static constexpr int value = n;
};

// Calls f with the element type as a constant.
template <class F>
inline void with_type(int type, const F& f) {
  switch (type) {
    case kF32: return f(Constant<kF32>());
    case kF16: return f(Constant<kF16>());
    case kBf16: return f(Constant<kBf16>());
    case kE4m3: return f(Constant<kE4m3>());
    default: return f(Constant<kE5m2>());
  }
}

inline void stage_keys(const AttentionParams& a, const BlockRows& rows, float* to, BlockFetch& fetch) {
  fetch.begin(BlockFetch::kOfKeys, kBlockKeys / 8 * (a.k.dim / 8));
  with_type(a.k.type, [&](auto type) { stage_keys<type.value>(rows, a.k.dim, to, fetch); });
}

inline void stage_values(const AttentionParams& a, const BlockRows& rows, int stride, float* to, BlockFetch& fetch) {
  fetch.begin(BlockFetch::kOfValues, kBlockKeys);
  with_type(a.v.type, [&](auto type) { stage_values<type.value>(rows, a.v.dim, stride, to, fetch); });
}

}  // namespace
}  // namespace imbrex::cpu
