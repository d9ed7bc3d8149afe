// The inner loop of AMX decode: what amx.inl runs for items of at most 16 rows.

namespace imbrex::cpu {
namespace {

// Transposes a tile of scores. Keys of a strided cache are rows in memory, and become left operands: the product is that of keys and
// queries, with the same sums as with the operands exchanged, and its tiles are transposed before the softmax.
inline void turn_tile(char* tile) {
  vi r[16];
  IMBREX_UNROLL(16)
  for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(tile + 64 * i);
  transpose(r);
  IMBREX_UNROLL(16)
  for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 64 * i, r[i]);
}

// Runs an item of few rows. A product then costs as many cycles as it has rows instead of 16, and memory is the limit. There is one pass
// over the keys: while the scores of a block are computed, the values of the block before are read too, tile by tile, so that two streams
// of memory are read at the same time. Data that have to be made into tiles first (fp8, pages of 16) go through a ring in L1, one key group
// and one dim tile ahead: tile loads cannot be served from the store buffer, so the stores must be done before.
template <Logits kLogits>
void run_narrow(JobList& list) {
  const AttentionParams& a = list.a;
  const Scratch& s = list.s;
  const int steps = list.n.steps, dim_tiles = list.n.dim_tiles, num_rows = list.n.rows;
  float* const scores[2] = {s.scores, s.scores + kGroups * 256};
  const int turns = dim_tiles > kGroups ? dim_tiles : kGroups;
  const bool direct = s.stage[0].direct, as_rows = s.stage[0].as_rows;
  char *const key_ring = s.stage[0].keys, *const value_ring = s.stage[1].keys;  // which a direct stage does not use otherwise
  const bool together = list.heads > 1;
  Fetch fetch;
  // For each group of keys, 16 portions of keys and 16 of values are prefetched. They are spread over its 8 products and, where values are
  // rows, over 8 pairs of these.
  const int share = as_rows ? 1 : 2;
  // The share of the next block of keys that is prefetched during a group of keys: all heads of some tokens.
  const auto tokens_of_next = [&](const Job& job, int g) {
    const int step = job.block * kGroups + g, begin = job.kb + kBlockKeys;
    return Visible{begin + step * kBlockKeys / (kGroups * list.heads), begin + (step + 1) * kBlockKeys / (kGroups * list.heads)};
  };
  const char* keys[2];
  const char* values[2][kChunks];
  const auto computes = [](const Job& job, int g) { return g >= 2 * job.c0 && g < 2 * job.c1; };
  auto prepare_keys = [&](const Job& job, int g) {
    if (!computes(job, g)) return;
    stage_part(a, list.item, job.head, job.kb, list.keys, *job.stage, g, [&] { fetch.some(share); });
    keys[g % 2] = direct ? ring_keys(a, *job.tiles, g, steps, key_ring + g % 2 * (steps * 1024L)) : job.tiles->keys[g];
  };
  auto prepare_values = [&](const Job& job, int t) {
    ring_values(a, *job.tiles, t, job.c0, job.c1, value_ring + t % 2 * (kChunks * 1024L), values[t % 2]);
  };
  Job jobs[3];
  Job *before = nullptr, *now = jobs, *after = jobs + 1;
  bool have_now = list.next(now), have_after = have_now && list.next(after);
  if (have_now) prepare_keys(*now, 0);
  for (int turn = 0; have_now || before; turn ^= 1) {
    const char* const q = have_now ? s.q + now->block * (2048L * steps) : nullptr;
    char* const out_before = before ? (char*)s.out + before->block * (2048L * dim_tiles) : nullptr;
    char *mine = (char*)scores[turn], *other = (char*)scores[turn ^ 1];
    for (int i = 0; i < turns; ++i) {
      for (int g = i * kGroups / turns; have_now && g < (i + 1) * kGroups / turns; ++g) {
        if (together) {
          fetch.tokens(a, list.item, list.kv_head, list.heads, tokens_of_next(*now, g), list.keys);
        } else if (const int ahead = g + (as_rows ? Fetch::kRowsAhead : Fetch::kTilesAhead); ahead < kGroups || have_after) {
          const Job& job = ahead < kGroups ? *now : *after;
          as_rows ? fetch.rows(a, *job.stage, ahead % kGroups) : fetch.packed_keys(a, *job.tiles, ahead % kGroups, steps);
        }
        if (g + 1 < kGroups) {
          prepare_keys(*now, g + 1);
        } else if (have_after) {
          prepare_keys(*after, 0);
        }
        if (!computes(*now, g)) continue;
        TILE_FENCE();
        if (as_rows) {
          TILE_ZERO(1);
          for (int k = 0; k < steps; ++k) {
            TILE_LOAD(3, q + k * 1024);
            TILE_STREAM_ROWS(7, keys[g % 2] + k * 64, now->tiles->key_pitch[g]);
            TILE_DOT(1, 7, 3);
            fetch.some(share);
          }
          TILE_STORE(1, mine + g * 1024);
          continue;
        }
        TILE_ZERO(0);
        for (int k = 0; k < steps; ++k) {
          TILE_LOAD(5, q + k * 1024);
          TILE_STREAM(7, keys[g % 2] + k * 1024);
          TILE_DOT(0, 5, 7);
          fetch.some(share);
        }
        TILE_STORE(0, mine + g * 1024);
      }
      for (int t = i * dim_tiles / turns; t < (i + 1) * dim_tiles / turns; ++t) {
        if (const int ahead = t + Fetch::kTilesAhead; !as_rows && (ahead < dim_tiles ? before != nullptr : have_now)) {
          const Job& job = ahead < dim_tiles ? *before : *now;
          fetch.packed_values(a, *job.tiles, ahead % dim_tiles, job.c0, job.c1);
        }
        if (t + 1 < dim_tiles) {
          if (before) prepare_values(*before, t + 1);
        } else if (have_now) {
          prepare_values(*now, 0);
        }
        if (!before) continue;
        TILE_FENCE();
        char* out = out_before + t * 1024;
        TILE_LOAD_OR_ZERO(2, out, before->fresh);
        for (int c = before->c0; c < before->c1; ++c) {
          TILE_LOAD(4, other + c * 2048);
          TILE_STREAM(6, values[t % 2][c]);
          TILE_DOT(2, 4, 6);
          fetch.some(share);
        }
        TILE_STORE(2, out);
      }
    }
    TILE_FENCE();
    if (!have_now) return;
    for (int g = 2 * now->c0; as_rows && g < 2 * now->c1; ++g) turn_tile(mine + g * 1024);
    for (int r = 0, i = now->block * kRowBlock; r < num_rows; ++r, ++i) {
      float *row_scores = (float*)mine + r * 16, *out = s.out + row_offset(i, dim_tiles);
      if (now->full) {
        softmax_row<kLogits>(a, s.rows[i], *now, row_scores, s.max + i, s.sum + 16 * i, s.scale + i, s.curves + i, out, dim_tiles);
      } else if (list.regular && !s.rows[i].custom) {
        softmax_row<kLogits, true>(a, s.rows[i], *now, row_scores, s.max + i, s.sum + 16 * i, s.scale + i, s.curves + i, out, dim_tiles);
      } else {
        softmax_row<kAny>(a, s.rows[i], *now, row_scores, s.max + i, s.sum + 16 * i, s.scale + i, s.curves + i, out, dim_tiles);
      }
    }
    Job* free = before ? before : jobs + 2;
    before = now;
    now = after;
    after = free;
    have_now = have_after;
    have_after = have_now && list.next(after);
  }
}

}  // namespace
}  // namespace imbrex::cpu
