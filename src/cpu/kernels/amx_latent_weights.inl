// Weights of latents in tile products. Keys are left operands as they lie in memory, queries with interleaved pairs of dims are right ones:
// four tiles of scores at a time. Meanwhile the softmax of the four before runs, a part behind each tile operation.

namespace imbrex::cpu {
namespace {

struct LatentTiles {
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
};

// What is done while tiles are multiplied, in a step of about eight tile operations: a part of eight behind each, of at least as many
// operations as TILE_GAP has.
struct LatentNothing {
  template <int part>
  IMBREX_INLINE void run() {
    TILE_GAP();
  }
  void end() {}
};

struct LatentWeights {
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
        while (!softmax[i].done()) softmax[i].step<LatentTiles>();
        turning = softmax[i].weights();
      }
      count = 0;
    }
    void turn() {
      if (turning) turn_tile(turning);
      turning = nullptr;
    }
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
      softmax.template begin<LatentTiles>(top);
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
    while (at < end) step(LatentNothing{});
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
};

}  // namespace
}  // namespace imbrex::cpu
