// Kernel table `avx512`: fp32 arithmetic in register tiles of 6 rows x 64 columns, for every element type.
// Roofline: QK and PV are 24 FMAs for 4 loads and 6 broadcasts, so prefill is bound by the two FMA ports; decode reads each key and
// value once, transposes keys in registers (about 25 cycles a key of 256 bytes) and stays below the time DRAM needs for them.
#include "cpu/params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/write_kv.inl"
#include "cpu/kernels/avx512_math.inl"
#include "cpu/kernels/avx512_rows.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kTileRows = 6;
constexpr int kMaxRows = 192;   // rows of an item, unless one token's group is larger
constexpr float kLazy = 8.f;    // log2 units by which a row may outgrow its maximum before its sums are rescaled
constexpr int kDirectRows = 6;  // items with so few rows read values where they are instead of widening them first

inline int pad16(int n) { return (n + 15) / 16 * 16; }

// One worker's memory, cut from `scratch`.
struct Scratch {
  Row* rows;
  float *q, *out, *folded;               // [rows, qk], [rows, v16], [rows, v16]
  float *max, *folded_max, *folded_sum;  // [rows]
  float* sum;                            // [rows, 16]: reduced over lanes at the end of a split
  float *k, *v;                          // [qk, kBlockKeys] transposed, [kBlockKeys, v16]
  float* s;                              // [kTileRows, kBlockKeys]
  const char **k_rows, **v_rows;         // [kBlockKeys]: where each key and value is; a zero row where there is none
  char* zero;                            // a row of zeros
  char *k_compact, *v_compact;           // rows of layouts whose elements are not neighbours
};

long layout(char* base, const AttentionParams& a, long rows, Scratch* out) {
  const long qk = a.k.dim, v = pad16(a.v.dim);
  long at = 0;
  auto take = [&](long bytes) {
    char* p = base ? base + at : nullptr;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  auto floats = [&](long n) { return reinterpret_cast<float*>(take(n * 4)); };
  Scratch s;
  s.k = floats(qk * kBlockKeys);
  s.v = floats(kBlockKeys * v);
  s.s = floats(kTileRows * kBlockKeys);
  s.rows = reinterpret_cast<Row*>(take(rows * long(sizeof(Row))));
  s.q = floats(rows * qk);
  s.out = floats(rows * v);
  s.folded = floats(rows * v);
  s.max = floats(rows);
  s.folded_max = floats(rows);
  s.folded_sum = floats(rows);
  s.sum = floats(rows * 16);
  s.k_rows = reinterpret_cast<const char**>(take(kBlockKeys * 8));
  s.v_rows = reinterpret_cast<const char**>(take(kBlockKeys * 8));
  s.zero = take(4 * (kMaxDim + 64));
  s.k_compact = take(compact_bytes(a.k));
  s.v_compact = take(compact_bytes(a.v));
  if (out) *out = s;
  return at;
}

long scratch_bytes(const AttentionParams& a, int max_rows) { return layout(nullptr, a, max_rows, nullptr); }

// Keys 16g.. of a block, transposed to [dim][key]. 16-bit types are transposed in pairs and widened afterwards.
template <int type>
IMBREX_INLINE void stage_keys(const char* const* rows, int dim, float* to) {
  constexpr bool pairs = type == kBf16;
  constexpr int step = pairs ? 32 : 16;
  vi r[16];
  for (int d = 0; d < dim; d += step) {
    if constexpr (pairs) {
      const __mmask32 m = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi16(m, rows[i] + 2L * d);
      transpose(r);
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) {
        if (d + 2 * i >= dim) break;
        _mm512_store_ps(to + (d + 2 * i) * kBlockKeys, _mm512_castsi512_ps(_mm512_slli_epi32(r[i], 16)));
        _mm512_store_ps(to + (d + 2 * i + 1) * kBlockKeys, _mm512_castsi512_ps(_mm512_and_si512(r[i], _mm512_set1_epi32(int(0xffff0000)))));
      }
    } else {
      const __mmask16 m = first(dim - d);
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(load16<type>(rows[i] + d * element_size(type), m));
      transpose(r);
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) {
        if (d + i >= dim) break;
        _mm512_store_ps(to + (d + i) * kBlockKeys, _mm512_castsi512_ps(r[i]));
      }
    }
  }
}

template <int type>
void stage_key_block(const Scratch& s, int dim, int num_keys) {
  for (int g = 0; g < num_keys; g += 16) stage_keys<type>(s.k_rows + g, dim, s.k + g);
}

template <int type>
void stage_value_block(const Scratch& s, int dim, int num_keys) {
  const int stride = pad16(dim);
  for (int j = 0; j < num_keys; ++j) {
    for (int d = 0; d < dim; d += 16) {
      _mm512_store_ps(s.v + long(j) * stride + d, load16<type>(s.v_rows[j] + d * element_size(type), first(dim - d)));
    }
  }
}

// s.s[r][0..num_keys) = q . k for R rows; num_keys is rounded up to 64.
template <int R>
void dot_tile(const float* q, const Scratch& s, int dim, int num_keys) {
  for (int j = 0; j < num_keys; j += 64) {
    vf acc[R][4];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) acc[r][c] = _mm512_setzero_ps();
    const float* k = s.k + j;
    for (int d = 0; d < dim; ++d, k += kBlockKeys) {
      const vf k0 = _mm512_load_ps(k), k1 = _mm512_load_ps(k + 16), k2 = _mm512_load_ps(k + 32), k3 = _mm512_load_ps(k + 48);
      IMBREX_UNROLL(6)
      for (int r = 0; r < R; ++r) {
        const vf x = _mm512_set1_ps(q[long(r) * dim + d]);
        acc[r][0] = _mm512_fmadd_ps(x, k0, acc[r][0]);
        acc[r][1] = _mm512_fmadd_ps(x, k1, acc[r][1]);
        acc[r][2] = _mm512_fmadd_ps(x, k2, acc[r][2]);
        acc[r][3] = _mm512_fmadd_ps(x, k3, acc[r][3]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 4; ++c) _mm512_store_ps(s.s + r * kBlockKeys + j + 16 * c, acc[r][c]);
  }
}

// out[r][16 C dims] += p[r][keys] * v[keys][16 C dims]; values widened (type kF32, from s.v) or where they lie in the cache.
template <int R, int C, int type, bool direct>
IMBREX_INLINE void value_tile(const Scratch& s, float* out, int stride, int d, int key_begin, int key_end, __mmask16 last) {
  vf acc[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = _mm512_load_ps(out + long(r) * stride + d + 16 * c);
  for (int j = key_begin; j < key_end; ++j) {
    vf v[C];
    IMBREX_UNROLL(4)
    for (int c = 0; c < C; ++c) {
      if constexpr (direct) {
        v[c] = load16<type>(s.v_rows[j] + (d + 16 * c) * element_size(type), c + 1 == C ? last : 0xffff);
      } else {
        v[c] = _mm512_load_ps(s.v + long(j) * stride + d + 16 * c);
      }
    }
    IMBREX_UNROLL(6)
    for (int r = 0; r < R; ++r) {
      const vf p = _mm512_set1_ps(s.s[r * kBlockKeys + j]);
      IMBREX_UNROLL(4)
      for (int c = 0; c < C; ++c) acc[r][c] = _mm512_fmadd_ps(p, v[c], acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_store_ps(out + long(r) * stride + d + 16 * c, acc[r][c]);
}

template <int R, int type, bool direct>
void value_tiles(const Scratch& s, float* out, int dim, int key_begin, int key_end) {
  const int stride = pad16(dim);
  int d = 0;
  for (; d + 64 <= dim; d += 64) value_tile<R, 4, type, direct>(s, out, stride, d, key_begin, key_end, 0xffff);
  for (; d + 16 < dim; d += 32) value_tile<R, 2, type, direct>(s, out, stride, d, key_begin, key_end, first(dim - d - 16));
  if (d < dim) value_tile<R, 1, type, direct>(s, out, stride, d, key_begin, key_end, first(dim - d));
}

// Logits of one row to probabilities, in place. num_keys: keys of the block that were computed; the others are hidden from all rows.
IMBREX_INLINE void softmax_row(const AttentionParams& a, const Row& row, int kb, float* s, float* max, float* sum, float* out, int v) {
  vf x[kVecs], top = _mm512_set1_ps(-__builtin_inff());
  float scale = row.scale * kLog2e;
  if (!is_plain(a, row)) {
    float* parts[kVecs];
    for (int t = 0; t < kVecs; ++t) parts[t] = s + 16 * t;
    modify_logits<false>(a, row, kb, parts);
    scale = 1.f;
  }
  if (sees_all(row, kb)) {
    for (int t = 0; t < kVecs; ++t) x[t] = _mm512_load_ps(s + 16 * t);
  } else {
    __mmask16 seen[kVecs];
    row_masks(row, kb, seen);
    for (int t = 0; t < kVecs; ++t) x[t] = _mm512_mask_load_ps(_mm512_set1_ps(-__builtin_inff()), seen[t], s + 16 * t);
  }
  for (int t = 0; t < kVecs; ++t) top = _mm512_max_ps(top, x[t]);
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
  for (int t = 0; t < kVecs; ++t) {
    const vf p = exp2_f32(_mm512_fmsub_ps(x[t], factor, m));
    total = _mm512_add_ps(total, p);
    _mm512_store_ps(s + 16 * t, p);
  }
  _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
}

// One register tile of rows against one block of keys.
template <int R>
void row_tile(const AttentionParams& a, const Scratch& s, int i, int kb, bool direct) {
  const int qk = a.k.dim, v = pad16(a.v.dim);
  int lo = kBlockKeys, hi = 0;
  for (int r = 0; r < R; ++r) {
    const Row& row = s.rows[i + r];
    const int row_lo = clamp_int(row.lo - kb, 0, kBlockKeys), row_hi = clamp_int(row.hi - kb, 0, kBlockKeys);
    if (row_lo < row_hi) lo = lo < row_lo ? lo : row_lo, hi = hi > row_hi ? hi : row_hi;
  }
  if (lo >= hi) return;
  dot_tile<R>(s.q + long(i) * qk, s, qk, hi);
  for (int r = 0; r < R; ++r) {
    softmax_row(a, s.rows[i + r], kb, s.s + r * kBlockKeys, s.max + i + r, s.sum + 16 * (i + r), s.out + long(i + r) * v, v);
  }
  float* out = s.out + long(i) * v;
  if (!direct) {
    value_tiles<R, kF32, false>(s, out, a.v.dim, lo, hi);
    return;
  }
  switch (a.v.type) {
    case kF32: value_tiles<R, kF32, true>(s, out, a.v.dim, lo, hi); break;
    case kF16: value_tiles<R, kF16, true>(s, out, a.v.dim, lo, hi); break;
    case kBf16: value_tiles<R, kBf16, true>(s, out, a.v.dim, lo, hi); break;
    case kE4m3: value_tiles<R, kE4m3, true>(s, out, a.v.dim, lo, hi); break;
    default: value_tiles<R, kE5m2, true>(s, out, a.v.dim, lo, hi);
  }
}

void load_block(const AttentionParams& a, const WorkItem& item, int kv_head, int kb, int num_keys, Visible keys, bool direct,
                const Scratch& s) {
  const int padded = (num_keys + 63) / 64 * 64;
  find_rows(a, a.k, item.request, kv_head, kb, padded, keys, s.zero, s.k_rows);
  compact_rows(a.k, padded, s.zero, s.k_rows, s.k_compact);
  IMBREX_BY_TYPE(a.k.type, stage_key_block, s, a.k.dim, padded)
  find_rows(a, a.v, item.request, kv_head, kb, num_keys, keys, s.zero, s.v_rows);
  compact_rows(a.v, num_keys, s.zero, s.v_rows, s.v_compact);
  if (!direct) IMBREX_BY_TYPE(a.v.type, stage_value_block, s, a.v.dim, num_keys)
}

void clear(const Scratch& s, long rows, int v) {
  for (long i = 0; i < rows * v; i += 16) _mm512_store_ps(s.out + i, _mm512_setzero_ps());
  for (long i = 0; i < rows; ++i) {
    s.max[i] = kEmptyMax;
    _mm512_store_ps(s.sum + 16 * i, _mm512_setzero_ps());
  }
}

void attention(const AttentionParams& a, const WorkItem& item, int kv_head, char* memory) {
  const int num_rows = (item.q_end - item.q_begin) * a.group, qk = a.k.dim, v = pad16(a.v.dim);
  Scratch s;
  layout(memory, a, num_rows, &s);
  fill_rows(a, item, kv_head, s.rows);
  for (int i = 0; i < 4 * (kMaxDim + 64); i += 64) _mm512_store_si512(s.zero + i, _mm512_setzero_si512());
  for (int i = 0; i < num_rows; ++i) {
    const Row& row = s.rows[i];
    load_row(a.q + row.token * a.q_token_stride + row.head * a.q_head_stride, element_size(a.q_type), a.q_type, qk, s.q + long(i) * qk);
  }
  clear(s, num_rows, v);
  const bool direct = num_rows <= kDirectRows;
  const Visible keys = item_keys(item, s.rows, num_rows);
  bool folded = false;
  for (int kb = item.kv_begin; kb < item.kv_end; kb += kBlockKeys) {
    if (kb > item.kv_begin && kb % kSplitKeys == 0 && item.partial < 0) {
      for (int i = 0; i < num_rows; ++i) {
        if (!folded) {
          s.folded_max[i] = kEmptyMax;
          s.folded_sum[i] = 0.f;
          for (int d = 0; d < v; ++d) s.folded[long(i) * v + d] = 0.f;
        }
        fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, s.out + long(i) * v, s.max[i],
             _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i)), a.v.dim);
      }
      clear(s, num_rows, v);
      folded = true;
    }
    const int num_keys = item.kv_end - kb < kBlockKeys ? item.kv_end - kb : kBlockKeys;
    load_block(a, item, kv_head, kb, num_keys, keys, direct, s);
    int i = 0;
    for (; i + kTileRows <= num_rows; i += kTileRows) row_tile<kTileRows>(a, s, i, kb, direct);
    switch (num_rows - i) {
      case 5: row_tile<5>(a, s, i, kb, direct); break;
      case 4: row_tile<4>(a, s, i, kb, direct); break;
      case 3: row_tile<3>(a, s, i, kb, direct); break;
      case 2: row_tile<2>(a, s, i, kb, direct); break;
      case 1: row_tile<1>(a, s, i, kb, direct); break;
      default: break;
    }
  }
  for (int i = 0; i < num_rows; ++i) {
    const float* out = s.out + long(i) * v;
    float max = s.max[i], sum = _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i));
    if (folded) {
      fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, out, max, sum, a.v.dim);
      out = s.folded + long(i) * v, max = s.folded_max[i], sum = s.folded_sum[i];
    }
    finish_row(a, item, s.rows[i], out, max, sum);
  }
}

void nothing() {}

}  // namespace

extern const Kernels kernels_avx512;
const Kernels kernels_avx512 = {"avx512", kMaxRows, scratch_bytes, nothing, nothing, attention, merge, write_kv};

}  // namespace imbrex::cpu
