// Attention to latents in tile products. Keys are left operands as they lie in memory, queries with interleaved pairs of dims are right
// ones: 32 keys x 32 rows at a time. While the scores of two tiles of rows are computed, the softmax of the two before runs, a few keys
// behind each four products; while outputs of 32 dims are, the values of the next 32 dims are interleaved.

namespace imbrex::cpu {
namespace {

struct LatentProducts {
  static constexpr bool kAnyPitch = true;

  static void enter() { tiles_shape(16); }
  static int fetch_steps(const LatentScratch& s) { return (s.num_tiles + 1) / 2 * kKeyChunks * (s.steps + s.v / 32); }

  static IMBREX_INLINE vi bf16_of(int type, const char* row, int d) {
    switch (type) {
      case kBf16: return load_bf16<kBf16>(row, d, d + 32);
      case kE4m3: return load_bf16<kE4m3>(row, d, d + 32);
      default: return load_bf16<kE5m2>(row, d, d + 32);
    }
  }

  // Of 32 keys, [16 pairs][16 rows], to a left operand.
  static IMBREX_INLINE void place_weights(char* tile) { turn_tile(tile); }

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

  // Outputs of a tile of rows are [v / 16] tiles.
  static const float* row_of(const LatentScratch& s, int i, float* row) {
    const float* from = s.out + i / kLatentRows * (long(kLatentRows) * s.v) + i % kLatentRows * 16;
    for (int d = 0; d < s.v; d += 16, from += 256) _mm512_store_ps(row + d, _mm512_load_ps(from));
    return row;
  }

  // Scores of a chunk of keys and one or two tiles of rows. `meanwhile` is called behind every step's products.
  template <bool two, class Meanwhile>
  static IMBREX_INLINE void score_keys(const LatentBlock& b, int c, const char* q, int steps, float* scores, const Meanwhile& meanwhile) {
    const char *k0 = b.group[2 * c], *k1 = b.group[2 * c + 1], *q1 = q + steps * 1024L;
    const long pitch0 = b.pitch[2 * c], pitch1 = b.pitch[2 * c + 1];
    TILE_FENCE();
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (two) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    for (int k = 0; k < steps; ++k) {
      TILE_LOAD_ROWS(4, k0 + k * 64, pitch0);
      if (two) {  // queries of many tiles, which would push the keys out of L1
        TILE_STREAM(6, q + k * 1024L);
      } else {
        TILE_LOAD(6, q + k * 1024L);
      }
      TILE_DOT(0, 4, 6);
      TILE_LOAD_ROWS(5, k1 + k * 64, pitch1);
      TILE_DOT(1, 5, 6);
      if (two) {
        TILE_STREAM(7, q1 + k * 1024L);
        TILE_DOT(2, 4, 7);
        TILE_DOT(3, 5, 7);
      }
      meanwhile();
    }
    TILE_STORE(0, scores);
    TILE_STORE(1, scores + 256);
    if (two) {
      TILE_STORE(2, scores + 512);
      TILE_STORE(3, scores + 768);
    }
    TILE_FENCE();
  }

  // Outputs of one or two tiles of rows and 32 dims. `values` are [chunk][2] tiles. `meanwhile` is called behind the products of each
  // chunk.
  template <bool two, class Meanwhile>
  static IMBREX_INLINE void add_values(const char* weights, const char* values, int chunks, float* out, long tile_floats,
                                       const Meanwhile& meanwhile) {
    TILE_FENCE();
    TILE_LOAD(0, out);
    TILE_LOAD(1, out + 256);
    if (two) {
      TILE_LOAD(2, out + tile_floats);
      TILE_LOAD(3, out + tile_floats + 256);
    }
    for (int c = 0; c < chunks; ++c) {
      TILE_LOAD(4, weights + c * 1024);
      TILE_LOAD(6, values + c * 2048);
      TILE_DOT(0, 4, 6);
      TILE_LOAD(7, values + c * 2048 + 1024);
      TILE_DOT(1, 4, 7);
      if (two) {
        TILE_LOAD(5, weights + (kKeyChunks + c) * 1024);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
      }
      meanwhile(c);
    }
    TILE_STORE(0, out);
    TILE_STORE(1, out + 256);
    if (two) {
      TILE_STORE(2, out + tile_floats);
      TILE_STORE(3, out + tile_floats + 256);
    }
    TILE_FENCE();
  }

  // Interleaves pairs of 32 keys and 32 dims: two right operands.
  static IMBREX_INLINE void pair_chunk(const char* const* rows, int d, char* to) {
    for (int j = 0; j < 32; j += 2, to += 64) {
      const Pairs pairs = pair_values(rows + j, d);
      _mm512_store_si512(to, pairs.first);
      _mm512_store_si512(to + 1024, pairs.second);
    }
  }

  static void attend(const AttentionParams&, const LatentScratch& s, const LatentBlock& b, LatentFetch& fetch) {
    const int chunks = b.chunk_end - b.chunk_begin;
    const long q_bytes = s.steps * 1024L, tile_floats = long(kLatentRows) * s.v;
    LatentSoftmax softmax[2];  // of the scores before: of one or two tiles
    const auto weigh_some = [&]() __attribute__((always_inline)) {
      LatentSoftmax& at = softmax[softmax[0].done()];
      if (!at.done()) at.step<LatentProducts>();
    };
    const auto meanwhile = [&]() __attribute__((always_inline)) {
      weigh_some();
      fetch.step();
    };
    float* scores = s.scores;
    for (int c = b.chunk_begin; c < b.chunk_end; ++c) {
      for (int t = 0; t < s.num_tiles; t += 2) {
        const int count = s.num_tiles - t > 1 ? 2 : 1;
        if (!tiles_see(s, t, count, b.kb + 32 * c, b.kb + 32 * c + 32)) {
          for (int i = 0; i < count; ++i) clear_weights(s, t + i, c);
          continue;
        }
        if (count == 2)
          score_keys<true>(b, c, s.q + t * q_bytes, s.steps, scores, meanwhile);
        else
          score_keys<false>(b, c, s.q + t * q_bytes, s.steps, scores, meanwhile);
        while (!softmax[0].done() || !softmax[1].done()) weigh_some();
        for (int i = 0; i < count; ++i) softmax[i].start(s, b, t + i, c, scores + 512 * i);
        scores = scores == s.scores ? s.scores + 1024 : s.scores;
      }
    }
    while (!softmax[0].done() || !softmax[1].done()) weigh_some();
    const auto values_of = [&](int d) { return s.values + d / 32 % 2 * (kKeyChunks * 2048L); };
    const char* const* const rows = b.rows + 32 * b.chunk_begin;
    for (int c = 0; c < chunks; ++c) pair_chunk(rows + 32 * c, 0, values_of(0) + c * 2048L);
    for (int d = 0; d < s.v; d += 32) {
      bool paired = d + 32 >= s.v;
      for (int t = 0; t < s.num_tiles; t += 2) {
        const int count = s.num_tiles - t > 1 ? 2 : 1;
        if (!tiles_see(s, t, count, b.kb + 32 * b.chunk_begin, b.kb + 32 * b.chunk_end)) continue;
        const auto pair_next = [&](int c) __attribute__((always_inline)) {
          if (!paired) pair_chunk(rows + 32 * c, d + 32, values_of(d + 32) + c * 2048L);
          fetch.step();
        };
        const char* const weights = s.weights + (long(t) * kKeyChunks + b.chunk_begin) * 1024;
        float* const out = s.out + t * tile_floats + d * 16L;
        if (count == 2)
          add_values<true>(weights, values_of(d), chunks, out, tile_floats, pair_next);
        else
          add_values<false>(weights, values_of(d), chunks, out, tile_floats, pair_next);
        paired = true;
      }
    }
  }
};

}  // namespace
}  // namespace imbrex::cpu
