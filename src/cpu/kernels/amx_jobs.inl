// The inner loops of AMX prefill: slices of tile products, and the pipeline of jobs that interleaves them with the softmax.

namespace imbrex::cpu {
namespace {

#define TILE_LOAD_OR_ZERO(t, p, zero) \
  do {                                \
    if (zero) {                       \
      TILE_ZERO(t);                   \
    } else {                          \
      TILE_LOAD(t, p);                \
    }                                 \
  } while (false)

// Slices of products: 4 accumulators += 2 left operands x 2 right ones, in kParts parts of one product. Where a slice completes its
// accumulators, each is stored, and filled for the slice after, while the products of the others still run.

// Slice `step` of the scores of chunk c of [c0, c1): 32 rows x 32 keys += 32 dims.
IMBREX_INLINE void qk_part(int part, int c, int step, int steps, int c0, int c1, const char* q, const BlockTiles& b, char* scores) {
  const char *q0 = q + step * 1024, *q1 = q0 + steps * 1024;
  char *s0 = scores + c * 2048, *s1 = s0 + kGroups * 1024;
  const bool last = step == steps - 1, more = c + 1 < c1;
  if (part == 0) {
    if (c == c0 && step == 0) {
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    TILE_LOAD(4, q0);
    TILE_STREAM(6, b.keys[2 * c] + step * 1024);
    TILE_DOT(0, 4, 6);
  } else if (part == 1) {
    TILE_STREAM(7, b.keys[2 * c + 1] + step * 1024);
    TILE_DOT(1, 4, 7);
    if (last) TILE_STORE(0, s0);
    if (last && more) TILE_ZERO(0);
  } else if (part == 2) {
    TILE_LOAD(5, q1);
    TILE_DOT(2, 5, 6);
    if (last) TILE_STORE(1, s0 + 1024);
    if (last && more) TILE_ZERO(1);
  } else {
    TILE_DOT(3, 5, 7);
    if (last) TILE_STORE(2, s1);
    if (last && more) TILE_ZERO(2);
    if (last) TILE_STORE(3, s1 + 1024);
    if (last && more) TILE_ZERO(3);
  }
}

// Slice c of [c0, c1) of the output of dim pair n of `dims`: 32 rows x 32 dims += 32 keys.
// `fresh`: out is taken for zero, whatever it holds.
IMBREX_INLINE void pv_part(int part, int n, int c, int c0, int c1, int dims, bool fresh, const char* p, const BlockTiles& b, char* out) {
  char *o0 = out + n * 2048, *o1 = o0 + dims * 2048;
  const char *p0 = p + c * 2048, *p1 = p0 + kGroups * 1024, *v = b.values[c] + n * 2048;
  const bool last = c == c1 - 1, more = n + 1 < dims;
  if (part == 0) {
    if (n == 0 && c == c0) {
      TILE_LOAD_OR_ZERO(0, o0, fresh);
      TILE_LOAD_OR_ZERO(1, o0 + 1024, fresh);
      TILE_LOAD_OR_ZERO(2, o1, fresh);
      TILE_LOAD_OR_ZERO(3, o1 + 1024, fresh);
    }
    TILE_LOAD(4, p0);
    TILE_STREAM(6, v);
    TILE_DOT(0, 4, 6);
  } else if (part == 1) {
    TILE_STREAM(7, v + 1024);
    TILE_DOT(1, 4, 7);
    if (last) TILE_STORE(0, o0);
    if (last && more) TILE_LOAD_OR_ZERO(0, o0 + 2048, fresh);
  } else if (part == 2) {
    TILE_LOAD(5, p1);
    TILE_DOT(2, 5, 6);
    if (last) TILE_STORE(1, o0 + 1024);
    if (last && more) TILE_LOAD_OR_ZERO(1, o0 + 3072, fresh);
  } else {
    TILE_DOT(3, 5, 7);
    if (last) TILE_STORE(2, o1);
    if (last && more) TILE_LOAD_OR_ZERO(2, o1 + 2048, fresh);
    if (last) TILE_STORE(3, o1 + 1024);
    if (last && more) TILE_LOAD_OR_ZERO(3, o1 + 3072, fresh);
  }
}
IMBREX_INLINE void qk_slice(int c, int step, int steps, int c0, int c1, const char* q, const BlockTiles& b, char* scores) {
  IMBREX_UNROLL(4)
  for (int part = 0; part < kParts; ++part) qk_part(part, c, step, steps, c0, c1, q, b, scores);
}
IMBREX_INLINE void pv_slice(int n, int c, const Job& job, int dims, const char* p, char* out) {
  IMBREX_UNROLL(4)
  for (int part = 0; part < kParts; ++part) pv_part(part, n, c, job.c0, job.c1, dims, job.fresh, p, *job.tiles, out);
}

// Runs all parts at once.
IMBREX_INLINE void pv_job(const Job& job, int dims, const float* p, float* out) {
  for (int n = 0; n < dims; ++n)
    for (int c = job.c0; c < job.c1; ++c) pv_slice(n, c, job, dims, (const char*)p, (char*)out);
}

// The jobs of a key range in order: blocks of keys outside, blocks of rows inside. Stages a block of keys when its first job comes up.
struct JobList {
  const AttentionParams& a;
  const WorkItem& item;
  const Scratch& s;
  const TileCounts& n;
  int kv_head;  // the first of `heads`
  int heads;    // several: each has a row block
  Visible keys;
  bool regular;               // all rows have plain logits, or all capped ones
  bool masked;                // some row is under a mask of bytes here, and takes the general way
  bool stage_later;           // the caller stages the parts of a block itself, between its products
  bool whole_blocks = false;  // jobs take all chunks, seen or not: the loop without counts is faster than what hidden chunks would save
  int kb, end, block = 0, slot = 0;
  bool staged = false;
  BlockTiles* tiles;

  bool next(Job* job) {
    for (; kb < end; kb += kBlockKeys, block = 0, staged = false) {
      for (; block < n.row_blocks; ++block) {
        const RowBlock& rows = s.blocks[block];
        if (rows.lo >= kb + kBlockKeys || rows.hi <= kb) continue;
        const int head = heads > 1 ? kv_head + block : kv_head;
        if (!staged) {
          slot = (slot + 1) % kRing;
          find_block(a, item, head, kb, keys, s.stage[slot], tiles + slot);
          if (!stage_later) {
            for (int part = 0; part < kGroups; ++part) stage_part(a, item, head, kb, keys, s.stage[slot], part, [] {});
          }
          staged = heads == 1;
        }
        job->block = block;
        job->head = head;
        job->kb = kb;
        job->c0 = rows.lo > kb && !whole_blocks ? (rows.lo - kb) / 32 : 0;
        job->c1 = rows.hi < kb + kBlockKeys && !whole_blocks ? (rows.hi - kb + 31) / 32 : kChunks;
        job->full = regular && !masked && rows.all_lo <= kb && rows.all_hi >= kb + kBlockKeys;
        job->fresh = s.fresh[block];
        s.fresh[block] = false;
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
  constexpr int kSlices = kSteps ? kSteps : 1;  // of a chunk
  float* const scores[2] = {s.scores, s.scores + 2 * kGroups * 256};
  Job jobs[3];
  Job *before = nullptr, *now = jobs, *after = jobs + 1;
  list.whole_blocks = kSteps && list.regular && !list.masked;
  if (!list.next(now)) return;
  TILE_FENCE();
  for (int c = now->c0; c < now->c1; ++c)
    for (int k = 0; k < steps; ++k) qk_slice(c, k, steps, now->c0, now->c1, s.q + now->block * q_bytes, *now->tiles, (char*)scores[0]);
  for (int turn = 0; now; turn ^= 1) {
    float *mine = scores[turn], *other = scores[turn ^ 1];
    const bool more = list.next(after);
    TILE_FENCE();
    float *max = s.max + now->block * kRowBlock, *sum = s.sum + now->block * kRowBlock * 16L, *out = s.out + now->block * out_floats;
    const float* scale = s.scale + now->block * kRowBlock;
    const CapCurve* curves = s.curves + now->block * kRowBlock;
    const Row* rows = s.rows + now->block * kRowBlock;
    const char* q = more ? s.q + after->block * q_bytes : nullptr;
    char* out_before = before ? (char*)(s.out + before->block * out_floats) : nullptr;
    // A softmax may rescale the output of its rows, so the output of the same rows' previous block must be complete.
    const bool same_rows = before && before->block == now->block;
    if (same_rows) {
      pv_job(*before, dims, other, s.out + before->block * out_floats);
      TILE_FENCE();
    }
    if (kSteps > 0 && list.whole_blocks && before && !same_rows && more) {
      const BlockTiles values = *before->tiles, keys = *after->tiles;
      const bool fresh = before->fresh;
      // 16 rows go with the products of values and 16 with those of keys, in kTurns of kUnrolled rows. A turn goes through whole pairs of
      // dim tiles and whole chunks, so that all but the number of a pair or chunk is a constant in it.
      constexpr int kUnrolled = kDims == 2 ? 8 : 4, kTurns = 16 / kUnrolled;
      // Part u of the products of a turn: as many as there are for the 4 parts of its rows.
      auto multiply_values = [&](int turn, int u) __attribute__((always_inline)) {
        IMBREX_UNROLL(4)
        for (int i = u * kDims / 4; i < (u + 1) * kDims / 4; ++i) {
          const int n = turn * (kUnrolled * kDims / 16) + i / 16;
          pv_part(i % 4, n, i / 4 % 4, 0, kChunks, kDims, fresh, (const char*)other, values, out_before);
        }
      };
      auto multiply_keys = [&](int turn, int u) __attribute__((always_inline)) {
        IMBREX_UNROLL(4)
        for (int i = u * kSteps / 4; i < (u + 1) * kSteps / 4; ++i) {
          const int c = turn * (kUnrolled / 4) + i / 4 / kSlices;
          qk_part(i % 4, c, i / 4 % kSlices, kSteps, 0, kChunks, q, keys, (char*)other);
        }
      };
      auto half_of_rows = [&]<bool edges>(int first, Edges<edges>, auto multiply) __attribute__((always_inline)) {
        IMBREX_UNROLL(1)
        for (int turn = 0; turn < kTurns; ++turn) {
          IMBREX_UNROLL(8)
          for (int i = 0; i < kUnrolled; ++i) {
            const int r = first + turn * kUnrolled + i;
            softmax_row<kLogits, edges>(
                a, rows[r], *now, mine + row_offset(r, kGroups), max + r, sum + 16 * r, scale + r, curves + r,
                out + row_offset(r, 2 * kDims), 2 * kDims, [&](int part) __attribute__((always_inline)) { multiply(turn, i * 4 + part); });
          }
        }
      };
      auto all_rows = [&](auto edges) __attribute__((always_inline)) {
        half_of_rows(0, edges, multiply_values);
        half_of_rows(16, edges, multiply_keys);
      };
      now->full ? all_rows(Edges<false>{}) : all_rows(Edges<true>{});
    } else {
      // The order of work is the same, slice by slice, whatever keys are hidden.
      const int pv = before && !same_rows ? dims * (before->c1 - before->c0) : 0, qk = more ? steps * (after->c1 - after->c0) : 0;
      for (int r = 0; r < 32; ++r) {
        if (r < 16) {
          for (int i = r * pv / 16; i < (r + 1) * pv / 16; ++i) {
            const int width = before->c1 - before->c0;
            pv_slice(i / width, before->c0 + i % width, *before, dims, (const char*)other, out_before);
          }
        } else {
          for (int i = (r - 16) * qk / 16; i < (r - 15) * qk / 16; ++i) {
            qk_slice(after->c0 + i / steps, i % steps, steps, after->c0, after->c1, q, *after->tiles, (char*)other);
          }
        }
        float* row_scores = mine + row_offset(r, kGroups);
        if (now->full) {
          softmax_row<kLogits>(a, rows[r], *now, row_scores, max + r, sum + 16 * r, scale + r, curves + r, out + row_offset(r, dim_tiles),
                               dim_tiles);
        } else if (list.regular && !rows[r].custom) {
          softmax_row<kLogits, true>(a, rows[r], *now, row_scores, max + r, sum + 16 * r, scale + r, curves + r,
                                     out + row_offset(r, dim_tiles), dim_tiles);
        } else {
          softmax_row<kAny>(a, rows[r], *now, row_scores, max + r, sum + 16 * r, scale + r, curves + r, out + row_offset(r, dim_tiles),
                            dim_tiles);
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

}  // namespace
}  // namespace imbrex::cpu
