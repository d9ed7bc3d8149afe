// Attention to latents in tile products. Keys are left operands as they lie in memory, queries with interleaved pairs of dims are right
// ones. While four tiles of scores are computed, the softmax of the four before runs; while outputs of some dims are, the values of the
// next dims are interleaved: a part of either behind each tile operation.

namespace imbrex::cpu {
namespace {

struct LatentProducts {
  static constexpr bool kAnyPitch = true;
  static constexpr int kBlocks = 2;  // whose values are added at once: outputs come from L2 and return there once for as many
  static constexpr int kParts = 8;   // of other work that is done meanwhile, in a step of scores and in one of values

  static void enter() { tiles_shape(16); }
  static int fetch_steps(const LatentScratch& s, int begin, bool last) {
    const int pairs = (s.num_tiles + 1) / 2, chunks = s.chunks->count;
    const int units = s.num_tiles == 1 ? (chunks - begin + 1) / 2 : pairs * (chunks - begin);
    return units * s.steps + (last ? chunks * (s.num_tiles == 1 ? s.v / 64 : pairs * (s.v / 32)) : 0);
  }

  static IMBREX_INLINE vi bf16_of(int type, const char* row, int d) {
    switch (type) {
      case kBf16: return load_bf16<kBf16>(row, d, d + 32);
      case kE4m3: return load_bf16<kE4m3>(row, d, d + 32);
      default: return load_bf16<kE5m2>(row, d, d + 32);
    }
  }

  static void rescale(const LatentScratch& s, int t, vf factors) {
    alignas(64) float factor[kLatentRows];
    _mm512_store_ps(factor, factors);
    float* out = s.out + long(t) * kLatentRows * s.v;
    for (int d = 0; d < s.v; d += 16)
      for (int r = 0; r < kLatentRows; ++r, out += 16) _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), _mm512_set1_ps(factor[r])));
  }

  static void rescale_weights(char* weights, vf factors) {
    alignas(64) float factor[kLatentRows];
    _mm512_store_ps(factor, factors);
    for (int r = 0; r < kLatentRows; ++r)
      _mm512_store_si512(weights + 64 * r, rescaled_pairs(_mm512_load_si512(weights + 64 * r), _mm512_set1_ps(factor[r])));
  }

  // Outputs of a tile of rows are [v / 16] tiles; dims of two neighbouring tiles take turns, four at a time.
  static const float* row_of(const LatentScratch& s, int i, float* row) {
    const float* from = s.out + i / kLatentRows * (long(kLatentRows) * s.v) + i % kLatentRows * 16;
    for (int d = 0; d < s.v; d += 32, from += 512) {
      const vf a = _mm512_load_ps(from), b = _mm512_load_ps(from + 256);
      const vf low = _mm512_shuffle_f32x4(a, b, 0x44), high = _mm512_shuffle_f32x4(a, b, 0xee);
      _mm512_store_ps(row + d, _mm512_shuffle_f32x4(low, low, 0xd8));
      _mm512_store_ps(row + d + 16, _mm512_shuffle_f32x4(high, high, 0xd8));
    }
    return row;
  }

  // The softmax of the scores that were computed last: of one or two chunks for a tile of rows, or of one chunk for two tiles. `turning`
  // are weights of 32 keys, [16 pairs][16 rows], that are still to become a left operand.
  struct Weighing {
    LatentSoftmax softmax[2];
    int count = 0;
    char* turning = nullptr;

    // What is left, but for the last turn.
    void finish() {
      for (int i = 0; i < count; ++i) {
        if (softmax[i].done()) continue;
        if (softmax[i].begins()) turn();
        while (!softmax[i].done()) softmax[i].step<LatentProducts>();
        turning = softmax[i].weights();
      }
      count = 0;
    }
    void turn() {
      if (turning) turn_tile(turning);
      turning = nullptr;
    }
  };

  // What is done meanwhile: a part behind each tile operation, of at least as many operations as TILE_GAP has.
  struct Nothing {
    template <int part>
    IMBREX_INLINE void run() {
      TILE_GAP();
    }
    void end() {}
  };
  struct Begin {
    Weighing& w;
    LatentSoftmax& softmax;
    char* const turning = w.turning;
    vf top = _mm512_set1_ps(-__builtin_inff());
    template <int part>
    IMBREX_INLINE void run() {
      if (turning) {
        vi r[4];
        char* const at = turning + (part < 4 ? part * 256 : (part - 4) * 64);
        constexpr long pitch = part < 4 ? 64 : 256;
        IMBREX_UNROLL(4)
        for (int i = 0; i < 4; ++i) r[i] = _mm512_load_si512(at + i * pitch);
        if (part < 4)
          transpose_within_lanes(r);
        else
          transpose_lanes(r[0], r[1], r[2], r[3]);
        IMBREX_UNROLL(4)
        for (int i = 0; i < 4; ++i) _mm512_store_si512(at + i * pitch, r[i]);
      } else {
        TILE_GAP();
      }
      if (softmax.whole()) top = _mm512_max_ps(top, softmax.top_of(part));
    }
    IMBREX_INLINE void end() {
      w.turning = nullptr;
      softmax.template begin<LatentProducts>(top);
    }
  };
  struct Weigh {
    LatentSoftmax::Keys& keys;
    vf p[4], first;
    template <int part>
    IMBREX_INLINE void run() {
      if constexpr (part % 2 == 0) p[part / 2] = keys.weight(part / 2);
      if constexpr (part == 3) {
        keys.keep(0, p[0], p[1]);
        first = _mm512_add_ps(p[0], p[1]);
      }
      if constexpr (part == 7) keys.keep(1, p[2], p[3]);
      if constexpr (part % 4 == 1) TILE_GAP();
    }
    IMBREX_INLINE void end() { keys.next(_mm512_add_ps(first, _mm512_add_ps(p[2], p[3]))); }
  };
  struct WeighSome {
    LatentSoftmax& softmax;
    template <int part>
    IMBREX_INLINE void run() {
      TILE_GAP();
    }
    void end() { softmax.weigh_some(); }
  };

  // A step of 32 dims: scores of 32 keys and two tiles of rows; of 64 keys or of 32 and one.
  template <int tiles, int chunks, class Work>
  static IMBREX_INLINE void score_step(const LatentChunk* c, const char* q, const char* q1, long at, Work&& work) {
    TILE_LOAD_ROWS(4, c[0].group[0] + at, c[0].pitch[0]);
    work.template run<0>();
    if (tiles == 2) {  // queries of many tiles, which would push the keys out of L1
      TILE_STREAM(6, q + at * 16);
    } else {
      TILE_LOAD(6, q + at * 16);
    }
    work.template run<1>();
    TILE_DOT(0, 4, 6);
    work.template run<2>();
    TILE_LOAD_ROWS(5, c[0].group[1] + at, c[0].pitch[1]);
    work.template run<3>();
    TILE_DOT(1, 5, 6);
    work.template run<4>();
    if (tiles == 2) {
      TILE_STREAM(7, q1 + at * 16);
      work.template run<5>();
      TILE_DOT(2, 4, 7);
      work.template run<6>();
      TILE_DOT(3, 5, 7);
      work.template run<7>();
    } else if (chunks == 2) {
      TILE_LOAD_ROWS(7, c[1].group[0] + at, c[1].pitch[0]);
      work.template run<5>();
      TILE_DOT(2, 7, 6);
      work.template run<6>();
      TILE_LOAD_ROWS(4, c[1].group[1] + at, c[1].pitch[1]);
      work.template run<7>();
      TILE_DOT(3, 4, 6);
      TILE_GAP();
    } else {
      work.template run<5>();
      work.template run<6>();
      work.template run<7>();
    }
    work.end();
  }

  template <int tiles, int chunks>
  static void score(const LatentScratch& s, const LatentChunk* c, int t, float* scores, Weighing& w, LatentFetch& fetch) {
    const char *const q = s.q + t * (s.steps * 1024L), *const q1 = q + s.steps * 1024L;
    TILE_FENCE();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    const long end = s.steps * 64L;
    long at = 0;
    const bool few = s.steps < 9 * w.count;  // steps, of keys of few dims: each is followed by another step of the softmax
    LatentFetch mine = fetch;                // in registers
    const auto step = [&](auto&& work) __attribute__((always_inline)) {
      score_step<tiles, chunks>(c, q, q1, at, work);
      at += 64;
      mine.step();
    };
    for (int i = 0; i < w.count; ++i) {
      LatentSoftmax& softmax = w.softmax[i];
      if (at == end) break;
      step(Begin{w, softmax});
      if (__builtin_expect(softmax.whole(), 1)) {
        LatentSoftmax::Keys keys = softmax.keys();
        while (at < end && !keys.done()) {
          step(Weigh{keys});
          if (few && !keys.done()) keys.weigh();
        }
        softmax.go_on(keys);
      } else {
        while (at < end && !softmax.done()) step(WeighSome{softmax});
      }
      if (softmax.done()) w.turning = softmax.weights();
    }
    while (at < end) step(Nothing{});
    fetch = mine;
    TILE_STORE(0, scores);
    TILE_GAP();
    TILE_STORE(1, scores + 256);
    if (tiles * chunks == 2) {
      TILE_GAP();
      TILE_STORE(2, scores + 512);
      TILE_GAP();
      TILE_STORE(3, scores + 768);
    }
    TILE_FENCE();
    w.finish();
    w.count = tiles * chunks;
    for (int i = 0; i < w.count; ++i)
      w.softmax[i].start(s, tiles == 2 ? t + i : t, int(c - s.chunks->chunk) + (chunks == 2 ? i : 0), scores + 512 * i);
  }

  // Weights of the chunks from `begin` on.
  static void weigh(const LatentScratch& s, int begin, LatentFetch& fetch) {
    const LatentChunks& all = *s.chunks;
    Weighing w;
    float* scores = s.scores;
    const auto sees = [&](int t, int count, int c) {
      if (tiles_see(s, t, count, all.chunk[c].key, all.chunk[c].key + 32)) return true;
      for (int i = 0; i < count; ++i) clear_weights(s, t + i, c);
      return false;
    };
    const auto others = [&] { return scores = scores == s.scores ? s.scores + 1024 : s.scores; };
    for (int c = begin; c < all.count; c += 2) {
      const int chunks = all.count - c > 1 ? 2 : 1;
      int t = 0;
      for (int i = 0; i < chunks; ++i)
        for (t = 0; t + 1 < s.num_tiles; t += 2)
          if (sees(t, 2, c + i)) score<2, 1>(s, all.chunk + c + i, t, others(), w, fetch);
      if (t == s.num_tiles) continue;
      const bool first = sees(t, 1, c), second = chunks == 2 && sees(t, 1, c + 1);
      if (first && second) {
        score<1, 2>(s, all.chunk + c, t, others(), w, fetch);
      } else if (first || second) {
        score<1, 1>(s, all.chunk + c + second, t, others(), w, fetch);
      }
    }
    w.finish();
    w.turn();
  }

  // Interleaves pairs of 32 keys and 32 dims: two right operands, whose pairs of dims are in the order of row_of().
  static IMBREX_INLINE void pair_rows(const char* const* rows, long at, char* tiles) {
    const vi a = _mm512_loadu_si512(rows[0] + at), b = _mm512_loadu_si512(rows[1] + at);
    _mm512_store_si512(tiles, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(tiles + 1024, _mm512_unpackhi_epi16(a, b));
  }
  // That for all chunks, [chunk][2] tiles, 16 pairs of rows each.
  struct Pairing {
    const LatentChunk* chunks;
    char* to;
    long at;        // bytes from a row's begin
    int next, end;  // pairs
    const char* const* rows() const { return chunks[next / 16u].rows + next % 16u * 2; }
    char* tiles() const { return to + next / 16u * 2048L + next % 16u * 64; }
    void finish() {
      for (; next < end; ++next) pair_rows(rows(), at, tiles());
    }
  };
  template <int each_step>
  struct PairSome {
    Pairing& pairing;
    const char* const* const rows = pairing.rows();
    char* const tiles = pairing.tiles();
    const long at = pairing.at;
    template <int part>
    IMBREX_INLINE void run() {
      if constexpr (each_step >= kParts) {
        constexpr int each = each_step / kParts;
        IMBREX_UNROLL(2)
        for (int i = 0; i < each; ++i) pair_rows(rows + 2 * (each * part + i), at, tiles + 64 * (each * part + i));
      } else if constexpr (part % (kParts / each_step) == 0) {
        constexpr int i = part / (kParts / each_step);
        pair_rows(rows + 2 * i, at, tiles + 64 * i);
      } else {
        TILE_GAP();
      }
    }
    IMBREX_INLINE void end() { pairing.next += each_step; }
  };

  // A step of 32 keys: outputs of one or two tiles of rows and 32 dims. Weights and outputs of many tiles would push the values out of L1.
  template <bool two, class Work>
  static IMBREX_INLINE void add_step(const char* weights, const char* weights1, const char* values, Work&& work) {
    TILE_STREAM(4, weights);
    work.template run<0>();
    TILE_LOAD(6, values);
    work.template run<1>();
    TILE_DOT(0, 4, 6);
    work.template run<2>();
    TILE_LOAD(7, values + 1024);
    work.template run<3>();
    TILE_DOT(1, 4, 7);
    work.template run<4>();
    if (two) TILE_STREAM(5, weights1);
    work.template run<5>();
    if (two) TILE_DOT(2, 5, 6);
    work.template run<6>();
    if (two) TILE_DOT(3, 5, 7);
    work.template run<7>();
    work.end();
  }

  template <bool two, int each_step>
  static void add_tiles(const LatentScratch& s, int t, int d, const char* values, Pairing& pairing, LatentFetch& fetch) {
    const long tile_floats = long(kLatentRows) * s.v, tile_weights = s.most_chunks * 1024L;
    float *const out = s.out + t * tile_floats + d * 16L, *const out1 = out + tile_floats;
    const char *const weights = s.weights + t * tile_weights, *const weights1 = weights + tile_weights;
    TILE_FENCE();
    if (s.tiles[t].fresh) {
      TILE_ZERO(0);
      TILE_ZERO(1);
    } else {
      TILE_STREAM(0, out);
      TILE_GAP();
      TILE_STREAM(1, out + 256);
      TILE_GAP();
    }
    if (two && s.tiles[t + 1].fresh) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    } else if (two) {
      TILE_STREAM(2, out1);
      TILE_GAP();
      TILE_STREAM(3, out1 + 256);
      TILE_GAP();
    }
    const int chunks = s.chunks->count;
    LatentFetch mine = fetch;  // in registers
    for (int c = 0; c < chunks; ++c) {
      if (pairing.end - pairing.next >= each_step)
        add_step<two>(weights + c * 1024L, weights1 + c * 1024L, values + c * 2048L, PairSome<each_step>{pairing});
      else
        add_step<two>(weights + c * 1024L, weights1 + c * 1024L, values + c * 2048L, Nothing{});
      mine.step();
    }
    fetch = mine;
    TILE_STORE(0, out);
    TILE_GAP();
    TILE_STORE(1, out + 256);
    if (two) {
      TILE_GAP();
      TILE_STORE(2, out1);
      TILE_GAP();
      TILE_STORE(3, out1 + 256);
    }
    TILE_FENCE();
  }

  // Interleaves the values of 32 keys and 64 dims, four right operands, for the step after the next one.
  struct PairAll {
    const char* const* rows;
    long at;
    char* tiles;
    template <int part>
    IMBREX_INLINE void run() {
      IMBREX_UNROLL(2)
      for (int i = 2 * part; i < 2 * part + 2; ++i) {
        pair_rows(rows + 2 * i, at, tiles + 64 * i);
        pair_rows(rows + 2 * i, at + 64, tiles + 2048 + 64 * i);
      }
    }
    void finish() {
      for (int i = 0; i < 16; ++i) {
        pair_rows(rows + 2 * i, at, tiles + 64 * i);
        pair_rows(rows + 2 * i, at + 64, tiles + 2048 + 64 * i);
      }
    }
  };

  // A step of 32 keys: outputs of one tile of rows and 64 dims.
  template <class Work>
  static IMBREX_INLINE void add_step_of_one(const char* weights, const char* values, Work&& work) {
    TILE_LOAD(4, weights);
    TILE_GAP();
    TILE_LOAD(6, values);
    work.template run<0>();
    TILE_DOT(0, 4, 6);
    work.template run<1>();
    TILE_LOAD(7, values + 1024);
    work.template run<2>();
    TILE_DOT(1, 4, 7);
    work.template run<3>();
    TILE_LOAD(5, values + 2048);
    work.template run<4>();
    TILE_DOT(2, 4, 5);
    work.template run<5>();
    TILE_LOAD(6, values + 3072);
    work.template run<6>();
    TILE_DOT(3, 4, 6);
    work.template run<7>();
  }

  // Outputs of one tile of rows. Each tile of values is used once, so that they are made in a ring of four steps: tile loads are not served
  // from the store buffer, so that a step's values are made two steps ahead.
  static void add_values_of_one(const LatentScratch& s, LatentFetch& fetch) {
    const LatentChunks& all = *s.chunks;
    constexpr int ahead = 2;
    struct Step {
      int chunk = 0;
      long d = 0;
    } next;
    int made = 0;
    const auto pairing = [&] {
      const PairAll work{all.chunk[next.chunk].rows, 2 * next.d, s.values + made % 4 * 4096L};
      ++made;
      if (++next.chunk == all.count) next = {0, next.d + 64};
      return work;
    };
    for (int i = 0; i < ahead && next.d < s.v; ++i) pairing().finish();
    int step = 0;
    for (long d = 0; d < s.v; d += 64) {
      float* const out = s.out + d * 16;
      TILE_FENCE();
      if (s.tiles->fresh) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
      } else {
        TILE_LOAD(0, out);
        TILE_GAP();
        TILE_LOAD(1, out + 256);
        TILE_GAP();
        TILE_LOAD(2, out + 512);
        TILE_GAP();
        TILE_LOAD(3, out + 768);
        TILE_GAP();
      }
      for (int c = 0; c < all.count; ++c, ++step) {
        const char *const weights = s.weights + c * 1024L, *const values = s.values + step % 4 * 4096L;
        if (next.d < s.v)
          add_step_of_one(weights, values, pairing());
        else
          add_step_of_one(weights, values, Nothing{});
        fetch.step();
      }
      TILE_STORE(0, out);
      TILE_GAP();
      TILE_STORE(1, out + 256);
      TILE_GAP();
      TILE_STORE(2, out + 512);
      TILE_GAP();
      TILE_STORE(3, out + 768);
      TILE_FENCE();
    }
    s.tiles->fresh = false;
  }

  // Outputs of pairs of tiles of rows, whose steps interleave `each_step` pairs of rows each.
  template <int each_step>
  static void add_values_of_pairs(const LatentScratch& s, LatentFetch& fetch) {
    const LatentChunks& all = *s.chunks;
    const auto values_of = [&](int d) { return s.values + d / 32 % 2 * (s.most_chunks * 2048L); };
    Pairing pairing{all.chunk, values_of(0), 0, 0, 16 * all.count};
    for (int d = 0; d < s.v; d += 32) {
      pairing.finish();
      const char* const values = values_of(d);
      pairing = {all.chunk, values_of(d + 32), 2L * (d + 32), 0, d + 32 < s.v ? 16 * all.count : 0};
      for (int t = 0; t < s.num_tiles; t += 2) {
        const int count = s.num_tiles - t > 1 ? 2 : 1;
        if (!tiles_see_any(s, t, count)) continue;
        if (count == 2)
          add_tiles<true, each_step>(s, t, d, values, pairing, fetch);
        else
          add_tiles<false, each_step>(s, t, d, values, pairing, fetch);
      }
    }
  }

  static void add_values(const LatentScratch& s, LatentFetch& fetch) {
    if (!tiles_see_any(s, 0, s.num_tiles)) return;
    if (s.num_tiles == 1) return add_values_of_one(s, fetch);
    const int pairs = (s.num_tiles + 1) / 2;
    if (pairs == 1)
      add_values_of_pairs<16>(s, fetch);
    else if (pairs < 4)
      add_values_of_pairs<8>(s, fetch);
    else
      add_values_of_pairs<4>(s, fetch);
    for (int t = 0; t < s.num_tiles; t += 2)
      if (const int count = s.num_tiles - t > 1 ? 2 : 1; tiles_see_any(s, t, count))
        for (int i = 0; i < count; ++i) s.tiles[t + i].fresh = false;
  }
};

}  // namespace
}  // namespace imbrex::cpu
