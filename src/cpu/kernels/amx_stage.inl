// Keys and values of one block as tiles: pointers into a packed cache where it can be used as it is, staged copies elsewhere
// (strided caches, groups that are only partly visible; for many rows also fp8 and blocks of 16 modulo 32 tokens).

namespace imbrex::cpu {
namespace {

constexpr int kGroups = kBlockKeys / 16;  // key groups of 16 keys
constexpr int kChunks = kBlockKeys / 32;  // value groups of 32 keys

// One block's tiles. keys[g]: `steps` tiles of 16 dim pairs x 16 keys; or, of a stage that takes keys as rows, 16 of these, key_pitch[g]
// bytes apart. values[c]: `dim_tiles` tiles of 16 key pairs x 16 dims.
// A direct stage (below) leaves keys as fp8 where they are, and values, as null, in two halves of 16 keys.
struct BlockTiles {
  const char* keys[kGroups];
  const char* values[kChunks];
  const char* halves[kGroups];  // 8 rows of each dim tile, `pitch` bytes from one to the next
  long pitch[kGroups], key_pitch[kGroups];
};

// The buffers that staging writes to, and the shape of their tiles.
struct Stage {
  int steps, dim_tiles;  // of K: padded dim / 32; of V: padded dim / 16
  char *keys, *values;   // kGroups * steps KiB, kChunks * dim_tiles KiB
  const char* zero;      // a row of zeros, and a key group of zeros
  const char **key_rows, **value_rows;
  char *key_compact, *value_compact;
  bool as_rows;  // of a strided cache, keys stay rows: left operands
  bool direct;   // of a packed cache, what is seen as a whole is not staged: the caller turns it into tiles as it goes
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

// fp8 elements as bf16 (exact: bf16 has more of both mantissa and exponent): those in the even bytes and those in the odd ones.
struct Widened {
  vi even, odd;
};
IMBREX_INLINE Widened widen_fp8(vi codes, const Fp8Table& t) {
  const vi low = _mm512_permutex2var_epi8(_mm512_load_si512(t.low), codes, _mm512_load_si512(t.low + 64));
  vi high = _mm512_permutex2var_epi8(_mm512_load_si512(t.high), codes, _mm512_load_si512(t.high + 64));
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (codes & sign)
  const vi upper = _mm512_set1_epi16(short(0xff00));
  return {_mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, upper, 0xf4),  // shifted high | (low & ~upper)
          _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, upper, 0xf8)};
}
inline const Fp8Table& fp8_table(int type) { return type == kE4m3 ? kE4m3Table : kE5m2Table; }

// Packed tiles of fp8, `bytes` long, to tiles of bf16.
inline void widen(const char* from, const Fp8Table& t, int bytes, char* to) {
  IMBREX_UNROLL(4)
  for (int i = 0; i < bytes; i += 64, to += 128) {
    const Widened rows = widen_fp8(_mm512_loadu_si512(from + i), t);
    _mm512_store_si512(to, rows.even);
    _mm512_store_si512(to + 64, rows.odd);
  }
}

// 32 elements of a row (fewer at its end: the rest is zero) as bf16.
template <int type>
IMBREX_INLINE vi load_bf16(const char* row, int d, int dim) {
  const __mmask32 m = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
  if constexpr (type == kBf16) return _mm512_maskz_loadu_epi16(m, row + 2L * d);
  return widen_fp8(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(m, row + d)), fp8_table(type)).even;
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

// Keys of a group as rows of bf16, where they cannot be read as they lie.
template <int type>
void copy_strided_keys(const Stage& s, int dim, int group) {
  char* to = s.keys + long(group) * s.steps * 1024;
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < s.steps; ++k, to += 64) _mm512_store_si512(to, load_bf16<type>(s.key_rows[group * 16 + i], 32 * k, dim));
  }
}

// Whether a tile can be loaded from the rows of the 16 keys from `key` on: they are evenly apart, all seen, and no row ends within a tile.
inline bool keys_in_rows(const AttentionParams& a, int key, Visible keys) {
  const bool even = a.block_size == 0 || key % a.block_size + 16 <= a.block_size;
  return a.k.type == kBf16 && a.k.dim_stride == 2 && a.k.dim % 32 == 0 && even && key >= keys.lo && key + 16 <= keys.hi;
}

IMBREX_INLINE vi interleave_index(int half) {
  alignas(64) u16 index[32];
  for (int i = 0; i < 32; ++i) index[i] = u16(half * 16 + i / 2 + (i % 2) * 32);
  return _mm512_load_si512(index);
}

// Values of 16 keys: half of the pair rows of a chunk's tiles.
template <int type, class Between>
void stage_strided_values(const Stage& s, int dim, int half, const Between& between) {
  char* to = s.values + long(half / 2) * s.dim_tiles * 1024 + half % 2 * 512;
  const vi low = interleave_index(0), high = interleave_index(1);
  for (int r = 0; r < 8; ++r) {
    between();
    const char *even = s.value_rows[half * 16 + 2 * r], *odd = s.value_rows[half * 16 + 2 * r + 1];
    for (int t = 0; t < s.dim_tiles; t += 2) {
      const vi a = load_bf16<type>(even, 16 * t, dim), b = load_bf16<type>(odd, 16 * t, dim);
      _mm512_store_si512(to + t * 1024 + r * 64, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(to + (t + 1) * 1024 + r * 64, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

// The block of a packed cache that holds a key.
inline const char* find_packed(const AttentionParams& a, const KvSide& side, const WorkItem& item, int kv_head, int key) {
  return side.data + a.block_ids[a.block_start[item.table] + key / a.block_size] * side.block_stride + kv_head * side.head_stride;
}
inline const char* find_keys(const AttentionParams& a, const WorkItem& item, int kv_head, int key, int steps) {
  return find_packed(a, a.k, item, kv_head, key) + key % a.block_size / 16 * (steps * 512L * element_size(a.k.type));
}
// The address of the 16 values from `key` on (8 pair rows of every dim tile) in a packed cache, and the stride of dim tiles.
inline const char* find_half(const AttentionParams& a, const WorkItem& item, int kv_head, int key, int dim_tiles, long* pitch) {
  const long size = element_size(a.v.type);
  const int offset = key % a.block_size, group = offset / 32 * 32;
  const bool tail = group + 32 > (a.block_size + 15) / 16 * 16;
  *pitch = (tail ? 256 : 512) * size;
  return find_packed(a, a.v, item, kv_head, key) + (long(group) * dim_tiles + offset % 32) * 16 * size;
}
// One dim tile of them as bf16.
inline void copy_half(int type, const char* from, char* to) {
  if (type == kBf16) {
    for (int i = 0; i < 512; i += 64) _mm512_store_si512(to + i, _mm512_loadu_si512(from + i));
  } else {
    widen(from, fp8_table(type), 256, to);
  }
}

// They become one half of a staged chunk, zero outside `keys`.
void stage_half_group(const AttentionParams& a, const WorkItem& item, int kv_head, int key, Visible keys, const Stage& s, char* to) {
  if (key + 16 <= keys.lo || key >= keys.hi) {
    for (int t = 0; t < s.dim_tiles; ++t) __builtin_memset(to + t * 1024, 0, 512);
    return;
  }
  long pitch;
  const char* from = find_half(a, item, kv_head, key, s.dim_tiles, &pitch);
  for (int t = 0; t < s.dim_tiles; ++t) copy_half(a.v.type, from + t * pitch, to + t * 1024);
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

// Whether the 32 values from `key` on are all seen, so that tiles of a packed cache can be used in place. Hidden keys need not be cleared
// (their logits are replaced), but hidden values must be: a probability of zero times NaN is NaN.
inline bool chunk_seen(int key, Visible keys) { return key >= keys.lo && key + 32 <= keys.hi; }
inline bool values_in_place(const AttentionParams& a, int key, Visible keys) {
  return a.packed && a.v.type == kBf16 && a.block_size % 32 == 0 && chunk_seen(key, keys);
}

// The first half of staging a block: where its tiles are, or will be.
void find_block(const AttentionParams& a, const WorkItem& item, int kv_head, int kb, Visible keys, const Stage& s, BlockTiles* out) {
  if (!a.packed) {
    find_rows(a, a.k, item.table, kv_head, kb, kBlockKeys, keys, s.zero, s.key_rows);
    find_rows(a, a.v, item.table, kv_head, kb, kBlockKeys, keys, s.zero, s.value_rows);
    settle_rows(a, s.zero, s.key_rows, s.value_rows, s.key_compact, s.value_compact);
  }
  for (int g = 0; g < kGroups; ++g) {
    const int key = kb + 16 * g;
    out->key_pitch[g] = s.steps * 64L;
    if (key + 16 <= keys.lo || key >= keys.hi) {
      out->keys[g] = s.zero;
    } else if (s.as_rows && keys_in_rows(a, key, keys)) {
      out->keys[g] = s.key_rows[16 * g];
      out->key_pitch[g] = a.k.token_stride;
    } else if (a.packed && (a.k.type == kBf16 || s.direct)) {
      out->keys[g] = find_keys(a, item, kv_head, key, s.steps);
    } else {
      out->keys[g] = s.keys + long(g) * s.steps * 1024;
    }
  }
  for (int c = 0; c < kChunks; ++c) {
    const int key = kb + 32 * c;
    out->values[c] = s.values + long(c) * s.dim_tiles * 1024;
    if (values_in_place(a, key, keys)) {
      long pitch;
      out->values[c] = find_half(a, item, kv_head, key, s.dim_tiles, &pitch);
    } else if (s.direct && chunk_seen(key, keys)) {
      out->values[c] = nullptr;
      for (int g = 2 * c; g < 2 * c + 2; ++g) out->halves[g] = find_half(a, item, kv_head, kb + 16 * g, s.dim_tiles, out->pitch + g);
    }
  }
}

// The second half, for 16 of its keys at a time, so that decode can do it between products. `between` is called every two rows of values of
// a strided cache.
template <class Between>
void stage_part(const AttentionParams& a, const WorkItem& item, int kv_head, int kb, Visible keys, const Stage& s, int g,
                const Between& between) {
  const int key = kb + 16 * g, chunk_key = kb + g / 2 * 32;
  const bool seen = key + 16 > keys.lo && key < keys.hi;
  if (!a.packed) {
    if (seen && !s.as_rows) {
      IMBREX_BY_TYPE8(a.k.type, stage_strided_keys, s, a.k.dim, g)
    } else if (seen && !keys_in_rows(a, key, keys)) {
      IMBREX_BY_TYPE8(a.k.type, copy_strided_keys, s, a.k.dim, g)
    }
    IMBREX_BY_TYPE8(a.v.type, stage_strided_values, s, a.v.dim, g, between)
    return;
  }
  if (a.k.type != kBf16 && seen && !s.direct) {
    widen(find_keys(a, item, kv_head, key, s.steps), fp8_table(a.k.type), 512 * s.steps, s.keys + long(g) * s.steps * 1024);
  }
  if (values_in_place(a, chunk_key, keys) || (s.direct && chunk_seen(chunk_key, keys))) return;
  stage_half_group(a, item, kv_head, key, keys, s, s.values + long(g / 2) * s.dim_tiles * 1024 + g % 2 * 512);
}

// Key group g, or dim tile t of the values of chunks [c0, c1), of a direct stage's block: where it is as tiles, or copied to `ring`.
inline const char* ring_keys(const AttentionParams& a, const BlockTiles& b, int g, int steps, char* ring) {
  if (a.k.type == kBf16) return b.keys[g];
  widen(b.keys[g], fp8_table(a.k.type), 512 * steps, ring);
  return ring;
}
inline void ring_values(const AttentionParams& a, const BlockTiles& b, int t, int c0, int c1, char* ring, const char** tiles) {
  for (int c = c0; c < c1; ++c) {
    tiles[c] = b.values[c] ? b.values[c] + t * 1024 : ring + c * 1024;
    if (b.values[c]) continue;
    for (int half = 0; half < 2; ++half) {
      copy_half(a.v.type, b.halves[2 * c + half] + t * b.pitch[2 * c + half], ring + c * 1024 + half * 512);
    }
  }
}

}  // namespace
}  // namespace imbrex::cpu
