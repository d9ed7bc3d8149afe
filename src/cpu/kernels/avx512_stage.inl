// Keys and values of a block in the forms that the register tiles of the AVX-512 kernel read.
// Wide: fp32, for items whose many rows share the work of widening. Narrow, for decode: f32 and bf16 as they are, f16 and fp8 as f16;
// the tiles widen what they load. e4m3 becomes f16 by moving bits, which leaves a factor of kE4m3Factor to be multiplied in later:
// both forms of a key or value stand for the same floats, so that a row comes out the same in decode and prefill.

namespace imbrex::cpu {
namespace {

constexpr int kPanel = 64;  // keys of a key panel, dims of a value panel
constexpr float kE4m3Factor = 256.f;

constexpr int narrow_type(int type) { return type == kF32 || type == kBf16 ? type : kF16; }
// Types whose elements are widened in pairs: 32 dims come as 16 even ones and 16 odd ones.
constexpr bool in_pairs(int type) { return type != kF32 && type != kF16; }

inline int pad(int n, int to) { return (n + to - 1) / to * to; }

// Up to 64 bytes of a row; bytes beyond `left` (a multiple of 8) are not read and come out as zero.
IMBREX_INLINE vi load_bytes(const char* p, long left) {
  if (left >= 64) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi64(left <= 0 ? 0 : __mmask8((1u << (left / 8)) - 1), p);
}

IMBREX_INLINE vf low_f16(vi x) { return _mm512_cvtph_ps(_mm512_castsi512_si256(x)); }
IMBREX_INLINE vf high_f16(vi x) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); }

// Even and odd elements of 64 fp8 codes as f16. e4m3: NaN codes come out as finite numbers unless `patch`.
template <int type, bool patch>
IMBREX_INLINE void split_fp8(vi x, vi* even, vi* odd) {
  if constexpr (type == kE5m2) {  // the upper byte of an f16
    *even = _mm512_slli_epi16(x, 8);
    *odd = _mm512_and_si512(x, _mm512_set1_epi16(short(0xff00)));
    return;
  }
  const vi keep = _mm512_set1_epi16(short(0xbf80));
  *even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 1), keep);
  *odd = _mm512_and_si512(_mm512_srai_epi16(x, 1), keep);
  if constexpr (patch) {
    const vi magnitude = _mm512_set1_epi16(0x3f80), nan = _mm512_set1_epi16(0x7e00);
    *even = _mm512_mask_mov_epi16(*even, _mm512_cmpeq_epi16_mask(_mm512_and_si512(*even, magnitude), magnitude), nan);
    *odd = _mm512_mask_mov_epi16(*odd, _mm512_cmpeq_epi16_mask(_mm512_and_si512(*odd, magnitude), magnitude), nan);
  }
}
// Looks for e4m3 NaN in code after code: only there does adding one to a byte carry into its sign.
struct NanSearch {
  vi carried = _mm512_setzero_si512();
  IMBREX_INLINE void see(vi codes) {
    carried =
        _mm512_ternarylogic_epi32(carried, _mm512_add_epi8(codes, _mm512_set1_epi8(1)), codes, 0xf6);  // carried | (codes + 1 ^ codes)
  }
  IMBREX_INLINE bool found() const { return _mm512_movepi8_mask(carried) != 0; }
};

// 16 rows of 64 bytes, transposed as 32-bit elements. Shuffles have one port, and insertions from memory a second one.
IMBREX_INLINE void load_transposed(const char* const* rows, long at, vi r[16]) {
  vi t[16];
  IMBREX_UNROLL(8)
  for (int i = 0; i < 8; ++i) {  // the lower halves of rows i and i + 8, then the upper ones
    const auto half = [&](int row, int bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row] + at + bytes)); };
    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(half(i, 0)), half(i + 8, 0), 1);
    r[8 + i] = _mm512_inserti64x4(_mm512_castsi256_si512(half(i, 32)), half(i + 8, 32), 1);
  }
  IMBREX_UNROLL(8)
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  IMBREX_UNROLL(4)
  for (int i = 0; i < 4; ++i) {  // element j of rows 4 i ..: lanes are elements j and j + 4, of rows below 8 and above
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  const vi even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  IMBREX_UNROLL(4)
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_permutex2var_epi64(r[i], even, r[4 + i]);
    t[4 + i] = _mm512_permutex2var_epi64(r[i], odd, r[4 + i]);
    t[8 + i] = _mm512_permutex2var_epi64(r[8 + i], even, r[12 + i]);
    t[12 + i] = _mm512_permutex2var_epi64(r[8 + i], odd, r[12 + i]);
  }
  IMBREX_UNROLL(16)
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// 16 rows of 32 16-bit elements: r[i] becomes elements i and i + 16 of all rows, one after the other, or `mixed`: four rows of either by
// turns.
template <bool mixed = false>
IMBREX_INLINE void transpose16(vi r[16]) {
  vi t[16];
  IMBREX_UNROLL(2)
  for (int h = 0; h < 16; h += 8) {  // interleaving rows i and i + 4 three times puts 8 rows in order
    vi a[8], b[8];
    IMBREX_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      a[2 * i] = _mm512_unpacklo_epi16(r[h + i], r[h + i + 4]);
      a[2 * i + 1] = _mm512_unpackhi_epi16(r[h + i], r[h + i + 4]);
    }
    IMBREX_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      b[2 * i] = _mm512_unpacklo_epi16(a[i], a[i + 4]);
      b[2 * i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 4]);
    }
    IMBREX_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      t[h + 2 * i] = _mm512_unpacklo_epi16(b[i], b[i + 4]);
      t[h + 2 * i + 1] = _mm512_unpackhi_epi16(b[i], b[i + 4]);
    }
  }
  const vi even = mixed ? _mm512_setr_epi64(0, 4, 1, 5, 8, 12, 9, 13) : _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const vi odd = _mm512_add_epi64(even, _mm512_set1_epi64(2));
  IMBREX_UNROLL(8)
  for (int i = 0; i < 8; ++i) {  // the lanes are elements i, 8 + i, 16 + i, 24 + i
    r[i] = _mm512_permutex2var_epi64(t[i], even, t[8 + i]);
    r[8 + i] = _mm512_permutex2var_epi64(t[i], odd, t[8 + i]);
  }
}

// Narrow f16 panels: dims come in groups of 2 H, d and d + H side by side so that stores are whole lines: [group][H][64 / 16 keys][2][16
// keys]. H is 16, and 32 where elements of fp8 are widened in pairs.
constexpr int half_group(int type) { return type == kF16 ? 16 : 32; }

// 16 keys of dims d and d + H.
template <int type, bool wide>
IMBREX_INLINE void put_f16(char* panel, int d, int key, vi x) {
  constexpr int half = half_group(type);
  if constexpr (wide) {
    _mm512_store_ps(panel + (d * kPanel + key) * 4L, low_f16(x));
    _mm512_store_ps(panel + ((d + half) * kPanel + key) * 4L, high_f16(x));
  } else {
    _mm512_store_si512(panel + (d / (2 * half) * half + d % half) * 4L * kPanel + key * 4L, x);
  }
}

// 16 keys into a panel, transposed to [dim][64 keys]; narrow bf16 to [dim / 2][64 keys][2]. Dims are written up to the next multiple
// of 64 bytes of a row. Returns whether there is a NaN to be patched.
template <int type, bool wide, bool patch>
IMBREX_INLINE bool transpose_keys(const char* const* rows, int dim, char* panel, int key, BlockFetch& fetch) {
  constexpr int size = type == kF32 ? 4 : type == kE4m3 || type == kE5m2 ? 1 : 2;
  NanSearch search;
  for (int d = 0; d < dim; d += 64 / size) {
    if constexpr (!wide) fetch.step();
    vi r[16];
    const bool full = (type == kF32 || type == kBf16) && (dim - d) * size >= 64;
    if (full) {
      load_transposed(rows, d * size, r);
    } else {
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) r[i] = load_bytes(rows[i] + d * size, (dim - d) * size);
    }
    if constexpr (type == kE4m3 && !patch) {
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) search.see(r[i]);
    }
    if constexpr (type == kF32 || type == kBf16) {
      if (!full) transpose(r);
    } else {
      transpose16(r);
    }
    IMBREX_UNROLL(16)
    for (int i = 0; i < 16; ++i) {
      if constexpr (type == kF32) {
        _mm512_store_si512(panel + ((d + i) * kPanel + key) * 4L, r[i]);
      } else if constexpr (type == kBf16 && !wide) {
        _mm512_store_si512(panel + ((d / 2 + i) * kPanel + key) * 4L, r[i]);
      } else if constexpr (type == kBf16) {
        _mm512_store_si512(panel + ((d + 2 * i) * kPanel + key) * 4L, _mm512_slli_epi32(r[i], 16));
        _mm512_store_si512(panel + ((d + 2 * i + 1) * kPanel + key) * 4L, _mm512_and_si512(r[i], _mm512_set1_epi32(int(0xffff0000))));
      } else if constexpr (type == kF16) {
        put_f16<type, wide>(panel, d + i, key, r[i]);
      } else {
        vi even, odd;
        split_fp8<type, patch>(r[i], &even, &odd);
        put_f16<type, wide>(panel, d + 2 * i, key, even);
        put_f16<type, wide>(panel, d + 2 * i + 1, key, odd);
      }
    }
  }
  return search.found();
}
// kPanel keys.
template <int type, bool wide>
void stage_keys(const char* const* rows, int dim, char* panel, BlockFetch& fetch) {
  for (int key = 0; key < kPanel; key += 16) {
    if (transpose_keys<type, wide, false>(rows + key, dim, panel, key, fetch)) {
      transpose_keys<type, wide, true>(rows + key, dim, panel, key, fetch);
    }
  }
}
// `fetch` is told of every line of the keys.
template <int type>
void stage_narrow_keys(const char* const* rows, int dim, char* panel, BlockFetch& fetch) {
  stage_keys<type, false>(rows, dim, panel, fetch);
}
template <int type>
void stage_wide_keys(const char* const* rows, int dim, char* panel) {
  BlockFetch nothing;
  stage_keys<type, true>(rows, dim, panel, nothing);
}

#ifdef __AVX512VBMI__
// A table of all codes of fp8 without their signs as bf16, which represents all of them: upper and lower bytes.
struct Bf16Codes {
  alignas(64) u8 upper[128], lower[128];
};
template <int type>
constexpr Bf16Codes bf16_codes() {
  constexpr int mantissa = type == kE4m3 ? 3 : 2, bias = type == kE4m3 ? 7 : 15;
  Bf16Codes codes{};
  for (int code = 0; code < 128; ++code) {
    const int exponent = code >> mantissa, fraction = code & ((1 << mantissa) - 1);
    int bits = 0;
    if (type == kE4m3 ? code == 127 : exponent == 31) {
      bits = 0x7f80 | (type == kE4m3 ? 0x40 : fraction << 5);  // NaN, infinity
    } else if (exponent > 0) {
      bits = (exponent - bias + 127) << 7 | fraction << (7 - mantissa);
    } else if (fraction > 0) {  // subnormal here, normal there
      const int top = fraction >= 4 ? 2 : fraction >= 2 ? 1 : 0;
      bits = (1 - bias - mantissa + top + 127) << 7 | (fraction - (1 << top)) << (7 - top);
    }
    codes.upper[code] = u8(bits >> 8), codes.lower[code] = u8(bits & 0xff);
  }
  return codes;
}

template <int type>
struct Bf16Tables {
  static constexpr Bf16Codes codes = bf16_codes<type>();
  vi upper[2] = {_mm512_load_si512(codes.upper), _mm512_load_si512(codes.upper + 64)};
  vi lower[2] = {_mm512_load_si512(codes.lower), _mm512_load_si512(codes.lower + 64)};

  // Widens codes: of each 16, the first eight go to `first` and the others to `second`.
  IMBREX_INLINE void widen(vi x, vi* first, vi* second) const {
    const vi low = _mm512_permutex2var_epi8(lower[0], x, lower[1]), sign = _mm512_set1_epi8(char(0x80));
    // The table lookup ignores the sign, which is put back: a | (b & c).
    const vi high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(upper[0], x, upper[1]), x, sign, 0xf8);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
  }
};

// Makes kPanel keys of bf16 or fp8 a panel of bf16, [dim / 2][64 keys][2]. `fetch` is called for every line of the keys.
template <int type>
void stage_pairs(const char* const* rows, int dim, char* panel, BlockFetch& fetch) {
  if constexpr (type == kBf16) {
    stage_keys<type, false>(rows, dim, panel, fetch);
  } else if constexpr (type == kE4m3 || type == kE5m2) {
    const Bf16Tables<type> tables;
    for (int key = 0; key < kPanel; key += 16) {
      for (int d = 0; d < dim; d += 64) {
        fetch.step();
        vi r[16];
        IMBREX_UNROLL(16)
        for (int i = 0; i < 16; ++i) r[i] = load_bytes(rows[key + i] + d, dim - d);
        transpose16<true>(r);
        char* const to = panel + (d / 2 * kPanel + key) * 4L;
        IMBREX_UNROLL(16)
        for (int i = 0; i < 16; ++i) {
          vi first, second;
          tables.widen(r[i], &first, &second);
          _mm512_store_si512(to + i * kPanel * 4L, first);
          _mm512_store_si512(to + (i + 16) * kPanel * 4L, second);
        }
      }
    }
  }
}
#endif

// 32 elements of a row as floats, of which the first `left` are there (a multiple of 8); the others are zero. See in_pairs.
template <int type>
IMBREX_INLINE void load32(const char* p, int left, vf* x) {
  if constexpr (type == kF32) {
    x[0] = _mm512_castsi512_ps(load_bytes(p, 4L * left));
    x[1] = _mm512_castsi512_ps(load_bytes(p + 64, 4L * left - 64));
  } else if constexpr (type == kF16) {
    if (left >= 32) {
      x[0] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      x[1] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
    } else {
      const vi both = load_bytes(p, 2L * left);
      x[0] = low_f16(both);
      x[1] = high_f16(both);
    }
  } else if constexpr (type == kBf16) {
    const vi both = load_bytes(p, 2L * left);
    x[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    x[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
  } else {
    vi even, odd;
    split_fp8<type, true>(load_bytes(p, left < 32 ? left : 32), &even, &odd);
    x[0] = low_f16(even);
    x[1] = low_f16(odd);
  }
}

// Dims of the value panel at d: 64, or 32 at the end of a row.
inline int panel_dims(int d, int dim) { return dim - d > 32 ? 64 : 32; }

// Values of a block as fp32 panels of [kBlockKeys][panel_dims].
template <int type>
void stage_wide_values(const char* const* rows, int num_keys, int dim, float* to) {
  for (int d = 0; d < dim; to += kBlockKeys * panel_dims(d, dim), d += panel_dims(d, dim)) {
    const int width = panel_dims(d, dim);
    for (int j = 0; j < num_keys; ++j) {
      for (int c = 0; c < width; c += 32) {
        vf x[2];
        load32<type>(rows[j] + (d + c) * element_size(type), dim - d - c, x);
        _mm512_store_ps(to + j * width + c, x[0]);
        _mm512_store_ps(to + j * width + c + 16, x[1]);
      }
    }
  }
}

// The panel at d of fp8 values as f16: [num_keys][32 even, 32 odd dims]. Returns whether there is a NaN to be patched.
template <int type, bool patch>
IMBREX_INLINE bool narrow_values(const char* const* rows, int num_keys, int dim, int d, char* to) {
  NanSearch search;
  for (int j = 0; j < num_keys; ++j, to += 2 * kPanel) {
    const vi x = load_bytes(rows[j] + d, dim - d);
    if constexpr (type == kE4m3 && !patch) search.see(x);
    vi even, odd;
    split_fp8<type, patch>(x, &even, &odd);
    _mm512_store_si512(to, even);
    _mm512_store_si512(to + 64, odd);
  }
  return search.found();
}
template <int type>
void stage_narrow_values(const char* const* rows, int num_keys, int dim, int d, char* to) {
  if (narrow_values<type, false>(rows, num_keys, dim, d, to)) narrow_values<type, true>(rows, num_keys, dim, d, to);
}

}  // namespace
}  // namespace imbrex::cpu
