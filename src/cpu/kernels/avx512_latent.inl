// Attention to latents in products of pairs of bf16 (VDPBF16PS). Scores: pairs of 16 keys are broadcast, each to be multiplied by the pairs
// of 16 rows. Outputs: pairs of values of 64 dims are multiplied by the pairs of probabilities of four rows, which are broadcast. Both have
// 16 chains of sums, and an operand of every product comes from L1, which is as fast as the products are.

namespace imbrex::cpu {
namespace {

struct LatentProducts {
  static constexpr bool kAnyPitch = false;  // keys are at constant distances, which need no registers
  static constexpr int kBlocks = 1;         // whose values are added at once

  static void enter() {}
  static int fetch_steps(const LatentScratch& s, int, bool) { return s.num_tiles * (kKeyGroups + s.v / 64 * 4); }
  static int fetch_every(const LatentScratch&) { return 64; }

  static IMBREX_INLINE vi bf16_of(int type, const char* row, int d) {
    if (type == kBf16) return _mm512_loadu_si512(row + 2L * d);
    const vi codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d)));
    return type == kE4m3 ? widened<kE4m3>(codes) : widened<kE5m2>(codes);
  }
  template <int type>
  static IMBREX_INLINE vi widened(vi codes) {
    const Bf16Tables<type> tables;
    const vi low = _mm512_permutex2var_epi8(tables.lower[0], codes, tables.lower[1]);
    const vi high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(tables.upper[0], codes, tables.upper[1]), codes,
                                              _mm512_set1_epi16(0x80), 0xf8);  // a | (b & c)
    return _mm512_or_si512(low, _mm512_slli_epi16(high, 8));
  }

  static void rescale(const LatentScratch& s, int t, vf factors) {
    alignas(64) float factor[kLatentRows];
    _mm512_store_ps(factor, factors);
    float* out = s.out + long(t) * kLatentRows * s.v;
    for (int r = 0; r < kLatentRows; ++r)
      for (const float* const end = out + s.v; out < end; out += 16)
        _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), _mm512_set1_ps(factor[r])));
  }

  static void rescale_weights(char* weights, vf factors) {
    for (int i = 0; i < 1024; i += 64) _mm512_store_si512(weights + i, rescaled_pairs(_mm512_load_si512(weights + i), factors));
  }

  static const float* row_of(const LatentScratch& s, int i, float*) { return s.out + long(i) * s.v; }

  // 16 keys for 16 rows.
  static void score_keys(const char* keys, const char* q, int steps, float* scores) {
    vf sums[16];
    IMBREX_UNROLL(16)
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
    for (const char* const end = q + steps * 1024L; q < end; q += 64, keys += 4) {
      const __m512bh pairs = (__m512bh)_mm512_load_si512(q);
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) {
        int key;
        __builtin_memcpy(&key, keys + i * kLatentPitch, 4);
        sums[i] = _mm512_dpbf16_ps(sums[i], pairs, (__m512bh)_mm512_set1_epi32(key));
      }
    }
    IMBREX_UNROLL(16)
    for (int i = 0; i < 16; ++i) _mm512_store_ps(scores + 16 * i, sums[i]);
  }

  // Four rows, 64 dims, `pairs` pairs of keys.
  static IMBREX_INLINE void add_values(const char* weights, const char* values, int pairs, long row_floats, float* out) {
    vf sums[4][4];
    IMBREX_UNROLL(4)
    for (int r = 0; r < 4; ++r) {
      IMBREX_UNROLL(4)
      for (int c = 0; c < 4; ++c) sums[r][c] = _mm512_load_ps(out + r * row_floats + 16 * c);
    }
    for (int p = 0; p < pairs; ++p, weights += 64, values += 256) {
      __m512bh v[4];
      IMBREX_UNROLL(4)
      for (int c = 0; c < 4; ++c) v[c] = (__m512bh)_mm512_load_si512(values + 64 * c);
      IMBREX_UNROLL(4)
      for (int r = 0; r < 4; ++r) {
        int weight;
        __builtin_memcpy(&weight, weights + 4 * r, 4);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(weight);
        IMBREX_UNROLL(4)
        for (int c = 0; c < 4; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], v[c], w);
      }
    }
    IMBREX_UNROLL(4)
    for (int r = 0; r < 4; ++r) {
      IMBREX_UNROLL(4)
      for (int c = 0; c < 4; ++c) _mm512_store_ps(out + r * row_floats + 16 * c, sums[r][c]);
    }
  }

  // Weights of the chunks from `begin` on.
  static void weigh(const LatentScratch& s, int begin, LatentFetch& fetch) {
    const LatentChunks& all = *s.chunks;
    for (int t = 0; t < s.num_tiles; ++t) {
      for (int c = begin; c < all.count; ++c) {
        const LatentChunk& chunk = all.chunk[c];
        if (!tiles_see(s, t, 1, chunk.key, chunk.key + 32)) {
          clear_weights(s, t, c);
          continue;
        }
        for (int g = 0; g < 2; ++g) {
          score_keys(chunk.group[g], s.q + long(t) * s.steps * 1024, s.steps, s.scores + 256 * g);
          fetch.step();
        }
        LatentSoftmax softmax;
        for (softmax.start(s, t, c, s.scores); !softmax.done();) softmax.step<LatentProducts>();
      }
    }
  }

  static void add_values(const LatentScratch& s, LatentFetch& fetch) {
    const LatentChunks& all = *s.chunks;
    for (int d = 0; d < s.v; d += 64) {
      char* to = s.values;
      for (int i = 0; i < all.count; ++i) {
        for (int j = 0; j < 32; j += 2, to += 256) {
          const char* const* const rows = all.chunk[i].rows + j;
          IMBREX_UNROLL(2)
          for (int c = 0; c < 2; ++c) {
            const long at = 2 * (d + 32 * c);
            const Pairs pairs = interleave(_mm512_loadu_si512(rows[0] + at), _mm512_loadu_si512(rows[1] + at));
            _mm512_store_si512(to + 128 * c, pairs.first);
            _mm512_store_si512(to + 128 * c + 64, pairs.second);
          }
        }
      }
      for (int t = 0; t < s.num_tiles; ++t) {
        if (!tiles_see_any(s, t, 1)) continue;
        float* const out = s.out + long(t) * kLatentRows * s.v;
        if (s.tiles[t].fresh) {
          for (long i = 0; i < long(kLatentRows) * s.v; i += 16) _mm512_store_ps(out + i, _mm512_setzero_ps());
          s.tiles[t].fresh = false;
        }
        const char* const weights = s.weights + long(t) * s.most_chunks * 1024;
        for (int r = 0; r < kLatentRows; r += 4) {
          add_values(weights + 4 * r, s.values, 16 * all.count, s.v, out + long(r) * s.v + d);
          fetch.step();
        }
      }
    }
  }
};

}  // namespace
}  // namespace imbrex::cpu
