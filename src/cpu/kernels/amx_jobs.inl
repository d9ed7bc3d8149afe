// The inner loops of the AMX kernels: softmax of a row, slices of tile products, and the pipelines that interleave them.

namespace imbrex::cpu {
namespace {

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

// All of it at once.
IMBREX_INLINE void pv_job(const Job& job, int dims, const float* p, float* out) {
  for (int n = 0; n < dims; ++n)
    for (int c = job.c0; c < job.c1; ++c) pv_slice(n, c, job.c0, job.c1, 2 * dims, (const char*)p, *job.tiles, (char*)out);
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
    // A softmax may rescale the output of its rows, so that of the same rows' previous block must be complete.
    const bool same_rows = before && before->block == now->block;
    if (same_rows) {
      pv_job(*before, dims, other, s.out + before->block * out_floats);
      TILE_FENCE();
    }
    if (kSteps && now->full && before && !same_rows && before->c0 == 0 && before->c1 == kChunks && more && after->c0 == 0 &&
        after->c1 == kChunks) {
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
      const int pv = before && !same_rows ? dims * (before->c1 - before->c0) : 0, qk = more ? steps * (after->c1 - after->c0) : 0;
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
      pv_job(*now, dims, mine, out);
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

}  // namespace
}  // namespace imbrex::cpu
