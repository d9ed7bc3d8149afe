// The AMX kernels, written in tile verbs; included by amx.cpp (hardware) and amx_emulated.cpp (tiles in memory, for tests).
//
// Roofline: 32 rows x 128 keys x 128 dims take 128 tile products of 16 cycles each; meanwhile the vector unit can retire 16 operations
// a product, about what the softmax of the block needs. So one loop over the 32 rows issues a slice of products, then the softmax of
// one row: the products of the block before (PV) and of the block after (QK) run in the shadow of this block's exponentials.
// Rows are all q heads of a kv head for some tokens, so K and V tiles are read from L1 or L2 for many rows (docs/kernels/cpu_amx.md).
#include "cpu/params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/write_kv.inl"
#include "cpu/kernels/avx512_math.inl"
#include "cpu/kernels/avx512_rows.inl"
#ifdef IMBREX_AMX_EMULATED
#include "cpu/kernels/amx_tiles_emulated.inl"
#else
#include "cpu/kernels/amx_tiles_hardware.inl"
#endif
#include "cpu/kernels/amx_stage.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kRowBlock = 32;    // rows of a job: two row tiles
constexpr int kMaxRows = 512;    // rows of an item, unless one token's group is larger
constexpr int kNarrowRows = 16;  // items with so few rows (decode) use tiles with just these rows
constexpr int kRing = 3;         // blocks in flight: PV of one, softmax of the next, QK of the one after
// A row keeps the reference that its exponentials are taken against until they sum to more than this: bf16 and fp32 are equally
// precise at 2^20 and at 1, so the maximum is not computed for blocks that do not need a new one.
constexpr float kLargeSum = 0x1p20f;

// What is known of 32 rows before any key is read.
struct RowBlock {
  int lo, hi;          // keys that some row sees
  int all_lo, all_hi;  // keys that every row sees
};

// 32 rows against one block of keys.
struct Job {
  int block;  // of rows
  int kb;
  int c0, c1;  // chunks of 32 keys that some row sees
  bool full;   // every row sees all keys, and its logits are plain or only capped
  const BlockTiles* tiles;
  const Stage* stage;
};

// One worker's memory, cut from `scratch`. A row tile of scores is 8 tiles of 16 x 16 floats, one of outputs dim_tiles of them.
struct Scratch {
  char* q;        // [row blocks][2][steps] tiles of 16 rows x 32 dims
  float* out;     // [row blocks][2][dim_tiles][16][16]
  float* folded;  // likewise: of the splits before this one
  float* scores;  // [2][2][8][16][16]: this job's and the other's; probabilities replace them as bf16 in the even tiles
  float *max, *sum, *folded_max, *folded_sum;  // [rows], [rows, 16], [rows], [rows]
  float* scale;                                // [rows]: of the logits, log2(e) included
  Row* rows;
  RowBlock* blocks;
  Stage stage[kRing];
  BlockTiles tiles[kRing];
};

struct Shape {
  int rows, row_blocks, steps, dim_tiles;
};

Shape shape_of(const AttentionParams& a, int num_rows) {
  const int blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  return {num_rows, blocks, (a.k.dim + 31) / 32, (a.v.dim + 31) / 32 * 2};
}

long layout(char* base, const AttentionParams& a, int num_rows, Scratch* out) {
  const Shape n = shape_of(a, num_rows);
  const long rows = long(n.row_blocks) * kRowBlock, tile = 1024;
  long at = 0;
  auto take = [&](long bytes) {
    char* p = base ? base + at : nullptr;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  auto floats = [&](long count) { return reinterpret_cast<float*>(take(count * 4)); };
  Scratch s;
  s.scores = floats(2 * 2 * kGroups * 256);
  s.q = take(n.row_blocks * 2 * n.steps * tile);
  s.out = floats(n.row_blocks * 2L * n.dim_tiles * 256);
  s.max = floats(rows);
  s.sum = floats(rows * 16);
  s.scale = floats(rows);
  s.rows = reinterpret_cast<Row*>(take(rows * long(sizeof(Row))));
  s.blocks = reinterpret_cast<RowBlock*>(take(n.row_blocks * long(sizeof(RowBlock))));
  const char* zero = take(n.steps * tile > kMaxDim * 4L ? n.steps * tile : kMaxDim * 4L);
  for (Stage& stage : s.stage) {
    stage.steps = n.steps;
    stage.dim_tiles = n.dim_tiles;
    stage.keys = take(kGroups * n.steps * tile);
    stage.values = take(kChunks * n.dim_tiles * tile);
    stage.zero = zero;
  }
  const char** key_rows = reinterpret_cast<const char**>(take(kBlockKeys * 8));
  const char** value_rows = reinterpret_cast<const char**>(take(kBlockKeys * 8));
  s.folded = floats(n.row_blocks * 2L * n.dim_tiles * 256);
  s.folded_max = floats(rows);
  s.folded_sum = floats(rows);
  char *key_compact = take(compact_bytes(a.k)), *value_compact = take(compact_bytes(a.v));
  for (Stage& stage : s.stage) {
    stage.key_rows = key_rows, stage.value_rows = value_rows;
    stage.key_compact = key_compact, stage.value_compact = value_compact;
  }
  if (out) *out = s;
  return at;
}

long scratch_bytes(const AttentionParams& a, int max_rows) { return layout(nullptr, a, max_rows, nullptr); }

// Row i's 16 elements of column tile t are at tiles[...][t]: where it begins, in floats.
IMBREX_INLINE long row_offset(int row, int tiles) { return (row / 16) * (tiles * 256L) + row % 16 * 16; }

enum Logits { kAny, kPlain, kCapped };  // kPlain, kCapped: all keys are seen too

// Scores of one row to probabilities (bf16, in the even tiles).
template <Logits logits>
IMBREX_INLINE void softmax_row(const AttentionParams& a, const Row& row, const Job& job, float* s, float* max, float* sum,
                               const float* scale, float* out, int dim_tiles) {
  vf x[kVecs], p[kVecs];
  float factor = *scale;
  if constexpr (logits == kAny) {
    if (!is_plain(a, row)) {
      float* parts[kVecs];
      for (int t = 0; t < kVecs; ++t) parts[t] = s + 256 * t;
      modify_logits<true>(a, row, job.kb, parts);
      factor = 1.f;
    }
    __mmask16 seen[kVecs];
    row_masks(row, job.kb, seen);
    for (int t = 0; t < kVecs; ++t) {
      if (t < 2 * job.c0 || t >= 2 * job.c1) seen[t] = 0;  // not computed
      x[t] = _mm512_mask_load_ps(_mm512_set1_ps(-__builtin_inff()), seen[t], s + 256 * t);
    }
  } else {
    IMBREX_UNROLL(8)
    for (int t = 0; t < kVecs; ++t) x[t] = _mm512_load_ps(s + t * 256);
    if constexpr (logits == kCapped) {
      const float twice = row.scale * 2 * kLog2e / a.soft_cap, cap = a.soft_cap * kLog2e;
      IMBREX_UNROLL(8)
      for (int t = 0; t < kVecs; ++t) x[t] = soft_cap_bf16(x[t], twice, cap);
      factor = 1.f;
    }
  }
  const vf vscale = _mm512_set1_ps(factor), m = _mm512_set1_ps(*max);
  IMBREX_UNROLL(8)
  for (int t = 0; t < kVecs; ++t) p[t] = exp2_bf16(_mm512_fmsub_ps(x[t], vscale, m));
  vf total = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])),
                           _mm512_add_ps(_mm512_add_ps(p[4], p[5]), _mm512_add_ps(p[6], p[7])));
  if (__builtin_expect(_mm512_cmp_ps_mask(total, _mm512_set1_ps(kLargeSum), _CMP_GT_OQ), 0)) {
    const vf top = _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])),
                                 _mm512_max_ps(_mm512_max_ps(x[4], x[5]), _mm512_max_ps(x[6], x[7])));
    const float new_max = _mm512_reduce_max_ps(top) * factor;
    const vf rescale = _mm512_set1_ps(exp2_exact(*max - new_max)), n = _mm512_set1_ps(new_max);
    *max = new_max;
    _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), rescale));
    for (int t = 0; t < dim_tiles; ++t) _mm512_store_ps(out + 256 * t, _mm512_mul_ps(_mm512_load_ps(out + 256 * t), rescale));
    for (int t = 0; t < kVecs; ++t) p[t] = exp2_bf16(_mm512_fmsub_ps(x[t], vscale, n));
    total = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])),
                          _mm512_add_ps(_mm512_add_ps(p[4], p[5]), _mm512_add_ps(p[6], p[7])));
  }
  _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
  IMBREX_UNROLL(4)
  for (int c = 0; c < kChunks; ++c) _mm512_store_si512(s + 512 * c, (vi)_mm512_cvtne2ps_pbh(p[2 * c + 1], p[2 * c]));
}

// Slice `step` of the scores of chunk c: 32 rows x 32 keys += 32 dims. The last step stores.
IMBREX_INLINE void qk_slice(int c, int step, int steps, const char* q, const BlockTiles& b, char* scores) {
  if (step == 0) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  const char *q0 = q + step * 1024, *q1 = q0 + steps * 1024;
  TILE_LOAD(4, q0);
  TILE_STREAM(6, b.keys[2 * c] + step * 1024);
  TILE_DOT(0, 4, 6);
  TILE_STREAM(7, b.keys[2 * c + 1] + step * 1024);
  TILE_DOT(1, 4, 7);
  TILE_LOAD(5, q1);
  TILE_DOT(2, 5, 6);
  TILE_DOT(3, 5, 7);
  if (step == steps - 1) {
    char* to = scores + c * 2048;
    TILE_STORE(0, to);
    TILE_STORE(1, to + 1024);
    TILE_STORE(2, to + kGroups * 1024);
    TILE_STORE(3, to + kGroups * 1024 + 1024);
  }
}

// Slice c of the output of dim pair n: 32 rows x 32 dims += 32 keys. The first chunk loads, the last stores.
IMBREX_INLINE void pv_slice(int n, int c, int c0, int c1, int dim_tiles, const char* p, const BlockTiles& b, char* out) {
  char *o0 = out + n * 2048, *o1 = o0 + dim_tiles * 1024;
  if (c == c0) {
    TILE_LOAD(0, o0);
    TILE_LOAD(1, o0 + 1024);
    TILE_LOAD(2, o1);
    TILE_LOAD(3, o1 + 1024);
  }
  const char *p0 = p + c * 2048, *p1 = p0 + kGroups * 1024, *v = b.values[c] + n * 2048;
  TILE_LOAD(4, p0);
  TILE_STREAM(6, v);
  TILE_DOT(0, 4, 6);
  TILE_STREAM(7, v + 1024);
  TILE_DOT(1, 4, 7);
  TILE_LOAD(5, p1);
  TILE_DOT(2, 5, 6);
  TILE_DOT(3, 5, 7);
  if (c == c1 - 1) {
    TILE_STORE(0, o0);
    TILE_STORE(1, o0 + 1024);
    TILE_STORE(2, o1);
    TILE_STORE(3, o1 + 1024);
  }
}

// The jobs of a key range in order: blocks of keys outside, blocks of rows inside. Stages a block of keys when its first job comes up.
struct JobList {
  const AttentionParams& a;
  const WorkItem& item;
  const Scratch& s;
  const Shape& n;
  int kv_head;
  Visible keys;
  bool regular;      // all rows have plain logits, or all capped ones
  bool stage_later;  // the caller stages the parts of a block itself, between its products
  int kb, end, block = 0, slot = 0;
  bool staged = false;
  BlockTiles* tiles;

  bool next(Job* job) {
    for (; kb < end; kb += kBlockKeys, block = 0, staged = false) {
      for (; block < n.row_blocks; ++block) {
        const RowBlock& rows = s.blocks[block];
        if (rows.lo >= kb + kBlockKeys || rows.hi <= kb) continue;
        if (!staged) {
          slot = (slot + 1) % kRing;
          find_block(a, item, kv_head, kb, keys, s.stage[slot], tiles + slot);
          if (!stage_later) {
            for (int part = 0; part < kGroups; ++part) stage_part(a, item, kv_head, kb, keys, s.stage[slot], part);
          }
          staged = true;
        }
        job->block = block;
        job->kb = kb;
        job->c0 = rows.lo > kb ? (rows.lo - kb) / 32 : 0;
        job->c1 = rows.hi < kb + kBlockKeys ? (rows.hi - kb + 31) / 32 : kChunks;
        job->full = regular && rows.all_lo <= kb && rows.all_hi >= kb + kBlockKeys;
        job->tiles = tiles + slot;
        job->stage = s.stage + slot;
        ++block;
        return true;
      }
    }
    return false;
  }
};

// All jobs of [begin, end), pipelined. kSteps and kDims (pairs of dim tiles) are compile-time where the shape is common, else 0.
template <int kSteps, int kDims, Logits kLogits>
void run_jobs(JobList& list) {
  const AttentionParams& a = list.a;
  const Scratch& s = list.s;
  const int steps = kSteps ? kSteps : list.n.steps, dims = kDims ? kDims : list.n.dim_tiles / 2, dim_tiles = 2 * dims;
  const long q_bytes = 2048L * steps, out_floats = 512L * dim_tiles;
  float* const scores[2] = {s.scores, s.scores + 2 * kGroups * 256};
  Job jobs[3];
  Job *before = nullptr, *now = jobs, *after = jobs + 1;
  if (!list.next(now)) return;
  TILE_FENCE();
  for (int c = now->c0; c < now->c1; ++c)
    for (int k = 0; k < steps; ++k) qk_slice(c, k, steps, s.q + now->block * q_bytes, *now->tiles, (char*)scores[0]);
  for (int turn = 0; now; turn ^= 1) {
    float *mine = scores[turn], *other = scores[turn ^ 1];
    const bool more = list.next(after);
    TILE_FENCE();
    float *max = s.max + now->block * kRowBlock, *sum = s.sum + now->block * kRowBlock * 16L, *out = s.out + now->block * out_floats;
    const float* scale = s.scale + now->block * kRowBlock;
    const Row* rows = s.rows + now->block * kRowBlock;
    const char* q = more ? s.q + after->block * q_bytes : nullptr;
    char* out_before = before ? (char*)(s.out + before->block * out_floats) : nullptr;
    if (kSteps && now->full && before && before->c0 == 0 && before->c1 == kChunks && more && after->c0 == 0 && after->c1 == kChunks) {
      const BlockTiles values = *before->tiles, keys = *after->tiles;
      IMBREX_UNROLL(16)
      for (int r = 0; r < 16; ++r) {
        IMBREX_UNROLL(16)
        for (int i = r * 4 * kDims / 16; i < (r + 1) * 4 * kDims / 16; ++i) {
          pv_slice(i / 4, i % 4, 0, kChunks, 2 * kDims, (const char*)other, values, out_before);
        }
        softmax_row<kLogits>(a, rows[r], *now, mine + row_offset(r, kGroups), max + r, sum + 16 * r, scale + r,
                             out + row_offset(r, 2 * kDims), 2 * kDims);
      }
      IMBREX_UNROLL(16)
      for (int r = 16; r < 32; ++r) {
        IMBREX_UNROLL(16)
        for (int i = (r - 16) * 4 * kSteps / 16; i < (r - 15) * 4 * kSteps / 16; ++i) {
          qk_slice(i / (kSteps ? kSteps : 1), i % (kSteps ? kSteps : 1), kSteps, q, keys, (char*)other);
        }
        softmax_row<kLogits>(a, rows[r], *now, mine + row_offset(r, kGroups), max + r, sum + 16 * r, scale + r,
                             out + row_offset(r, 2 * kDims), 2 * kDims);
      }
    } else {
      // The same order of work, slice by slice, whatever is hidden.
      const int pv = before ? dims * (before->c1 - before->c0) : 0, qk = more ? steps * (after->c1 - after->c0) : 0;
      for (int r = 0; r < 32; ++r) {
        if (r < 16) {
          for (int i = r * pv / 16; i < (r + 1) * pv / 16; ++i) {
            const int width = before->c1 - before->c0;
            pv_slice(i / width, before->c0 + i % width, before->c0, before->c1, dim_tiles, (const char*)other, *before->tiles, out_before);
          }
        } else {
          for (int i = (r - 16) * qk / 16; i < (r - 15) * qk / 16; ++i) {
            qk_slice(after->c0 + i / steps, i % steps, steps, q, *after->tiles, (char*)other);
          }
        }
        float* row_scores = mine + row_offset(r, kGroups);
        if (now->full) {
          softmax_row<kLogits>(a, rows[r], *now, row_scores, max + r, sum + 16 * r, scale + r, out + row_offset(r, dim_tiles), dim_tiles);
        } else {
          softmax_row<kAny>(a, rows[r], *now, row_scores, max + r, sum + 16 * r, scale + r, out + row_offset(r, dim_tiles), dim_tiles);
        }
      }
    }
    TILE_FENCE();
    if (!more) {
      for (int n = 0; n < dims; ++n)
        for (int c = now->c0; c < now->c1; ++c) pv_slice(n, c, now->c0, now->c1, dim_tiles, (const char*)mine, *now->tiles, (char*)out);
      TILE_FENCE();
      return;
    }
    Job* free = before ? before : jobs + 2;
    before = now;
    now = after;
    after = free;
  }
}

// Decode: at most 16 rows, so a product costs rows instead of 16 cycles and memory decides. One pass over the keys: while the scores of
// a block are computed, the values of the block before are read too, tile by tile, which keeps two memory streams going.
template <Logits kLogits>
void run_narrow(JobList& list) {
  const AttentionParams& a = list.a;
  const Scratch& s = list.s;
  const int steps = list.n.steps, dim_tiles = list.n.dim_tiles, num_rows = list.n.rows;
  float* const scores[2] = {s.scores, s.scores + kGroups * 256};
  const int turns = dim_tiles > kGroups ? dim_tiles : kGroups;
  Job jobs[2];
  Job *before = nullptr, *now = jobs;
  bool more = list.next(now);
  for (int turn = 0; more || before; turn ^= 1) {
    char *mine = (char*)scores[turn], *other = (char*)scores[turn ^ 1];
    TILE_FENCE();
    for (int i = 0; i < turns; ++i) {
      for (int t = i * dim_tiles / turns; before && t < (i + 1) * dim_tiles / turns; ++t) {
        char* out = (char*)s.out + t * 1024;
        TILE_LOAD(2, out);
        for (int c = before->c0; c < before->c1; ++c) {
          TILE_LOAD(4, other + c * 2048);
          TILE_STREAM(6, before->tiles->values[c] + t * 1024);
          TILE_DOT(2, 4, 6);
        }
        TILE_STORE(2, out);
      }
      for (int g = i * kGroups / turns; more && g < (i + 1) * kGroups / turns; ++g) {
        stage_part(a, list.item, list.kv_head, now->kb, list.keys, *now->stage, g);
        if (g < 2 * now->c0 || g >= 2 * now->c1) continue;
        TILE_FENCE();
        TILE_ZERO(0);
        for (int k = 0; k < steps; ++k) {
          TILE_LOAD(5, s.q + k * 1024);
          TILE_STREAM(7, now->tiles->keys[g] + k * 1024);
          TILE_DOT(0, 5, 7);
        }
        TILE_STORE(0, mine + g * 1024);
      }
    }
    TILE_FENCE();
    if (!more) return;
    for (int r = 0; r < num_rows; ++r) {
      float *row_scores = (float*)mine + r * 16, *out = s.out + r * 16;
      if (now->full) {
        softmax_row<kLogits>(a, s.rows[r], *now, row_scores, s.max + r, s.sum + 16 * r, s.scale + r, out, dim_tiles);
      } else {
        softmax_row<kAny>(a, s.rows[r], *now, row_scores, s.max + r, s.sum + 16 * r, s.scale + r, out, dim_tiles);
      }
    }
    Job* free = before ? before : jobs + 1;
    before = now;
    now = free;
    more = list.next(now);
  }
}

void pack_queries(const AttentionParams& a, const Scratch& s, const Shape& n) {
  for (int i = 0; i < n.row_blocks * kRowBlock; ++i) {
    const Row& row = s.rows[i];
    const char* from = a.q + row.token * a.q_token_stride + row.head * a.q_head_stride;
    char* to = s.q + (i / 16) * (n.steps * 1024L) + i % 16 * 64;
    for (int k = 0; k < n.steps; ++k) _mm512_store_si512(to + k * 1024, load_bf16<kBf16>(from, 32 * k, a.k.dim));
  }
}

void clear(const Scratch& s, const Shape& n) {
  const long tiles = n.row_blocks * 2L * n.dim_tiles;
  for (long i = 0; i < tiles * 256; i += 16) _mm512_store_ps(s.out + i, _mm512_setzero_ps());
  for (int i = 0; i < n.row_blocks * kRowBlock; ++i) {
    s.max[i] = kEmptyMax;
    _mm512_store_ps(s.sum + 16 * i, _mm512_setzero_ps());
  }
}

// The row's output from its column tiles to a plain row.
IMBREX_INLINE void gather_out(const float* tiles, int dim_tiles, float* row) {
  for (int t = 0; t < dim_tiles; ++t) _mm512_storeu_ps(row + 16 * t, _mm512_load_ps(tiles + 256 * t));
}

// The loop that fits the shape: compile-time trip counts for head dims 64, 128 and 256.
template <Logits logits>
void run_list(JobList& list, bool narrow) {
  const int steps = list.n.steps, dims = list.n.dim_tiles / 2;
  if (narrow) {
    run_narrow<logits>(list);
  } else if (steps == 4 && dims == 4) {
    run_jobs<4, 4, logits>(list);
  } else if (steps == 2 && dims == 2) {
    run_jobs<2, 2, logits>(list);
  } else if (steps == 8 && dims == 8) {
    run_jobs<8, 8, logits>(list);
  } else {
    run_jobs<0, 0, logits>(list);
  }
}

void attention(const AttentionParams& a, const WorkItem& item, int kv_head, char* memory) {
  const int num_rows = (item.q_end - item.q_begin) * a.group;
  const Shape n = shape_of(a, num_rows);
  Scratch s;
  layout(memory, a, num_rows, &s);
  fill_rows(a, item, kv_head, s.rows);
  const Visible keys = item_keys(item, s.rows, num_rows);
  const bool capped = a.soft_cap > 0.f;
  bool regular = !a.alibi_slopes && !a.bias_by_distance && !a.custom_mask;
  for (int i = 0; i < n.row_blocks * kRowBlock; ++i) {
    if (i >= num_rows) s.rows[i] = s.rows[num_rows - 1];  // padding does what the last row does, so that it needs no mask
    const Row& row = s.rows[i];
    s.scale[i] = row.scale * kLog2e;
    regular = regular && (capped || row.scale > 0.f);
    RowBlock& b = s.blocks[i / kRowBlock];
    if (i % kRowBlock == 0) b = {row.lo, row.hi, row.lo, row.hi};
    if (row.lo < row.hi && row.lo < b.lo) b.lo = row.lo;
    if (row.hi > b.hi) b.hi = row.hi;
    if (row.lo > b.all_lo) b.all_lo = row.lo;
    if (row.hi < b.all_hi) b.all_hi = row.hi;
  }
  for (int b = 0; b < n.row_blocks; ++b) {
    if (s.blocks[b].hi > item.kv_end) s.blocks[b].hi = item.kv_end;
  }
  const bool narrow = num_rows <= kNarrowRows;
  tiles_shape(narrow ? num_rows : 16);
  char* zero = const_cast<char*>(s.stage[0].zero);
  const long zero_bytes = n.steps * 1024L > kMaxDim * 4L ? n.steps * 1024L : kMaxDim * 4L;
  for (long i = 0; i < zero_bytes; i += 64) _mm512_store_si512(zero + i, _mm512_setzero_si512());
  pack_queries(a, s, n);
  clear(s, n);

  float row_out[kMaxDim + 32];
  bool folded = false;
  for (int begin = item.kv_begin; begin < item.kv_end;) {
    const long split_end = (begin / kSplitKeys + 1L) * kSplitKeys;
    const int end = split_end < item.kv_end && item.partial < 0 ? int(split_end) : item.kv_end;
    if (begin > item.kv_begin) {
      for (int i = 0; i < num_rows; ++i) {
        float* into = s.folded + long(i) * n.dim_tiles * 16;
        if (!folded) {
          s.folded_max[i] = kEmptyMax;
          s.folded_sum[i] = 0.f;
          for (int t = 0; t < n.dim_tiles; ++t) _mm512_storeu_ps(into + 16 * t, _mm512_setzero_ps());
        }
        gather_out(s.out + row_offset(i, n.dim_tiles), n.dim_tiles, row_out);
        fold(into, s.folded_max + i, s.folded_sum + i, row_out, s.max[i], _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i)), a.v.dim);
      }
      clear(s, n);
      folded = true;
    }
    JobList list{.a = a,
                 .item = item,
                 .s = s,
                 .n = n,
                 .kv_head = kv_head,
                 .keys = keys,
                 .regular = regular,
                 .stage_later = narrow,
                 .kb = begin,
                 .end = end,
                 .tiles = s.tiles};
    if (capped) {
      run_list<kCapped>(list, narrow);
    } else {
      run_list<kPlain>(list, narrow);
    }
    begin = end;
  }
  for (int i = 0; i < num_rows; ++i) {
    gather_out(s.out + row_offset(i, n.dim_tiles), n.dim_tiles, row_out);
    const float* out = row_out;
    float max = s.max[i], sum = _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i));
    if (folded) {
      float* into = s.folded + long(i) * n.dim_tiles * 16;
      fold(into, s.folded_max + i, s.folded_sum + i, row_out, max, sum, a.v.dim);
      out = into, max = s.folded_max[i], sum = s.folded_sum[i];
    }
    finish_row(a, item, s.rows[i], out, max, sum);
  }
}

void enter() {}
void leave() { tiles_release(); }

}  // namespace
}  // namespace imbrex::cpu
