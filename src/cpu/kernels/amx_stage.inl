// Keys and values of one block as tiles: pointers into a packed cache where it can be used as it is, staged copies elsewhere
// (strided caches, fp8, groups that are only partly visible, blocks of 16 modulo 32 tokens).

namespace imbrex::cpu {
namespace {

constexpr int kGroups = kBlockKeys / 16;  // key groups of 16 keys
constexpr int kChunks = kBlockKeys / 32;  // value groups of 32 keys

// One block's tiles. keys[g]: `steps` tiles of 16 dim pairs x 16 keys. values[c]: `dim_tiles` tiles of 16 key pairs x 16 dims.
struct BlockTiles {
  const char* keys[kGroups];
  const char* values[kChunks];
};

// Where staging writes, and the shape of what it writes.
struct Stage {
  int steps, dim_tiles;  // of K: padded dim / 32; of V: padded dim / 16
  char *keys, *values;   // kGroups * steps KiB, kChunks * dim_tiles KiB
  const char* zero;      // a row of zeros, and a key group of zeros
  const char **key_rows, **value_rows;
  char *key_compact, *value_compact;
};

// bf16 of 128 fp8 codes without sign: lower and upper bytes, each a table that vpermi2b looks up.
struct Fp8Table {
  alignas(64) u8 low[128], high[128];
};
constexpr Fp8Table make_fp8_table(int mantissa, int bias, bool has_infinity) {
  Fp8Table t{};
  for (int code = 0; code < 128; ++code) {
    const int e = code >> mantissa, m = code & ((1 << mantissa) - 1), top = (128 >> mantissa) - 1;
    u32 bits = 0;
    if (has_infinity && e == top) {
      bits = 0x7f80u | (m ? 0x40u : 0u);
    } else if (!has_infinity && code == 127) {
      bits = 0x7fc0u;
    } else if (e > 0) {
      bits = u32(e - bias + 127) << 7 | u32(m) << (7 - mantissa);
    } else if (m > 0) {  // subnormal: shift the leading one into place
      int shift = 0;
      while (!(m << shift >> mantissa)) ++shift;
      bits = u32(1 - bias - shift + 127) << 7 | (u32(m << shift) & ((1u << mantissa) - 1)) << (7 - mantissa);
    }
    t.low[code] = u8(bits & 0xff);
    t.high[code] = u8(bits >> 8);
  }
  return t;
}
constexpr Fp8Table kE4m3Table = make_fp8_table(3, 7, false), kE5m2Table = make_fp8_table(2, 15, true);

// 64 fp8 elements to 64 bf16 (exact: bf16 has more of both mantissa and exponent).
IMBREX_INLINE void widen_fp8(vi codes, const Fp8Table& t, vi* first32, vi* last32) {
  codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);  // unpacking works within 16 bytes
  const vi low = _mm512_permutex2var_epi8(_mm512_load_si512(t.low), codes, _mm512_load_si512(t.low + 64));
  vi high = _mm512_permutex2var_epi8(_mm512_load_si512(t.high), codes, _mm512_load_si512(t.high + 64));
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (codes & sign)
  *first32 = _mm512_unpacklo_epi8(low, high);
  *last32 = _mm512_unpackhi_epi8(low, high);
}
inline void widen_tile(const char* from, const Fp8Table& t, int bytes, char* to) {
  IMBREX_UNROLL(4)
  for (int i = 0; i < bytes; i += 64, to += 128) {
    vi a, b;
    widen_fp8(_mm512_loadu_si512(from + i), t, &a, &b);
    _mm512_store_si512(to, a);
    _mm512_store_si512(to + 64, b);
  }
}

// 32 elements of a row (fewer at its end: the rest is zero) as bf16.
template <int type>
IMBREX_INLINE vi load_bf16(const char* row, int d, int dim) {
  const __mmask32 m = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
  if constexpr (type == kBf16) return _mm512_maskz_loadu_epi16(m, row + 2L * d);
  vi a, b;
  widen_fp8(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(m, row + d)), type == kE4m3 ? kE4m3Table : kE5m2Table, &a, &b);
  return a;
}

// f with its template argument taken from the element types an AMX cache can have.
#define IMBREX_BY_TYPE8(type, f, ...)         \
  switch (type) {                             \
    case kBf16: f<kBf16>(__VA_ARGS__); break; \
    case kE4m3: f<kE4m3>(__VA_ARGS__); break; \
    default: f<kE5m2>(__VA_ARGS__); break;    \
  }

template <int type>
void stage_strided_keys(const Stage& s, int dim, int group) {
  char* to = s.keys + long(group) * s.steps * 1024;
  for (int k = 0; k < s.steps; ++k, to += 1024) {
    vi r[16];
    IMBREX_UNROLL(16)
    for (int i = 0; i < 16; ++i) r[i] = load_bf16<type>(s.key_rows[group * 16 + i], 32 * k, dim);
    transpose(r);
    IMBREX_UNROLL(16)
    for (int i = 0; i < 16; ++i) _mm512_store_si512(to + 64 * i, r[i]);
  }
}

IMBREX_INLINE vi interleave_index(int half) {
  alignas(64) u16 index[32];
  for (int i = 0; i < 32; ++i) index[i] = u16(half * 16 + i / 2 + (i % 2) * 32);
  return _mm512_load_si512(index);
}

// Values of 16 keys: half of the pair rows of a chunk's tiles.
template <int type>
void stage_strided_values(const Stage& s, int dim, int half) {
  char* to = s.values + long(half / 2) * s.dim_tiles * 1024 + half % 2 * 512;
  const vi low = interleave_index(0), high = interleave_index(1);
  for (int r = 0; r < 8; ++r) {
    const char *even = s.value_rows[half * 16 + 2 * r], *odd = s.value_rows[half * 16 + 2 * r + 1];
    for (int t = 0; t < s.dim_tiles; t += 2) {
      const vi a = load_bf16<type>(even, 16 * t, dim), b = load_bf16<type>(odd, 16 * t, dim);
      _mm512_store_si512(to + t * 1024 + r * 64, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(to + (t + 1) * 1024 + r * 64, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// 16 values (8 pair rows of every dim tile) of a packed block to one half of a staged chunk; values outside `keys` become zero.
void stage_half_group(const AttentionParams& a, const WorkItem& item, int kv_head, int key, Visible keys, const Stage& s, char* to) {
  if (key + 16 <= keys.lo || key >= keys.hi) {
    for (int t = 0; t < s.dim_tiles; ++t) __builtin_memset(to + t * 1024, 0, 512);
    return;
  }
  const long size = element_size(a.v.type);
  const int offset = key % a.block_size, group = offset / 32 * 32;
  const char* from = a.v.data + a.block_ids[a.block_start[item.request] + key / a.block_size] * a.v.block_stride +
                     kv_head * a.v.head_stride + long(group) * s.dim_tiles * 16 * size;
  const bool tail = group + 32 > (a.block_size + 15) / 16 * 16;
  const long tile_bytes = (tail ? 256 : 512) * size;
  from += offset % 32 / 16 * 256 * size;
  for (int t = 0; t < s.dim_tiles; ++t, from += tile_bytes) {
    if (a.v.type == kBf16) {
      for (int i = 0; i < 512; i += 64) _mm512_store_si512(to + t * 1024 + i, _mm512_loadu_si512(from + i));
    } else {
      widen_tile(from, a.v.type == kE4m3 ? kE4m3Table : kE5m2Table, 256, to + t * 1024);
    }
  }
  if (key >= keys.lo && key + 16 <= keys.hi) return;
  for (int r = 0; r < 8; ++r) {
    const int even = key + 2 * r;
    const bool keep_even = even >= keys.lo && even < keys.hi, keep_odd = even + 1 >= keys.lo && even + 1 < keys.hi;
    const vi keep = _mm512_set1_epi32(int((keep_even ? 0xffffu : 0u) | (keep_odd ? 0xffff0000u : 0u)));
    for (int t = 0; t < s.dim_tiles; ++t) {
      char* p = to + t * 1024 + r * 64;
      _mm512_store_si512(p, _mm512_and_si512(_mm512_load_si512(p), keep));
    }
  }
}

// Whether the 32 values from `key` on lie in one packed chunk and are all seen. Hidden keys need no cleaning (their logits are
// replaced), hidden values do: a probability of zero times NaN is NaN.
inline bool whole_chunk(const AttentionParams& a, int key, Visible keys) {
  return a.packed && a.block_size % 32 == 0 && key >= keys.lo && key + 32 <= keys.hi;
}
inline bool values_in_place(const AttentionParams& a, int key, Visible keys) { return a.v.type == kBf16 && whole_chunk(a, key, keys); }

// The first half of staging a block: where its tiles are, or will be.
void find_block(const AttentionParams& a, const WorkItem& item, int kv_head, int kb, Visible keys, const Stage& s, BlockTiles* out) {
  if (!a.packed) {
    find_rows(a, a.k, item.request, kv_head, kb, kBlockKeys, keys, s.zero, s.key_rows);
    compact_rows(a.k, kBlockKeys, s.zero, s.key_rows, s.key_compact);
    find_rows(a, a.v, item.request, kv_head, kb, kBlockKeys, keys, s.zero, s.value_rows);
    compact_rows(a.v, kBlockKeys, s.zero, s.value_rows, s.value_compact);
  }
  const int* blocks = a.block_ids + a.block_start[item.request];
  for (int g = 0; g < kGroups; ++g) {
    const int key = kb + 16 * g;
    const bool seen = key + 16 > keys.lo && key < keys.hi;
    if (!seen) {
      out->keys[g] = s.zero;
    } else if (a.packed && a.k.type == kBf16) {
      out->keys[g] = a.k.data + blocks[key / a.block_size] * a.k.block_stride + kv_head * a.k.head_stride +
                     key % a.block_size / 16 * (s.steps * 1024L);
    } else {
      out->keys[g] = s.keys + long(g) * s.steps * 1024;
    }
  }
  for (int c = 0; c < kChunks; ++c) {
    const int key = kb + 32 * c;
    out->values[c] = s.values + long(c) * s.dim_tiles * 1024;
    if (values_in_place(a, key, keys)) {
      out->values[c] = a.v.data + blocks[key / a.block_size] * a.v.block_stride + kv_head * a.v.head_stride +
                       key % a.block_size / 32 * (s.dim_tiles * 1024L);
    }
  }
}

// The second half, for 16 of its keys at a time, so that decode can do it between products.
inline void stage_part(const AttentionParams& a, const WorkItem& item, int kv_head, int kb, Visible keys, const Stage& s, int g) {
  const int key = kb + 16 * g;
  const bool seen = key + 16 > keys.lo && key < keys.hi;
  if (!a.packed) {
    if (seen) IMBREX_BY_TYPE8(a.k.type, stage_strided_keys, s, a.k.dim, g)
    IMBREX_BY_TYPE8(a.v.type, stage_strided_values, s, a.v.dim, g)
    return;
  }
  if (a.k.type != kBf16 && seen) {
    const char* from = a.k.data + a.block_ids[a.block_start[item.request] + key / a.block_size] * a.k.block_stride +
                       kv_head * a.k.head_stride + key % a.block_size / 16 * (s.steps * 512L);
    widen_tile(from, a.k.type == kE4m3 ? kE4m3Table : kE5m2Table, 512 * s.steps, s.keys + long(g) * s.steps * 1024);
  }
  const int chunk_key = kb + g / 2 * 32;
  if (a.v.type != kBf16 && whole_chunk(a, chunk_key, keys)) {  // in one run of memory: half of the dims instead of half of the keys
    const int tiles = s.dim_tiles / 2, first_tile = g % 2 * tiles;
    const char* from = a.v.data + a.block_ids[a.block_start[item.request] + chunk_key / a.block_size] * a.v.block_stride +
                       kv_head * a.v.head_stride + (chunk_key % a.block_size / 32 * long(s.dim_tiles) + first_tile) * 512;
    widen_tile(from, a.v.type == kE4m3 ? kE4m3Table : kE5m2Table, 512 * tiles, s.values + (long(g / 2) * s.dim_tiles + first_tile) * 1024);
  } else if (!values_in_place(a, chunk_key, keys)) {
    stage_half_group(a, item, kv_head, key, keys, s, s.values + long(g / 2) * s.dim_tiles * 1024 + g % 2 * 512);
  }
}

}  // namespace
}  // namespace imbrex::cpu
