// The inner loop of AMX decode: what amx.inl runs for items of at most 16 rows.

namespace imbrex::cpu {
namespace {

// With so few rows a product costs rows instead of 16 cycles and memory decides. One pass over the keys: while the scores of
// a block are computed, the values of the block before are read too, tile by tile, which keeps two memory streams going. What has to be
// turned into tiles first (fp8, pages of 16) goes through a ring in L1, one key group and one dim tile ahead: tile loads cannot be
// served from the store buffer, so the stores must be done by then.
template <Logits kLogits>
void run_narrow(JobList& list) {
  const AttentionParams& a = list.a;
  const Scratch& s = list.s;
  const int steps = list.n.steps, dim_tiles = list.n.dim_tiles, num_rows = list.n.rows;
  float* const scores[2] = {s.scores, s.scores + kGroups * 256};
  const int turns = dim_tiles > kGroups ? dim_tiles : kGroups;
  const bool direct = s.stage[0].direct, fetch_codes = direct && a.k.type != kBf16;
  char *const key_ring = s.stage[0].keys, *const value_ring = s.stage[1].keys;  // which a direct stage does not use otherwise
  const char* keys[2];
  const char* values[2][kChunks];
  auto prepare_keys = [&](const Job& job, int g) {
    stage_part(a, list.item, list.kv_head, job.kb, list.keys, *job.stage, g);
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
    char *mine = (char*)scores[turn], *other = (char*)scores[turn ^ 1];
    for (int i = 0; i < turns; ++i) {
      for (int g = i * kGroups / turns; have_now && g < (i + 1) * kGroups / turns; ++g) {
        if (const int ahead = g + 1 + kFetchAhead; fetch_codes && (ahead < kGroups || have_after)) {
          fetch_keys(ahead < kGroups ? *now->tiles : *after->tiles, ahead % kGroups, steps);
        }
        if (g + 1 < kGroups) {
          prepare_keys(*now, g + 1);
        } else if (have_after) {
          prepare_keys(*after, 0);
        }
        if (g < 2 * now->c0 || g >= 2 * now->c1) continue;
        TILE_FENCE();
        TILE_ZERO(0);
        for (int k = 0; k < steps; ++k) {
          TILE_LOAD(5, s.q + k * 1024);
          TILE_STREAM(7, keys[g % 2] + k * 1024);
          TILE_DOT(0, 5, 7);
        }
        TILE_STORE(0, mine + g * 1024);
      }
      for (int t = i * dim_tiles / turns; t < (i + 1) * dim_tiles / turns; ++t) {
        if (const int ahead = t + 1 + kFetchAhead; fetch_codes && (ahead < dim_tiles ? before != nullptr : have_now)) {
          const Job& job = ahead < dim_tiles ? *before : *now;
          fetch_values(*job.tiles, ahead % dim_tiles, job.c0, job.c1);
        }
        if (t + 1 < dim_tiles) {
          if (before) prepare_values(*before, t + 1);
        } else if (have_now) {
          prepare_values(*now, 0);
        }
        if (!before) continue;
        TILE_FENCE();
        char* out = (char*)s.out + t * 1024;
        TILE_LOAD_OR_ZERO(2, out, before->fresh);
        for (int c = before->c0; c < before->c1; ++c) {
          TILE_LOAD(4, other + c * 2048);
          TILE_STREAM(6, values[t % 2][c]);
          TILE_DOT(2, 4, 6);
        }
        TILE_STORE(2, out);
      }
    }
    TILE_FENCE();
    if (!have_now) return;
    for (int r = 0; r < num_rows; ++r) {
      float *row_scores = (float*)mine + r * 16, *out = s.out + r * 16;
      if (now->full) {
        softmax_row<kLogits>(a, s.rows[r], *now, row_scores, s.max + r, s.sum + 16 * r, s.scale + r, s.curves + r, out, dim_tiles);
      } else if (list.regular) {
        softmax_row<kLogits, true>(a, s.rows[r], *now, row_scores, s.max + r, s.sum + 16 * r, s.scale + r, s.curves + r, out, dim_tiles);
      } else {
        softmax_row<kAny>(a, s.rows[r], *now, row_scores, s.max + r, s.sum + 16 * r, s.scale + r, s.curves + r, out, dim_tiles);
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
