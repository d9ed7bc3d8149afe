// The AVX-512 kernels, compiled twice (avx512.cpp, avx512_bf16.cpp): fp32 arithmetic in register tiles of 6 rows x 64 columns, for every
// element type; with AVX512_BF16, queries and keys of bf16 are multiplied in pairs, twice as many in one instruction.
// Roofline: QK and PV are 24 FMAs for 4 loads and 6 broadcasts, so prefill is bound by the two FMA ports. Decode of four bf16 rows a key
// takes about 100 vector operations for 512 bytes on those ports, 64 of them FMAs: half of what DRAM needs, if it is asked in time.
#include "cpu/params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/row_parts.inl"
#include "cpu/kernels/write_kv.inl"
#include "cpu/kernels/avx512_math.inl"
#include "cpu/kernels/avx512_rows.inl"
#include "cpu/kernels/fetch.inl"
#include "cpu/kernels/avx512_stage.inl"
#include "cpu/kernels/avx512_tiles.inl"
#ifdef __AVX512BF16__
#include "cpu/kernels/interleave.inl"
#include "cpu/kernels/latent.inl"
#include "cpu/kernels/latent_softmax.inl"
#include "cpu/kernels/avx512_latent.inl"
#endif
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kMaxRows = 384;  // rows of an item, unless one token's group is larger
constexpr int kMaxHeads = 8;   // kv heads of an item with narrow keys and values that are run together
constexpr int kPassRows = 18;  // rows that go through a block together; items with no more of them use narrow keys and values
constexpr float kLazy = 8.f;   // log2 units by which a row may outgrow its maximum before its sums are rescaled

// Whether queries and keys are multiplied as bf16, in pairs of dims: products are exact and sums are floats, as with FMAs.
#ifdef __AVX512BF16__
IMBREX_INLINE bool multiplies_pairs(const AttentionParams& a) {
  return a.q_type == kBf16 && a.k.type != kF32 && a.k.type != kF16 && !a.row_parts.second_factors;
}
#else
IMBREX_INLINE bool multiplies_pairs(const AttentionParams&) { return false; }
template <int type>
void stage_pairs(const char* const*, int, char*, BlockFetch&) {}
#endif

// One worker's memory, cut from `scratch`.
struct Scratch {
  Row* rows;
  float *q, *out, *folded;               // [rows, qk], [rows, v32], [rows, v32]
  float *max, *folded_max, *folded_sum;  // [rows]
  float* sum;                            // [rows, 16]: reduced over lanes at the end of a split
  char* k;                               // panels of kPanel keys: all of a block when wide, one of them when narrow
  long key_bytes;                        // of a wide panel
  char* v;                               // value panels: all when wide, an f16 one for narrow fp8
  float* s;                              // [kPassRows, kBlockKeys]
  BlockRows *now, *next;                 // where each key and value is, also of the next block; a zero row where there is none
  BlockRows* of_head;                    // those of this block for another head
  char* zero;                            // a row of zeros
  char *k_compact, *v_compact;           // rows of layouts whose elements are not neighbours
};

long layout(char* base, const AttentionParams& a, long rows, Scratch* out) {
  const long qk = a.k.dim, v = pad(a.v.dim, 32);
  long at = 0;
  auto take = [&](long bytes) {
    char* p = base ? base + at : nullptr;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  auto floats = [&](long n) { return reinterpret_cast<float*>(take(n * 4)); };
  Scratch s;
  s.key_bytes = pad(a.k.dim, kPanel) * kPanel * 4L;
  s.k = take(kBlockKeys / kPanel * s.key_bytes);
  s.v = take(kBlockKeys * v * 4);
  s.s = floats(kPassRows * kBlockKeys);
  s.rows = reinterpret_cast<Row*>(take(rows * long(sizeof(Row))));
  s.q = floats(rows * qk);
  s.out = floats(rows * v);
  s.folded = floats(rows * v);
  s.max = floats(rows);
  s.folded_max = floats(rows);
  s.folded_sum = floats(rows);
  s.sum = floats(rows * 16);
  s.now = reinterpret_cast<BlockRows*>(take(sizeof(BlockRows)));
  s.next = reinterpret_cast<BlockRows*>(take(sizeof(BlockRows)));
  s.of_head = reinterpret_cast<BlockRows*>(take(sizeof(BlockRows)));
  s.zero = take(4 * (kMaxDim + 64));
  s.k_compact = take(compact_bytes(a.k));
  s.v_compact = take(compact_bytes(a.v));
  if (out) *out = s;
  return at;
}

long scratch_bytes(const AttentionParams& a, int max_rows) {
  const long bytes = layout(nullptr, a, max_rows, nullptr);
#ifdef __AVX512BF16__
  if (const long latent = latent_bytes<LatentProducts>(a, max_rows); latent > bytes) return latent;
#endif
  return bytes;
}

// The end of softmax_row where the maximum is at least kLargeLogit.
__attribute__((noinline)) vf weigh_large(float* s, int begin, int end, float scale, float max) {
  vf total = _mm512_setzero_ps();
  for (int t = begin; t < end; ++t) {
    const vf p = exp2_f32(_mm512_sub_ps(rounded_product(_mm512_load_ps(s + 16 * t), _mm512_set1_ps(scale)), _mm512_set1_ps(max)));
    total = _mm512_add_ps(total, p);
    _mm512_store_ps(s + 16 * t, p);
  }
  return total;
}

// Logits of one row to probabilities, in place: of 16 keys each, those from `begin` on and before `end`, among which are all that it sees.
template <bool whole>
void softmax_row(const AttentionParams& a, const Row& row, int kb, int begin, int end, float* s, float* max, float* sum, float* out,
                 int v) {
  if constexpr (whole) begin = 0, end = kVecs;
  vf x[kVecs], top = _mm512_set1_ps(-__builtin_inff());
  float scale = row.scale * kLog2e;
  if (!is_plain(a, row)) scale = modify_logits<false>(a, row, kb, s, 16);
  if (sees_all(row, kb)) {
    for (int t = begin; t < end; ++t) x[t] = _mm512_load_ps(s + 16 * t);
  } else {
    __mmask16 seen[kVecs];
    row_masks(row, kb, seen);
    for (int t = begin; t < end; ++t) x[t] = _mm512_mask_load_ps(_mm512_set1_ps(-__builtin_inff()), seen[t], s + 16 * t);
  }
  for (int t = begin; t < end; ++t) top = _mm512_max_ps(top, x[t]);
  const vf factor = _mm512_set1_ps(scale);
  if (_mm512_cmp_ps_mask(_mm512_mul_ps(top, factor), _mm512_set1_ps(*max + kLazy), _CMP_GT_OQ)) {
    const float new_max = _mm512_reduce_max_ps(top) * scale;
    const vf rescale = _mm512_set1_ps(exp2_exact(*max - new_max));
    *max = new_max;
    _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), rescale));
    for (int d = 0; d < v; d += 16) _mm512_store_ps(out + d, _mm512_mul_ps(_mm512_load_ps(out + d), rescale));
  }
  const vf m = _mm512_set1_ps(*max);
  vf total = _mm512_setzero_ps();
  if (__builtin_expect(!(__builtin_fabsf(*max) < kLargeLogit), false)) {
    for (int t = begin; t < end; ++t) _mm512_store_ps(s + 16 * t, x[t]);
    total = weigh_large(s, begin, end, scale, *max);
  } else {
    for (int t = begin; t < end; ++t) {
      const vf p = exp2_f32(_mm512_fmsub_ps(x[t], factor, m));
      total = _mm512_add_ps(total, p);
      _mm512_store_ps(s + 16 * t, p);
    }
  }
  _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
}

// Rows that are worked on together: their logits fit s.s, and what a tile loads of a key or value panel serves the next one too.
struct Tile {
  int first, count;  // rows
  int lo, hi;        // keys of the block that at least one row sees
};
constexpr int kMaxTiles = (kPassRows + kTileRows - 1) / kTileRows;

Tile make_tile(const Scratch& s, int first, int count, int kb) {
  Tile tile = {first, count, kBlockKeys, 0};
  for (int i = first; i < first + count; ++i) {
    const int lo = clamp_int(s.rows[i].lo - kb, 0, kBlockKeys), hi = clamp_int(s.rows[i].hi - kb, 0, kBlockKeys);
    if (lo < hi) tile.lo = lo < tile.lo ? lo : tile.lo, tile.hi = hi > tile.hi ? hi : tile.hi;
  }
  return tile;
}

bool any_sees(const Tile* tiles, int num_tiles, int begin, int end) {
  bool seen = false;
  for (const Tile* t = tiles; t < tiles + num_tiles; ++t) seen |= t->hi > begin && t->lo < end;
  return seen;
}

template <int type>
void dot_tiles(const Scratch& s, const Tile* tiles, int num_tiles, const char* panel, int dim, int key, BlockFetch& fetch) {
  for (const Tile* t = tiles; t < tiles + num_tiles; ++t) {
    if (t->hi <= key || t->lo >= key + kPanel) continue;
    float* to = s.s + (t->first - tiles->first) * kBlockKeys + key;
    const float* q = s.q + long(t->first) * dim;
    constexpr int half = kPanel / 2;
    constexpr bool halves = type == kWide || type == kPairs;
    if (halves && t->hi <= key + half) {
      with_rows(t->count, [&]<int R>() { dot_tile<R, type, 2>(q, panel, dim, to, fetch); });
    } else if (halves && t->lo >= key + half) {
      with_rows(t->count, [&]<int R>() { dot_tile<R, type, 2>(q, panel + half * 4, dim, to + half, fetch); });
    } else {
      with_rows(t->count, [&]<int R>() { dot_tile<R, type, 4>(q, panel, dim, to, fetch); });
    }
  }
}

template <int type>
void value_tiles(const Scratch& s, const Tile* tiles, int num_tiles, int num_keys, Values v) {
  const int stride = pad(v.dim, 32);
  for (int d = 0; d < v.dim; d += kPanel) {
    if constexpr (type == kE4m3 || type == kE5m2) stage_narrow_values<type>(v.rows, num_keys, v.dim, d, s.v);
    for (const Tile* t = tiles; t < tiles + num_tiles; ++t) {
      if (t->lo >= t->hi) continue;
      const float* p = s.s + (t->first - tiles->first) * kBlockKeys;
      float* out = s.out + long(t->first) * stride + d;
      constexpr int form = type == kE4m3 || type == kE5m2 ? kNarrow : type;
      with_rows(t->count, [&]<int R>() { value_panel<R, form>(v, p, out, stride, d, t->lo, t->hi); });
    }
  }
}

// Rows [first, first + count), at most kPassRows, against one block of keys.
void row_pass(const AttentionParams& a, const Scratch& s, const BlockRows& rows, int first, int count, int kb, int num_keys, bool narrow,
              BlockFetch& fetch) {
  const int stride = pad(a.v.dim, 32), num_tiles = (count + kTileRows - 1) / kTileRows, tile_rows = (count + num_tiles - 1) / num_tiles;
  Tile tiles[kMaxTiles];
  for (int t = 0; t < num_tiles; ++t) {
    const int at = t * tile_rows;
    tiles[t] = make_tile(s, first + at, count - at < tile_rows ? count - at : tile_rows, kb);
  }
  constexpr int kPanels = kBlockKeys / kPanel;
  for (int key = 0; key < num_keys; key += kPanel) {
    if (!any_sees(tiles, num_tiles, key, key + kPanel)) continue;
    if (narrow) {
      fetch.begin(BlockFetch::kOfKeys / kPanels, kPanel / 16 * int(a.k.dim * element_size(a.k.type) / 64));
      const int steps = num_tiles * a.k.dim;
      if (multiplies_pairs(a)) {
        IMBREX_BY_TYPE(a.k.type, stage_pairs, rows.k + key, a.k.dim, s.k, fetch)
        fetch.begin(BlockFetch::kOfScores / kPanels, steps / 2);
        dot_tiles<kPairs>(s, tiles, num_tiles, s.k, a.k.dim, key, fetch);
      } else {
        IMBREX_BY_TYPE(a.k.type, stage_narrow_keys, rows.k + key, a.k.dim, s.k, fetch)
        fetch.begin(BlockFetch::kOfScores / kPanels, a.k.type == kBf16 ? steps / 2 : steps);
        IMBREX_BY_TYPE(a.k.type, dot_tiles, s, tiles, num_tiles, s.k, a.k.dim, key, fetch)
      }
    } else if (multiplies_pairs(a)) {
      dot_tiles<kPairs>(s, tiles, num_tiles, s.k + key / kPanel * s.key_bytes, a.k.dim, key, fetch);
    } else {
      dot_tiles<kWide>(s, tiles, num_tiles, s.k + key / kPanel * s.key_bytes, a.k.dim, key, fetch);
    }
  }
  for (const Tile* t = tiles; t < tiles + num_tiles; ++t) {
    const int begin = t->lo / 16, end = (t->hi + 15) / 16;
    for (int i = t->first; t->lo < t->hi && i < t->first + t->count; ++i) {
      float *const scores = s.s + (i - first) * kBlockKeys, *const out = s.out + long(i) * stride;
      if (end - begin == kVecs) {
        softmax_row<true>(a, s.rows[i], kb, begin, end, scores, s.max + i, s.sum + 16 * i, out, stride);
      } else {
        softmax_row<false>(a, s.rows[i], kb, begin, end, scores, s.max + i, s.sum + 16 * i, out, stride);
      }
    }
  }
  if (narrow) fetch.begin(BlockFetch::kOfValues, num_tiles * num_keys * ((a.v.dim + kPanel - 1) / kPanel));
  const Values v = {rows.v, s.v, a.v.dim, &fetch};
  if (narrow) {
    IMBREX_BY_TYPE(a.v.type, value_tiles, s, tiles, num_tiles, num_keys, v)
  } else {
    value_tiles<kWide>(s, tiles, num_tiles, num_keys, v);
  }
}

void stage_block(const AttentionParams& a, const BlockRows& rows, int num_keys, const Scratch& s) {
  for (int key = 0; key < num_keys; key += kPanel) {
    char* const panel = s.k + key / kPanel * s.key_bytes;
    if (multiplies_pairs(a)) {
      BlockFetch nothing;
      IMBREX_BY_TYPE(a.k.type, stage_pairs, rows.k + key, a.k.dim, panel, nothing)
    } else {
      IMBREX_BY_TYPE(a.k.type, stage_wide_keys, rows.k + key, a.k.dim, panel)
    }
  }
  IMBREX_BY_TYPE(a.v.type, stage_wide_values, rows.v, num_keys, a.v.dim, reinterpret_cast<float*>(s.v))
}

// Finished sums from the order and the scale in which values were widened to those of the cache.
void restore(const KvSide& side, float* out) {
  const vf factor = _mm512_set1_ps(side.type == kE4m3 ? kE4m3Factor : 1.f);
  const vi low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  for (int d = 0; in_pairs(side.type) && d < side.dim; d += 32) {
    const vf even = _mm512_mul_ps(_mm512_load_ps(out + d), factor), odd = _mm512_mul_ps(_mm512_load_ps(out + d + 16), factor);
    _mm512_store_ps(out + d, _mm512_permutex2var_ps(even, low, odd));
    _mm512_store_ps(out + d + 16, _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd));
  }
}

void clear(const Scratch& s, long rows, int v) {
  for (long i = 0; i < rows * v; i += 16) _mm512_store_ps(s.out + i, _mm512_setzero_ps());
  for (long i = 0; i < rows; ++i) {
    s.max[i] = kEmptyMax;
    _mm512_store_ps(s.sum + 16 * i, _mm512_setzero_ps());
  }
}

// Queries and outputs of an item's rows lie a token apart, where the machine does not guess them.
constexpr int kRowsAhead = 8;
void ask_for_row(const AttentionParams& a, const Row& row) {
  const char* const q = a.q + row.token * a.q_token_stride + row.head * a.q_head_stride;
  char* const out = a.out + row.token * a.out_token_stride + row.head * a.out_head_stride;
  for (long b = 0; b < a.k.dim * element_size(a.q_type); b += 64) __builtin_prefetch(q + b);
  for (long b = 0; b < a.v.dim * element_size(a.out_type); b += 64) __builtin_prefetch(out + b, 1, 2);
}

bool attention(const AttentionParams& a, const WorkItem& item, int kv_head, NextTask next, char* memory) {
#ifdef __AVX512BF16__
  if (shares_latents(a)) return attend_latent_heads<LatentProducts>(a, item, kv_head, next, memory);
#endif
  const int rows_each = (item.q_end - item.q_begin) * a.group, heads = a.heads_together, num_rows = rows_each * heads;
  const int qk = a.k.dim, v = pad(a.v.dim, 32);
  Scratch s;
  layout(memory, a, num_rows, &s);
  for (int h = 0; h < heads; ++h) fill_rows(a, item, kv_head + h, s.rows + h * rows_each);
  for (int i = 0; i < 4 * (kMaxDim + 64); i += 64) _mm512_store_si512(s.zero + i, _mm512_setzero_si512());
  for (int i = 0; i < num_rows; ++i) {
    Row& row = s.rows[i];
    if (i + kRowsAhead < num_rows) ask_for_row(a, s.rows[i + kRowsAhead]);
    if (a.k.type == kE4m3 && !multiplies_pairs(a)) row.scale *= kE4m3Factor;
    const char* const q = a.q + row.token * a.q_token_stride + row.head * a.q_head_stride;
    if (multiplies_pairs(a)) {
      __builtin_memcpy(s.q + long(i) * qk, q, 2ul * qk);
    } else {
      load_query(a, q, row.head / a.group, s.q + long(i) * qk);
    }
  }
  clear(s, num_rows, v);
  const bool narrow = rows_each <= kPassRows;
  const Visible keys = item_keys(a, item, s.rows, rows_each);
  KeyBlocks block(a, item), before = block;
  if (!block.done()) find_block_rows(a, item, kv_head, block.key(), keys, s.zero, *s.now);
  bool folded = false;
  for (; !block.done(); before = block, block.next()) {
    const int kb = block.key();
    if (block.begins()) show(a, item, s.rows, num_rows, block);
    if (block.leaves_split(before) && item.partial < 0) {
      for (int i = 0; i < num_rows; ++i) {
        if (!folded) {
          s.folded_max[i] = kEmptyMax;
          s.folded_sum[i] = 0.f;
          for (int d = 0; d < v; ++d) s.folded[long(i) * v + d] = 0.f;
        }
        restore(a.v, s.out + long(i) * v);
        fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, s.out + long(i) * v, s.max[i],
             _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i)), a.v.dim);
      }
      clear(s, num_rows, v);
      folded = true;
    }
    const int num_keys = item.kv_end - kb < kBlockKeys ? item.kv_end - kb : kBlockKeys;
    const bool more = find_rows_after(a, item, kv_head, block, keys, next, s.zero, *s.next);
    BlockFetch fetch(a, more ? s.next : nullptr);
    for (int h = 0; h < heads; ++h) {
      BlockRows* const rows = heads > 1 ? s.of_head : s.now;
      if (heads > 1) shift_rows(*s.now, s.zero, h * a.k.head_stride, h * a.v.head_stride, *rows);
      settle_rows(a, s.zero, rows->k, rows->v, s.k_compact, s.v_compact);
      if (!narrow) stage_block(a, *rows, num_keys, s);
      for (int i = 0; i < rows_each; i += kPassRows) {
        if (!narrow) fetch.share(kPassRows, rows_each);
        row_pass(a, s, *rows, h * rows_each + i, rows_each - i < kPassRows ? rows_each - i : kPassRows, kb, num_keys, narrow, fetch);
      }
    }
    if (narrow) fetch.rest();
    BlockRows* const done = s.now;
    s.now = s.next, s.next = done;
  }
  bool finite = true;
  for (int i = 0; i < num_rows; ++i) {
    float* out = s.out + long(i) * v;
    float max = s.max[i], sum = _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i));
    restore(a.v, out);
    if (folded) {
      fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, out, max, sum, a.v.dim);
      out = s.folded + long(i) * v, max = s.folded_max[i], sum = s.folded_sum[i];
    }
    finite &= finish_row(a, item, s.rows[i], out, max, sum);
  }
  return finite;
}

void nothing() {}

}  // namespace
}  // namespace imbrex::cpu
