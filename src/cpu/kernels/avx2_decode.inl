// Items of few rows in generic.inl, with AVX2: what its loops would spend most of their time on there is bringing keys and values into
// shape. bf16 keys are turned in pairs of dims, half as many bytes as floats, and widened by the tile that multiplies them; values of any
// type but e4m3 are widened where they lie. Chains of sums are those of generic.inl, so the bits are the same.
#include <immintrin.h>

namespace imbrex::cpu {
namespace {

constexpr int kFewRows = 32;  // with more of them, floats that are made once cost no more than widening in every tile

inline bool takes_pairs(const AttentionParams& a, int num_rows) {
  const auto whole = [](const KvSide& side) { return side.type == kBf16 && side.dim_stride == 2 && side.dim % 16 == 0; };
  return num_rows <= kFewRows && whole(a.k) && whole(a.v);
}

// Whether values are widened in place: one instruction does it for all types but e4m3.
inline bool takes_values_in_place(const AttentionParams& a, int num_rows) {
  return num_rows <= kFewRows && a.v.dim_stride == element_size(a.v.type) && a.v.dim % 16 == 0 && a.v.type != kE4m3;
}

inline void transpose(__m256i r[8]) {
  __m256i t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  __m256i u[8];
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

// Keys of a block as [dim / 2][kBlockKeys] pairs.
inline void pack_keys(const BlockRows& rows, int dim, unsigned* pairs, BlockFetch& fetch) {
  fetch.begin(BlockFetch::kOfKeys, kBlockKeys / 8 * (dim / 16));
  for (int j = 0; j < kBlockKeys; j += 8) {
    for (int d = 0; d < dim / 16; ++d) {
      fetch.step();
      __m256i r[8];
      for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.k[j + i] + 32 * d));
      transpose(r);
      for (int i = 0; i < 8; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(pairs + (8 * d + i) * kBlockKeys + j), r[i]);
    }
  }
}

inline __m256 low_of(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
inline __m256 high_of(__m256i pair) { return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000)))); }

// Scores of four rows against 16 keys.
inline void multiply_pairs(const float* q, long q_stride, const unsigned* pairs, int dim, float* out, BlockFetch& fetch) {
  __m256 a0 = _mm256_setzero_ps(), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, d0 = a0, d1 = a0;
  for (int x = 0; x < dim; x += 2, pairs += kBlockKeys) {
    if (x % 16 == 0) fetch.step();
    const __m256i left = _mm256_load_si256(reinterpret_cast<const __m256i*>(pairs)),
                  right = _mm256_load_si256(reinterpret_cast<const __m256i*>(pairs + 8));
    const auto add = [&](__m256 k0, __m256 k1, const float* of) __attribute__((always_inline)) {
      const __m256 a = _mm256_broadcast_ss(of), b = _mm256_broadcast_ss(of + q_stride);
      a0 = _mm256_fmadd_ps(a, k0, a0), a1 = _mm256_fmadd_ps(a, k1, a1);
      b0 = _mm256_fmadd_ps(b, k0, b0), b1 = _mm256_fmadd_ps(b, k1, b1);
      const __m256 c = _mm256_broadcast_ss(of + 2 * q_stride), d = _mm256_broadcast_ss(of + 3 * q_stride);
      c0 = _mm256_fmadd_ps(c, k0, c0), c1 = _mm256_fmadd_ps(c, k1, c1);
      d0 = _mm256_fmadd_ps(d, k0, d0), d1 = _mm256_fmadd_ps(d, k1, d1);
    };
    add(low_of(left), low_of(right), q + x);
    add(high_of(left), high_of(right), q + x + 1);
  }
  _mm256_storeu_ps(out, a0), _mm256_storeu_ps(out + 8, a1);
  _mm256_storeu_ps(out + kBlockKeys, b0), _mm256_storeu_ps(out + kBlockKeys + 8, b1);
  _mm256_storeu_ps(out + 2 * kBlockKeys, c0), _mm256_storeu_ps(out + 2 * kBlockKeys + 8, c1);
  _mm256_storeu_ps(out + 3 * kBlockKeys, d0), _mm256_storeu_ps(out + 3 * kBlockKeys + 8, d1);
}

// Adds weights of four rows times 16 dims, from `d` on, of a block's values.
template <int type>
inline void add_values(const float* weights, const BlockRows& rows, int d, float* out, long out_stride, BlockFetch& fetch) {
  float *const ra = out, *const rb = ra + out_stride, *const rc = rb + out_stride, *const rd = rc + out_stride;
  __m256 a0 = _mm256_loadu_ps(ra), a1 = _mm256_loadu_ps(ra + 8), b0 = _mm256_loadu_ps(rb), b1 = _mm256_loadu_ps(rb + 8);
  __m256 c0 = _mm256_loadu_ps(rc), c1 = _mm256_loadu_ps(rc + 8), d0 = _mm256_loadu_ps(rd), d1 = _mm256_loadu_ps(rd + 8);
  for (int j = 0; j < kBlockKeys; ++j, ++weights) {
    if (j % 8 == 0) fetch.step();
    const char* const row = rows.v[j] + d * element_size(type);
    const __m256 v0 = load_floats<type>(row), v1 = load_floats<type>(row + 8 * element_size(type));
    const __m256 a = _mm256_broadcast_ss(weights), b = _mm256_broadcast_ss(weights + kBlockKeys);
    a0 = _mm256_fmadd_ps(a, v0, a0), a1 = _mm256_fmadd_ps(a, v1, a1);
    b0 = _mm256_fmadd_ps(b, v0, b0), b1 = _mm256_fmadd_ps(b, v1, b1);
    const __m256 c = _mm256_broadcast_ss(weights + 2 * kBlockKeys), e = _mm256_broadcast_ss(weights + 3 * kBlockKeys);
    c0 = _mm256_fmadd_ps(c, v0, c0), c1 = _mm256_fmadd_ps(c, v1, c1);
    d0 = _mm256_fmadd_ps(e, v0, d0), d1 = _mm256_fmadd_ps(e, v1, d1);
  }
  _mm256_storeu_ps(ra, a0), _mm256_storeu_ps(ra + 8, a1), _mm256_storeu_ps(rb, b0), _mm256_storeu_ps(rb + 8, b1);
  _mm256_storeu_ps(rc, c0), _mm256_storeu_ps(rc + 8, c1), _mm256_storeu_ps(rd, d0), _mm256_storeu_ps(rd + 8, d1);
}

}  // namespace
}  // namespace imbrex::cpu
