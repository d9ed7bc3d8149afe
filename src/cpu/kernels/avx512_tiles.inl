// Register tiles of the AVX-512 kernel: R rows against the keys of a panel, and R rows of probabilities against the values of one.
// Each product of a row is one chain of FMAs, over dims or over keys in order, whatever the form of the operands and the tile.

namespace imbrex::cpu {
namespace {

#ifdef IMBREX_FEW_SHAPES
constexpr int kTileRows = 2;
#else
constexpr int kTileRows = 6;
#endif
// Values of a template argument that is otherwise an element type: panels of stage_wide_values, a panel of stage_narrow_values, and pairs
// of bf16 that are multiplied as bf16.
constexpr int kWide = -1, kNarrow = -2, kPairs = -3;

// s[r][16 C] = q . k, of the first 16 C keys of `panel`. type: of the cache when the panel is narrow, else kWide. Narrow: `fetch` is told
// of every dim, or pair of them.
template <int R, int type, int C>
void dot_tile(const float* q, const char* panel, int dim, float* s, BlockFetch& fetch) {
  vf acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
#ifdef __AVX512BF16__
  if constexpr (type == kPairs) {
    for (int d = 0; d < dim / 2; ++d) {
      fetch.step();
      __m512bh k[C];
      IMBREX_UNROLL(4)
      for (int c = 0; c < C; ++c) k[c] = (__m512bh)_mm512_load_si512(panel + d * 256L + 64 * c);
      IMBREX_UNROLL(6)
      for (int r = 0; r < R; ++r) {
        const auto x = (__m512bh)_mm512_set1_epi32(reinterpret_cast<const int*>(q + long(r) * dim)[d]);
        IMBREX_UNROLL(4)
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], x, k[c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) _mm512_store_ps(s + r * kBlockKeys + 16 * c, acc[r][c]);
    return;
  }
#endif
  const auto add = [&](int d, const vf* k) {
    IMBREX_UNROLL(6)
    for (int r = 0; r < R; ++r) {
      const vf x = _mm512_set1_ps(q[long(r) * dim + d]);
      IMBREX_UNROLL(4)
      for (int c = 0; c < C; ++c) acc[r][c] = _mm512_fmadd_ps(x, k[c], acc[r][c]);
    }
  };
  constexpr bool f16 = type != kWide && narrow_type(type) == kF16;
  constexpr int step = type == kBf16 ? 2 : 1, half = half_group(type);
  for (int d = 0; d < dim; d += step) {
    if constexpr (type != kWide) fetch.step();
    vf k[C];
    const char* from = f16 ? panel + (d / (2 * half) * half + d % half) * 256L + d / half % 2 * 32 : panel + d / step * 256L;
    if constexpr (f16) {
      IMBREX_UNROLL(4)
      for (int c = 0; c < C; ++c) k[c] = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from + 64 * c)));
    } else {
      IMBREX_UNROLL(4)
      for (int c = 0; c < C; ++c) k[c] = _mm512_load_ps(from + 64 * c);
    }
    if constexpr (type == kBf16) {
      vf even[C];
      IMBREX_UNROLL(4)
      for (int c = 0; c < C; ++c) even[c] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(k[c]), 16));
      add(d, even);
      IMBREX_UNROLL(4)
      for (int c = 0; c < C; ++c) k[c] = _mm512_and_ps(k[c], _mm512_castsi512_ps(_mm512_set1_epi32(int(0xffff0000))));
    }
    add(d + step - 1, k);
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_store_ps(s + r * kBlockKeys + 16 * c, acc[r][c]);
}

// The values of a block, in one of three forms.
struct Values {
  const char* const* rows;  // of an element type
  const char* panels;       // kWide: all; kNarrow: the one at hand
  int dim;
  BlockFetch* fetch;  // is told of every key, unless kWide
};

// out[r][d..] += p[r][keys] * v[keys][d..] for 32 C dims, of which `left` are there.
template <int R, int C, int type, bool full>
IMBREX_INLINE void value_tile(const Values& v, const float* p, float* out, int stride, int d, int left, int key_begin, int key_end) {
  vf acc[R][2 * C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2 * C; ++c) acc[r][c] = _mm512_load_ps(out + long(r) * stride + 16 * c);
  for (int j = key_begin; j < key_end; ++j) {
    if constexpr (type != kWide) v.fetch->step();
    vf x[2 * C];
    IMBREX_UNROLL(2)
    for (int c = 0; c < C; ++c) {
      if constexpr (type == kWide) {
        load32<kF32>(v.panels + (long(d) * kBlockKeys + j * 32 * C + 32 * c) * 4, 32, x + 2 * c);
      } else if constexpr (type == kNarrow) {
        const char* row = v.panels + j * 2L * kPanel + 32 * c;
        x[2 * c] = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(row)));
        x[2 * c + 1] = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(row + kPanel)));
      } else {
        load32<type>(v.rows[j] + (d + 32 * c) * (type == kF32 ? 4 : 2), full || c + 1 < C ? 32 : left - 32 * c, x + 2 * c);
      }
    }
    IMBREX_UNROLL(6)
    for (int r = 0; r < R; ++r) {
      const vf weight = _mm512_set1_ps(p[r * kBlockKeys + j]);
      IMBREX_UNROLL(4)
      for (int c = 0; c < 2 * C; ++c) acc[r][c] = _mm512_fmadd_ps(weight, x[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2 * C; ++c) _mm512_store_ps(out + long(r) * stride + 16 * c, acc[r][c]);
}

// The value panel at d.
template <int R, int type>
void value_panel(const Values& v, const float* p, float* out, int stride, int d, int key_begin, int key_end) {
  const int left = v.dim - d;
  if (left >= 64) {
    value_tile<R, 2, type, true>(v, p, out, stride, d, left, key_begin, key_end);
  } else if (left > 32) {
    value_tile<R, 2, type, false>(v, p, out, stride, d, left, key_begin, key_end);
  } else {
    value_tile<R, 1, type, false>(v, p, out, stride, d, left, key_begin, key_end);
  }
}

// f with the number of rows of a tile as template argument.
constexpr int of_a_tile(int rows) { return rows < kTileRows ? rows : kTileRows; }
template <class F>
IMBREX_INLINE void with_rows(int rows, const F& f) {
  switch (rows) {
    case 6: f.template operator()<of_a_tile(6)>(); break;
    case 5: f.template operator()<of_a_tile(5)>(); break;
    case 4: f.template operator()<of_a_tile(4)>(); break;
    case 3: f.template operator()<of_a_tile(3)>(); break;
    case 2: f.template operator()<2>(); break;
    default: f.template operator()<1>();
  }
}

}  // namespace
}  // namespace imbrex::cpu
