// The portable kernels: plain loops over fixed-size arrays that a compiler turns into vectors of whatever width its flags allow.
// Included by generic.cpp and avx2.cpp, each with its own flags.
#include "cpu/params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/row_parts.inl"
#include "cpu/kernels/write_kv.inl"
#ifdef __AVX2__
#include "cpu/kernels/fetch.inl"
#include "cpu/kernels/avx2_stage.inl"
#include "cpu/kernels/avx2_decode.inl"
#endif
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kRowTile = 4;  // rows of a register tile
// One vector register, unaligned; two of them by four rows, and their operands, fit 16 registers: SSE2 and AVX2 have no more.
#ifdef __AVX2__
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int VecInt __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
constexpr int kColTile = 2 * kLanes;  // keys (or value dims) of a register tile
constexpr int kMaxRows = 64;          // rows of an item, unless one token's group is larger

inline int pad16(int n) { return (n + 15) / 16 * 16; }

// One worker's memory, cut from `scratch`. Rows are padded to whole tiles.
struct Scratch {
  Row* rows;
  float *q, *out, *folded;                     // [rows, qk], [rows, v], [rows, v]
  float *max, *sum, *folded_max, *folded_sum;  // [rows]; maxima in log2 units
  float *k, *v;                                // [qk, kBlockKeys] transposed, [kBlockKeys, v]
  float* s;                                    // [rows, kBlockKeys]
};

long layout(char* base, const AttentionParams& a, int num_rows, Scratch* out) {
  const long rows = (num_rows + kRowTile - 1) / kRowTile * kRowTile, qk = a.k.dim, v = pad16(a.v.dim);
  long at = 0;
  auto take = [&](long bytes) {
    char* p = base ? base + at : nullptr;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  auto floats = [&](long n) { return reinterpret_cast<float*>(take(n * 4)); };
  Scratch s;
  s.rows = reinterpret_cast<Row*>(take(rows * long(sizeof(Row))));
  s.q = floats(rows * qk);
  s.out = floats(rows * v);
  s.folded = floats(rows * v);
  s.max = floats(rows);
  s.sum = floats(rows);
  s.folded_max = floats(rows);
  s.folded_sum = floats(rows);
  s.k = floats(qk * kBlockKeys);
  s.v = floats(kBlockKeys * v);
  s.s = floats(rows * kBlockKeys);
  if (out) *out = s;
  return at;
}

long scratch_bytes(const AttentionParams& a, int max_rows) { return layout(nullptr, a, max_rows, nullptr); }

// Keys [kb, kb + kBlockKeys) as floats; those outside `keys` are zero and their memory is not touched.
void load_block(const AttentionParams& a, int request, int kv_head, int kb, Visible keys, const Scratch& s) {
  const int qk = a.k.dim, v = a.v.dim, v_stride = pad16(v);
  constexpr int kGroup = 16;  // keys transposed at a time: a cache line of every dim's row
  float rows[kGroup][kMaxDim];
  for (int j = 0; j < kBlockKeys; ++j) {
    const bool seen = kb + j >= keys.lo && kb + j < keys.hi;
    float *k_row = rows[j % kGroup], *v_row = s.v + long(j) * v_stride;
    if (seen && a.row_parts.first > 0) {
      load_parts(a.row_parts, kv_row(a, a.k, request, kv_head, kb + j), kv_row(a, a.v, request, kv_head, kb + j), k_row);
      __builtin_memcpy(v_row, k_row, 4ul * v);
    } else if (seen) {
      load_row(kv_row(a, a.k, request, kv_head, kb + j), a.k.dim_stride, a.k.type, qk, k_row);
      load_row(kv_row(a, a.v, request, kv_head, kb + j), a.v.dim_stride, a.v.type, v, v_row);
    } else {
      for (int d = 0; d < qk; ++d) k_row[d] = 0.f;
    }
    for (int d = seen ? v : 0; d < v_stride; ++d) v_row[d] = 0.f;
    if (j % kGroup != kGroup - 1) continue;
    for (int d = 0; d < qk; ++d) {
      float* to = s.k + d * kBlockKeys + j + 1 - kGroup;
      for (int i = 0; i < kGroup; ++i) to[i] = rows[i][d];
    }
  }
}

// out[i][0..kColTile) (+)= sum over n of left[i * left_stride + n] * right[n * right_stride + 0..kColTile), for four rows i.
inline void tile(const float* left, long left_stride, const float* right, long right_stride, int n, float* out, long out_stride,
                 bool accumulate) {
  const auto at = [&](int i, int half) { return reinterpret_cast<Vec*>(out + i * out_stride + half * kLanes); };
  Vec a0 = {}, a1 = {}, b0 = {}, b1 = {}, c0 = {}, c1 = {}, d0 = {}, d1 = {};  // rows a to d; arrays would live in memory
  if (accumulate) {
    a0 = *at(0, 0), a1 = *at(0, 1), b0 = *at(1, 0), b1 = *at(1, 1);
    c0 = *at(2, 0), c1 = *at(2, 1), d0 = *at(3, 0), d1 = *at(3, 1);
  }
  for (int x = 0; x < n; ++x, right += right_stride, ++left) {
    const Vec r0 = *reinterpret_cast<const Vec*>(right), r1 = *reinterpret_cast<const Vec*>(right + kLanes);
    const float a = left[0], b = left[left_stride], c = left[2 * left_stride], d = left[3 * left_stride];
    a0 += a * r0, a1 += a * r1;
    b0 += b * r0, b1 += b * r1;
    c0 += c * r0, c1 += c * r1;
    d0 += d * r0, d1 += d * r1;
  }
  *at(0, 0) = a0, *at(0, 1) = a1, *at(1, 0) = b0, *at(1, 1) = b1;
  *at(2, 0) = c0, *at(2, 1) = c1, *at(3, 0) = d0, *at(3, 1) = d1;
}

// exp2_exact() of every lane; 0 for -inf.
inline Vec exp2_lanes(Vec x) {
  const Vec low = Vec{} - 150.f, high = Vec{} + 127.f, magic = Vec{} + 12582912.f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vec shifted = x + magic, n = shifted - magic, f = x - n;
  Vec p = Vec{} + 1.535336188e-4f;
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.f;
  const VecInt i = __builtin_convertvector(n, VecInt), half = i >> 1;
  return p * (Vec)((half + 127) << 23) * (Vec)((i - half + 127) << 23);
}

// Logits to probabilities, in place; rescales the row's sums where its maximum grows.
void softmax_row(const AttentionParams& a, const Row& row, int kb, float* s, float* max, float* sum, float* out, int v) {
  const int lo = clamp_int(row.lo - kb, 0, kBlockKeys), hi = clamp_int(row.hi - kb, 0, kBlockKeys);
  const bool plain = plain_logits(a);
  const float scale = plain ? row.scale * kLog2e : row.scale;
  for (int j = 0; j < kBlockKeys; ++j) s[j] *= scale;
  if (!plain) {
    const int* const places = row.custom && row.key_positions ? row.key_positions + (kb - row.first_byte) : nullptr;
    for (int j = lo; j < hi; ++j) {
      const int distance = (places ? places[j] : kb + j) - row.position;
      float x = s[j];
      if (a.soft_cap > 0.f) x = a.soft_cap * __builtin_tanhf(x / a.soft_cap);
      if (row.slope != 0.f) {
        const float far = float(distance);
        x += row.slope * (a.alibi_sqrt ? -__builtin_sqrtf(far < 0.f ? -far : 0.f) : far);
      }
      if (row.bias) x += row.bias[clamp_int(distance, -a.bias_reach, a.bias_reach)];
      s[j] = x;
    }
    if (a.modify_scores) modify_scores(a, row, kb, s, 16, 1.f);
    for (int j = lo; j < hi; ++j) s[j] *= kLog2e;
  }
  for (int j = 0; j < lo; ++j) s[j] = -__builtin_inff();
  for (int j = hi; j < kBlockKeys; ++j) s[j] = -__builtin_inff();
  if (row.custom) {
    for (int j = lo; j < hi; ++j) s[j] = row.custom[kb + j - row.first_byte] ? s[j] : -__builtin_inff();
  }
  Vec tops = Vec{} + *max;
  for (int j = 0; j < kBlockKeys; j += kLanes) {
    const Vec x = *reinterpret_cast<Vec*>(s + j);
    tops = x > tops ? x : tops;
  }
  float top = tops[0];
  for (int l = 1; l < kLanes; ++l) top = tops[l] > top ? tops[l] : top;
  if (top > *max) {
    const float factor = exp2_exact(*max - top);
    *max = top;
    *sum *= factor;
    for (int d = 0; d < v; ++d) out[d] *= factor;
  }
  Vec totals = {};
  for (int j = 0; j < kBlockKeys; j += kLanes) {
    Vec& x = *reinterpret_cast<Vec*>(s + j);
    x = exp2_lanes(x - top);
    totals += x;
  }
  float total = 0.f;
  for (int l = 0; l < kLanes; ++l) total += totals[l];
  *sum += total;
}

// (max, sum, out) of all keys before joins those of one split. Not inlined, so that items and merges run the same instructions.
__attribute__((noinline)) void fold(float* into, float* into_max, float* into_sum, const float* part, float part_max, float part_sum,
                                    int v) {
  const float top = part_max > *into_max ? part_max : *into_max;
  const float old_weight = exp2_exact(*into_max - top), new_weight = exp2_exact(part_max - top);
  for (int d = 0; d < v; ++d) into[d] = into[d] * old_weight + part[d] * new_weight;
  *into_sum = *into_sum * old_weight + part_sum * new_weight;
  *into_max = top;
}

// Divides by the sum, joins the sink, writes output and LSE of one row. Not inlined for the same reason.
__attribute__((noinline)) void write_row(const AttentionParams& a, int token, int head, const float* out, float max, float sum) {
  const int v = a.v.dim;
  const float v_scale = a.v.scales ? a.v.scales[head / a.group * a.v.scale_stride] : 1.f;
  float result[kMaxDim], lse = -__builtin_inff(), factor = 0.f;
  if (sum > 0.f) {
    float weight = 1.f;
    if (a.sinks) {
      const float sink = a.sinks[head] * kLog2e, top = sink > max ? sink : max;
      weight = exp2_exact(max - top);
      sum = sum * weight + exp2_exact(sink - top);
      max = top;
    }
    factor = weight / sum * v_scale;
    lse = (max + __builtin_log2f(sum)) * kLn2;
  } else if (sum != sum) {
    factor = lse = sum;  // NaN among the visible keys
  }
  for (int d = 0; d < v; ++d) result[d] = factor == 0.f ? 0.f : out[d] * factor;
  store_row(a.out + token * a.out_token_stride + head * a.out_head_stride, element_size(a.out_type), a.out_type, v, result);
  if (a.lse) a.lse[token * a.lse_token_stride + head * a.lse_head_stride] = lse;
}

inline void clear(float* out, long n, float* max, float* sum, int rows) {
  for (long i = 0; i < n; ++i) out[i] = 0.f;
  for (int i = 0; i < rows; ++i) max[i] = kEmptyMax, sum[i] = 0.f;
}

inline bool all_finite(const float* x, int n) {
  u32 any = 0;
  for (int i = 0; i < n; ++i) any |= (as_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
  return !any;
}

// One block of keys for four rows, whose scores begin at `scores`: `multiply` makes these of 16 or fewer keys, `add` adds a few dims of
// values.
template <class Multiply, class Add>
inline void run_rows(const AttentionParams& a, const Scratch& s, int i, int num_rows, int kb, int v, const Multiply& multiply,
                     const Add& add) {
  float* const scores = s.s + long(i) * kBlockKeys;
  for (int j = 0; j < kBlockKeys; j += kColTile) multiply(scores + j, j);
  for (int x = i; x < i + kRowTile && x < num_rows; ++x) {
    softmax_row(a, s.rows[x], kb, s.s + long(x) * kBlockKeys, s.max + x, s.sum + x, s.out + long(x) * v, v);
  }
  for (int d = 0; d < v; d += kColTile) add(scores, d, s.out + long(i) * v + d);
}

bool attention(const AttentionParams& a, const WorkItem& item, int kv_head, [[maybe_unused]] NextTask next, char* memory) {
  const int num_rows = (item.q_end - item.q_begin) * a.group;
  const int rows = (num_rows + kRowTile - 1) / kRowTile * kRowTile, qk = a.k.dim, v = pad16(a.v.dim);
  Scratch s;
  layout(memory, a, num_rows, &s);
  fill_rows(a, item, kv_head, s.rows);
  const Visible keys = item_keys(a, item, s.rows, num_rows);
  for (int i = 0; i < rows; ++i) {
    if (i < num_rows) {
      const Row& row = s.rows[i];
      load_query(a, a.q + row.token * a.q_token_stride + row.head * a.q_head_stride, kv_head, s.q + long(i) * qk);
    } else {
      for (int d = 0; d < qk; ++d) s.q[long(i) * qk + d] = 0.f;
    }
  }
  clear(s.out, long(rows) * v, s.max, s.sum, rows);
  bool folded = false;
#ifdef __AVX2__
  const bool dense = takes_dense_rows(a), pairs = takes_pairs(a, num_rows), in_place = takes_values_in_place(a, num_rows);
  alignas(32) static const char zero[sizeof(float) * kMaxDim] = {};
  BlockRows rows_of[2];  // by turns: of this block, and of the next one
  int turn = 0;
#endif
  KeyBlocks block(a, item), before = block;
#ifdef __AVX2__
  if (dense && !block.done()) find_block_rows(a, item, kv_head, block.key(), keys, zero, rows_of[turn]);
#endif
  for (; !block.done(); before = block, block.next()) {
    const int kb = block.key();
    if (block.begins()) show(a, item, s.rows, num_rows, block);
    if (block.leaves_split(before) && item.partial < 0) {
      if (!folded) clear(s.folded, long(rows) * v, s.folded_max, s.folded_sum, rows);
      for (int i = 0; i < num_rows; ++i) {
        fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, s.out + long(i) * v, s.max[i], s.sum[i], v);
      }
      clear(s.out, long(rows) * v, s.max, s.sum, rows);
      folded = true;
    }
    const auto multiply_floats = [&](int i, int j, float* to) {
      tile(s.q + long(i) * qk, qk, s.k + j, kBlockKeys, qk, to, kBlockKeys, false);
    };
    const auto add_floats = [&](const float* scores, int d, float* to) { tile(scores, kBlockKeys, s.v + d, v, kBlockKeys, to, v, true); };
    const auto run_tiles = [&](const auto& multiply, const auto& add) {
      for (int i = 0; i < rows; i += kRowTile) {
        run_rows(
            a, s, i, num_rows, kb, v, [&](float* to, int j) { multiply(i, j, to); },
            [&](const float* scores, int d, float* to) { add(i, scores, d, to); });
      }
    };
#ifdef __AVX2__
    if (dense) {
      const BlockRows& now = rows_of[turn];
      turn ^= 1;
      const bool more = find_rows_after(a, item, kv_head, block, keys, next, zero, rows_of[turn]);
      BlockFetch fetch(a, more ? rows_of + turn : nullptr);
      unsigned* const packed = reinterpret_cast<unsigned*>(s.k);
      pairs ? pack_keys(now, qk, packed, fetch) : stage_keys(a, now, s.k, fetch);
      if (!in_place) stage_values(a, now, v, s.v, fetch);
      const int steps = kBlockKeys / kColTile * (pairs ? qk / 16 : 1);
      const auto multiply = [&](int i, int j, float* to) {
        if (i == 0 && j == 0) fetch.begin(BlockFetch::kOfScores, steps);
        if (pairs) {
          multiply_pairs(s.q + long(i) * qk, qk, packed + j, qk, to, fetch);
        } else {
          if (i == 0) fetch.step();
          multiply_floats(i, j, to);
        }
      };
      if (in_place) {
        with_type(a.v.type, [&](auto type) {
          run_tiles(multiply, [&](int i, const float* scores, int d, float* to) {
            if (i == 0 && d == 0) fetch.begin(BlockFetch::kOfValues, v / kColTile * (kBlockKeys / 8));
            add_values<type.value>(scores, now, d, to, v, fetch);
          });
        });
      } else {
        run_tiles(multiply, [&](int, const float* scores, int d, float* to) { add_floats(scores, d, to); });
      }
      continue;
    }
#endif
    load_block(a, item.table, kv_head, kb, keys, s);
    run_tiles(multiply_floats, [&](int, const float* scores, int d, float* to) { add_floats(scores, d, to); });
  }
  bool finite = true;
  for (int i = 0; i < num_rows; ++i) {
    const Row& row = s.rows[i];
    float *out = s.out + long(i) * v, *max = s.max + i, *sum = s.sum + i;
    if (folded) {
      fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, out, *max, *sum, v);
      out = s.folded + long(i) * v, max = s.folded_max + i, sum = s.folded_sum + i;
    }
    finite &= *sum != *sum || all_finite(out, a.v.dim);
    if (item.partial < 0) {
      write_row(a, row.token, row.head, out, *max, *sum);
    } else {
      const long at = long(item.partial + row.entry) * a.num_q_heads + row.head;
      __builtin_memcpy(a.partial_out + at * a.v.dim, out, 4ul * a.v.dim);
      a.partial_state[2 * at] = *max;
      a.partial_state[2 * at + 1] = *sum;
    }
  }
  return finite;
}

void merge(const AttentionParams& a, const MergeItem& item, int head_begin, int head_end) {
  const int tokens = item.q_end - item.q_begin, v = a.v.dim;
  float out[kMaxDim];
  for (int t = 0; t < tokens; ++t) {
    for (int head = head_begin; head < head_end; ++head) {
      float max, sum;
      clear(out, v, &max, &sum, 1);
      for (int split = 0; split < item.num_splits; ++split) {
        const long at = partial_row(a, item, split, t) * a.num_q_heads + head;
        fold(out, &max, &sum, a.partial_out + at * v, a.partial_state[2 * at], a.partial_state[2 * at + 1], v);
      }
      write_row(a, item.q_begin + t, head, out, max, sum);
    }
  }
}

void nothing() {}

}  // namespace
}  // namespace imbrex::cpu
