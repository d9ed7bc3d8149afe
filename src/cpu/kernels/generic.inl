// The portable kernels: plain loops over fixed-size arrays that a compiler turns into vectors of whatever width its flags allow.
// Included by generic.cpp and avx2.cpp, each with its own flags.
#include "cpu/params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/write_kv.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kRowTile = 4;   // rows of a register tile
constexpr int kColTile = 16;  // keys (or value dims) of a register tile
constexpr int kMaxRows = 64;  // rows of an item, unless one token's group is larger

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
  float row[kMaxDim];
  for (int j = 0; j < kBlockKeys; ++j) {
    const bool seen = kb + j >= keys.lo && kb + j < keys.hi;
    if (seen) {
      load_row(kv_row(a, a.k, request, kv_head, kb + j), a.k.dim_stride, a.k.type, qk, row);
      load_row(kv_row(a, a.v, request, kv_head, kb + j), a.v.dim_stride, a.v.type, v, s.v + long(j) * v_stride);
      for (int d = v; d < v_stride; ++d) s.v[long(j) * v_stride + d] = 0.f;
    } else {
      for (int d = 0; d < v_stride; ++d) s.v[long(j) * v_stride + d] = 0.f;
    }
    for (int d = 0; d < qk; ++d) s.k[d * kBlockKeys + j] = seen ? row[d] : 0.f;
  }
}

// out[i][0..16) (+)= sum over n of left[i * left_stride + n] * right[n * right_stride + 0..16), for four rows i.
inline void tile(const float* left, long left_stride, const float* right, long right_stride, int n, float* out, long out_stride,
                 bool accumulate) {
  float acc[kRowTile][kColTile];
  for (int i = 0; i < kRowTile; ++i)
    for (int c = 0; c < kColTile; ++c) acc[i][c] = accumulate ? out[i * out_stride + c] : 0.f;
  for (int x = 0; x < n; ++x) {
    const float* r = right + x * right_stride;
    for (int i = 0; i < kRowTile; ++i) {
      const float l = left[i * left_stride + x];
      for (int c = 0; c < kColTile; ++c) acc[i][c] += l * r[c];
    }
  }
  for (int i = 0; i < kRowTile; ++i)
    for (int c = 0; c < kColTile; ++c) out[i * out_stride + c] = acc[i][c];
}

// Logits to probabilities, in place; rescales the row's sums where its maximum grows.
void softmax_row(const AttentionParams& a, const Row& row, int kb, float* s, float* max, float* sum, float* out, int v) {
  const int lo = clamp_int(row.lo - kb, 0, kBlockKeys), hi = clamp_int(row.hi - kb, 0, kBlockKeys);
  for (int j = 0; j < kBlockKeys; ++j) s[j] *= row.scale;
  if (a.soft_cap > 0.f)
    for (int j = lo; j < hi; ++j) s[j] = a.soft_cap * __builtin_tanhf(s[j] / a.soft_cap);
  if (row.slope != 0.f)
    for (int j = 0; j < kBlockKeys; ++j) s[j] += row.slope * float(kb + j - row.position);
  if (row.bias)
    for (int j = lo; j < hi; ++j) s[j] += row.bias[clamp_int(kb + j - row.position, -a.bias_reach, a.bias_reach)];
  float top = *max;
  for (int j = 0; j < kBlockKeys; ++j) {
    const bool seen = j >= lo && j < hi && (!row.custom || row.custom[kb + j]);
    s[j] = seen ? s[j] * kLog2e : -__builtin_inff();
    top = s[j] > top ? s[j] : top;
  }
  if (top > *max) {
    const float factor = exp2_exact(*max - top);
    *max = top;
    *sum *= factor;
    for (int d = 0; d < v; ++d) out[d] *= factor;
  }
  float total = 0.f;
  for (int j = 0; j < kBlockKeys; ++j) s[j] = s[j] == -__builtin_inff() ? 0.f : exp2_exact(s[j] - top);
  for (int j = 0; j < kBlockKeys; ++j) total += s[j];
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
  }
  for (int d = 0; d < v; ++d) result[d] = factor == 0.f ? 0.f : out[d] * factor;
  store_row(a.out + token * a.out_token_stride + head * a.out_head_stride, element_size(a.out_type), a.out_type, v, result);
  if (a.lse) a.lse[token * a.lse_token_stride + head * a.lse_head_stride] = lse;
}

inline void clear(float* out, long n, float* max, float* sum, int rows) {
  for (long i = 0; i < n; ++i) out[i] = 0.f;
  for (int i = 0; i < rows; ++i) max[i] = kEmptyMax, sum[i] = 0.f;
}

void attention(const AttentionParams& a, const WorkItem& item, int kv_head, char* memory) {
  const int num_rows = (item.q_end - item.q_begin) * a.group;
  const int rows = (num_rows + kRowTile - 1) / kRowTile * kRowTile, qk = a.k.dim, v = pad16(a.v.dim);
  Scratch s;
  layout(memory, a, num_rows, &s);
  fill_rows(a, item, kv_head, s.rows);
  const Visible keys = item_keys(item, s.rows, num_rows);
  for (int i = 0; i < rows; ++i) {
    if (i < num_rows) {
      const Row& row = s.rows[i];
      load_row(a.q + row.token * a.q_token_stride + row.head * a.q_head_stride, element_size(a.q_type), a.q_type, qk, s.q + long(i) * qk);
    } else {
      for (int d = 0; d < qk; ++d) s.q[long(i) * qk + d] = 0.f;
    }
  }
  clear(s.out, long(rows) * v, s.max, s.sum, rows);
  bool folded = false;
  for (int kb = item.kv_begin; kb < item.kv_end; kb += kBlockKeys) {
    if (kb > item.kv_begin && kb % kSplitKeys == 0 && item.partial < 0) {
      if (!folded) clear(s.folded, long(rows) * v, s.folded_max, s.folded_sum, rows);
      for (int i = 0; i < num_rows; ++i) {
        fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, s.out + long(i) * v, s.max[i], s.sum[i], v);
      }
      clear(s.out, long(rows) * v, s.max, s.sum, rows);
      folded = true;
    }
    load_block(a, item.request, kv_head, kb, keys, s);
    for (int i = 0; i < rows; i += kRowTile) {
      float* scores = s.s + long(i) * kBlockKeys;
      for (int j = 0; j < kBlockKeys; j += kColTile) {
        tile(s.q + long(i) * qk, qk, s.k + j, kBlockKeys, qk, scores + j, kBlockKeys, false);
      }
      for (int x = i; x < i + kRowTile; ++x) {
        if (x < num_rows) {
          softmax_row(a, s.rows[x], kb, s.s + long(x) * kBlockKeys, s.max + x, s.sum + x, s.out + long(x) * v, v);
        }
      }
      for (int d = 0; d < v; d += kColTile) {
        tile(scores, kBlockKeys, s.v + d, v, kBlockKeys, s.out + long(i) * v + d, v, true);
      }
    }
  }
  for (int i = 0; i < num_rows; ++i) {
    const Row& row = s.rows[i];
    float *out = s.out + long(i) * v, *max = s.max + i, *sum = s.sum + i;
    if (folded) {
      fold(s.folded + long(i) * v, s.folded_max + i, s.folded_sum + i, out, *max, *sum, v);
      out = s.folded + long(i) * v, max = s.folded_max + i, sum = s.folded_sum + i;
    }
    if (item.partial < 0) {
      write_row(a, row.token, row.head, out, *max, *sum);
    } else {
      const long at = long(item.partial + row.token - item.q_begin) * a.num_q_heads + row.head;
      __builtin_memcpy(a.partial_out + at * a.v.dim, out, 4ul * a.v.dim);
      a.partial_state[2 * at] = *max;
      a.partial_state[2 * at + 1] = *sum;
    }
  }
}

void merge(const AttentionParams& a, const MergeItem& item, int kv_head) {
  const int tokens = item.q_end - item.q_begin, v = a.v.dim;
  float out[kMaxDim];
  for (int t = 0; t < tokens; ++t) {
    for (int head = kv_head * a.group; head < (kv_head + 1) * a.group; ++head) {
      float max, sum;
      clear(out, v, &max, &sum, 1);
      for (int split = 0; split < item.num_splits; ++split) {
        const long at = long(item.first_partial + split * tokens + t) * a.num_q_heads + head;
        fold(out, &max, &sum, a.partial_out + at * v, a.partial_state[2 * at], a.partial_state[2 * at + 1], v);
      }
      write_row(a, item.q_begin + t, head, out, max, sum);
    }
  }
}

void nothing() {}

}  // namespace
}  // namespace imbrex::cpu
