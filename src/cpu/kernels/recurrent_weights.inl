// What of a chunk of tokens does not depend on values and states, for recurrent_chunks.inl, which has the formulas: keys, products of
// tokens with each other, decays. And the tiles that products are made of. Included after recurrent.inl.

namespace imbrex::cpu {
namespace {

constexpr int kRows = kLanes == 16 ? 8 : 4, kColumns = 2 * kLanes;
constexpr int kKeyPitch = kRecurrentDim + 32, kTokenPitch = kRecurrentChunk + 16;  // numbers of a row: lines of 64 bytes, not 2^n
constexpr int kTokenVectors = kRecurrentChunk / kLanes;

inline int rounded_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// The sums of a tile.
struct Sums {
  Floats of[kRows][2];
};

// Products of floats: a word is a number.
struct FloatProducts {
  typedef float Word;
  typedef Floats Vector;
  static constexpr int kNumbers = 1;  // of a word
  static Vector load(const Word* p) { return load_floats(p, kLanes); }
  static Vector all(Word x) { return x - Floats{}; }  // x + 0 would be an addition, for the sign of a zero
  static Floats add(Floats sum, Vector a, Vector b) { return sum + a * b; }
  // The words of a key of dim numbers, zeros from there to `end`.
  static void load_key(const char* p, int type, int dim, int end, Word* to) {
    load_row(p, element_size(type), type, dim, to);
    for (int i = dim; i < end; ++i) to[i] = 0.f;
  }
};

#ifdef __AVX512BF16__
// Products of bf16: a word is two numbers that are neighbours in the direction of the sum. Keys are taken as they are; floats are rounded.
struct PairProducts {
  typedef u32 Word;
  typedef __m512i Vector;
  static constexpr int kNumbers = 2;
  static Vector load(const Word* p) { return _mm512_loadu_si512(p); }
  static Vector all(Word x) { return _mm512_set1_epi32(int(x)); }
  static Floats add(Floats sum, Vector a, Vector b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
  static void load_key(const char* p, int, int dim, int end, Word* to) {
    for (int i = 0; i < end; i += 2 * kLanes) {  // rows of words are whole vectors
      const int there = dim - i;
      const u32 mask = there >= 2 * kLanes ? ~0u : there > 0 ? (1u << there) - 1 : 0u;
      _mm512_storeu_si512(to + i / 2, _mm512_maskz_loadu_epi16(mask, p + 2l * i));
    }
  }
  // Words of the rounded numbers of two vectors, the first one's in the lower halves.
  static Vector pairs_of(Floats first, Floats second) {
    const __m512i codes = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return _mm512_permutexvar_epi16(_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                                     4, 19, 3, 18, 2, 17, 1, 16, 0),
                                    codes);
  }
  static void store_pairs(Word* to, Floats first, Floats second) { _mm512_storeu_si512(to, pairs_of(first, second)); }
};
#endif

// Sums of a tile, of `steps` words each: row r has words from a + r kRowStride on, kStep apart, columns have rows of kPitch words from b
// on.
template <class Products, int kRowStride, int kStep, int kPitch>
[[gnu::always_inline]] inline void add_products(Sums& s, const typename Products::Word* a, const typename Products::Word* b, int steps) {
  for (int i = 0; i < steps; ++i) {
    const typename Products::Vector first = Products::load(b + long(i) * kPitch), second = Products::load(b + long(i) * kPitch + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const typename Products::Vector x = Products::all(a[long(r) * kRowStride + long(i) * kStep]);
      s.of[r][0] = Products::add(s.of[r][0], x, first);
      s.of[r][1] = Products::add(s.of[r][1], x, second);
    }
  }
}

[[gnu::always_inline]] inline void load_sums(Sums& s, const float* from) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    s.of[r][0] = load_floats(from + r * kColumns, kLanes), s.of[r][1] = load_floats(from + r * kColumns + kLanes, kLanes);
}
template <int kPitch = kColumns>
[[gnu::always_inline]] inline void store_sums(const Sums& s, float* to) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    store_vector<kF32>(s.of[r][0], kLanes, reinterpret_cast<char*>(to + r * kPitch));
    store_vector<kF32>(s.of[r][1], kLanes, reinterpret_cast<char*>(to + r * kPitch + kLanes));
  }
}

// What a chunk's tokens are to each other in a value head; rows behind the last token are zero.
struct ChunkWeights {
  float p[kRecurrentChunk][kTokenPitch], a[kRecurrentChunk][kTokenPitch];                                     // a: -A
  float known[kRecurrentChunk], values[kRecurrentChunk], outputs[kRecurrentChunk], written[kRecurrentChunk];  // factors of rows
  float decays[kRecurrentDim];                                                                                // E_last, by key channel
};

// What a worker has in memory, and behind it states: for each value head and panel rounded_up(dim_k, kRows) rows of kColumns floats.
template <class Products>
struct ChunkScratch {
  typedef typename Products::Word Word;
  static constexpr int kNumbers = Products::kNumbers;
  static constexpr bool kChannelDecays = kNumbers == 1;  // whether chunks may have decays of channels
  Word k[kRecurrentChunk][kKeyPitch / kNumbers], q[kRecurrentChunk][kKeyPitch / kNumbers];
  Word channels[kRecurrentDim / kNumbers][kTokenPitch];  // k, columns for rows
  // Of pairs alone: a panel of the state in pairs of key channels, and with the delta rule what tokens write and their keys in pairs of
  // tokens. Without it the state is made of floats, as exactly as token by token.
  Word state[kNumbers == 2 ? kRecurrentDim / 2 : 1][kColumns];
  Word written[kNumbers == 2 ? kRecurrentChunk / 2 : 1][kColumns], token_pairs[kNumbers == 2 ? kRecurrentChunk / 2 : 1][kKeyPitch];
  float float_keys[kNumbers == 2 ? kRecurrentChunk : 1][kKeyPitch];
  float kk[kRecurrentChunk][kTokenPitch], qk[kRecurrentChunk][kTokenPitch];
  float k_norms[kRecurrentChunk], q_norms[kRecurrentChunk];
  float u[kRecurrentChunk][kColumns];
  ChunkWeights weights;

  static long bytes() {
    constexpr long kLine = 64;
    return (long(sizeof(ChunkScratch)) + kLine - 1) / kLine * kLine;
  }
  float* states() { return reinterpret_cast<float*>(reinterpret_cast<char*>(this) + bytes()); }
};

inline int panels_of(int values) { return (values + kColumns - 1) / kColumns; }
inline long panel_floats(const RecurrentParams& p) { return long(rounded_up(p.dim_k, kRows)) * kColumns; }

template <class Products>
long chunk_scratch_bytes(int dim_k, int values, int heads) {
  return ChunkScratch<Products>::bytes() + long(heads) * panels_of(values) * rounded_up(dim_k, kRows) * kColumns * long(sizeof(float));
}

// Fetches rows of tokens to come: they lie a page or more apart.
inline void prefetch_rows(const char* p, long stride, int count, long bytes) {
  constexpr long kLine = 64;
  for (int t = 0; t < count; ++t)
    for (long i = 0; i < bytes; i += kLine) __builtin_prefetch(p + t * stride + i, 0, 2);
}

// Row t: the key and the query of a token, of which `there` numbers are read, zeros from there to `dim`.
template <class Products>
[[gnu::always_inline]] inline void load_key_and_query(const RecurrentParams& p, int token, int there, int dim, int key_head, int t,
                                                      ChunkScratch<Products>& c) {
  const char *const k = p.k + token * p.k_token_stride + key_head * p.k_head_stride, *const q = p.q + token * p.q_token_stride +
                                                                                                key_head * p.q_head_stride;
  Products::load_key(k, p.type, there, dim, c.k[t]);
  Products::load_key(q, p.type, there, dim, c.q[t]);
  float norms[2] = {1.f, 1.f};
  if (p.qk_norm && there > 0) {
    for (int i = 0; i < 2; ++i) {
      Floats row[kKeyVectors], squares = {};
      load_vectors(i == 0 ? k : q, p.type, p.dim_k, row);
      for (int v = 0; v * kLanes < p.dim_k; ++v) squares += row[v] * row[v];
      norms[i] = 1.f / __builtin_sqrtf(sum_of(squares) + 1e-6f);
    }
  }
  c.k_norms[t] = norms[0], c.q_norms[t] = norms[1] * p.scale;
}

// Keys and queries of a key head, and their products with keys up to their own.
template <class Products>
void load_chunk(const RecurrentParams& p, int begin, int count, int key_head, ChunkScratch<Products>& c) {
  const int rows = rounded_up(count, kRows), columns = rounded_up(count, kColumns), dim = rounded_up(p.dim_k, kRows),
            words = dim / Products::kNumbers;
  for (int t = 0; t < columns; ++t) {
    load_key_and_query(p, begin + t, t < count ? p.dim_k : 0, dim, key_head, t, c);  // nothing is read behind the last token
    for (int w = 0; w < words; ++w) c.channels[w][t] = c.k[t][w];
  }
  if constexpr (Products::kNumbers == 2) {
    for (int t = 0; t < rows && p.delta; t += 2) {
      const u16 *const first = reinterpret_cast<const u16*>(c.k[t]), *const second = reinterpret_cast<const u16*>(c.k[t + 1]);
      for (int i = 0; i < dim; ++i) c.token_pairs[t / 2][i] = first[i] | u32(second[i]) << 16;
    }
    for (int t = 0; t < rows && !p.delta; ++t) load_row(reinterpret_cast<const char*>(c.k[t]), 2, kBf16, dim, c.float_keys[t]);
  }
  constexpr int kPitch = kKeyPitch / Products::kNumbers;
  for (int t = 0; t < rows; t += kRows)
    for (int column = 0; column < t + kRows; column += kColumns) {
      Sums s = {};
      add_products<Products, kPitch, 1, kTokenPitch>(s, c.q[t], c.channels[0] + column, words);
      store_sums<kTokenPitch>(s, c.qk[t] + column);
      if (!p.delta) continue;
      s = {};
      add_products<Products, kPitch, 1, kTokenPitch>(s, c.k[t], c.channels[0] + column, words);
      store_sums<kTokenPitch>(s, c.kk[t] + column);
    }
}

// A number of a value head for each token, zeros behind the last one.
inline void load_tokens(const char* p, long stride, int type, int count, Floats (&to)[kTokenVectors]) {
  for (Floats& x : to) x = Floats{};
  if (p != nullptr) load_row(p, stride, type, count, reinterpret_cast<float*>(to));
}

template <class Products>
void make_weights(const RecurrentParams& p, int begin, int count, int head, ChunkScratch<Products>& c) {
  ChunkWeights& w = c.weights;
  Floats factors[kTokenVectors], steps[kTokenVectors], betas[kTokenVectors], index;
  Floats row[kTokenVectors] = {};  // what keys are multiplied by: their norms, and the decays behind them
  for (int i = 0; i < kLanes; ++i) index[i] = float(i);
  load_tokens(p.gate == nullptr ? nullptr : p.gate + begin * p.gate_token_stride + head * p.gate_head_stride, p.gate_token_stride,
              p.gate_type, count, factors);
  load_tokens(p.delta ? p.beta + begin * p.beta_token_stride + head * element_size(p.beta_type) : nullptr, p.beta_token_stride, p.beta_type,
              count, betas);
  const Floats bias = Floats{} + (p.gate_bias == nullptr ? 0.f : p.gate_bias[head * p.bias_stride]),
               rate = Floats{} + (p.rates == nullptr ? 0.f : p.rates[head * p.rates_stride]);
  for (int i = 0; i < kTokenVectors; ++i) {
    steps[i] = Floats{} + 1.f;
    Floats step = {};
    factors[i] = decay_factor(p, factors[i], bias, rate, step);
    if (p.scaled_values) steps[i] = step;
    betas[i] = p.delta ? (p.sigmoid_beta ? sigmoid_vector(betas[i]) : betas[i]) * p.beta_scale : Floats{} + 1.f;
  }
  float decay = 1.f;
  for (int t = 0; t < count; ++t) {
    const float factor = reinterpret_cast<const float*>(factors)[t], beta = reinterpret_cast<const float*>(betas)[t], k_norm = c.k_norms[t],
                q_norm = c.q_norms[t];
    decay *= factor;
    for (int i = 0; i <= t / kLanes; ++i) {
      const Floats own = Floats{} + float(t - i * kLanes);
      row[i] = chosen(index == own, Floats{} + k_norm, row[i] * factor);
      const Floats q = chosen(index <= own, load_floats(c.qk[t] + i * kLanes, kLanes) * row[i] * q_norm, Floats{});
      store_vector<kF32>(q, kLanes, reinterpret_cast<char*>(w.p[t] + i * kLanes));
      if (!p.delta) continue;
      const Floats k = chosen(index < own, load_floats(c.kk[t] + i * kLanes, kLanes) * row[i] * -(beta * k_norm), Floats{});
      store_vector<kF32>(k, kLanes, reinterpret_cast<char*>(w.a[t] + i * kLanes));
    }
    w.known[t] = beta * k_norm * decay;
    w.values[t] = beta * reinterpret_cast<const float*>(steps)[t];
    w.outputs[t] = q_norm * decay;
  }
  for (int t = count; t < rounded_up(count, kRows); ++t) {
    for (int i = 0; i < kRecurrentChunk; ++i) w.p[t][i] = w.a[t][i] = 0.f;
    w.known[t] = w.values[t] = w.outputs[t] = 0.f;
  }
  for (int i = 0; i < kTokenVectors; ++i) store_vector<kF32>(row[i], kLanes, reinterpret_cast<char*>(w.written + i * kLanes));
  for (int t = count; t < kRecurrentChunk; ++t) w.written[t] = 0.f;
  for (int i = 0; i < rounded_up(p.dim_k, kRows); ++i) w.decays[i] = decay;
}

// Whether decays are of key channels.
inline bool has_channel_decays(const RecurrentParams& p) { return p.channel_gate || p.channel_rates; }

// The same with decays of channels, kRows tokens at a time. Products with earlier tokens have what these decayed by up to the first of the
// tokens in one factor, and what is behind that in the other: all decays are products of numbers of at most 1, so none overflows, however
// strong a gate is. Products of the tokens among themselves are made one by one. c.k and c.q become keys and queries with what decayed
// since the chunk began, c.channels keys with what decays up to its end.
inline void make_channel_weights(const RecurrentParams& p, int begin, int count, int head, ChunkScratch<FloatProducts>& c) {
  ChunkWeights& w = c.weights;
  RecurrentToken tokens[kRows];
  float k[kRows][kKeyPitch], q[kRows][kKeyPitch];
  Floats total[kKeyVectors];  // decays since the chunk began
  const int rows = rounded_up(count, kRows), dim = rounded_up(p.dim_k, kRows), vectors = (p.dim_k + kLanes - 1) / kLanes;
  const auto store = [](Floats x, float* row, int i) { store_vector<kF32>(x, kLanes, reinterpret_cast<char*>(row + i * kLanes)); };
  for (int i = 0; i < vectors; ++i) total[i] = Floats{} + 1.f;
  for (int t = 0; t < rows; t += kRows) {
    for (int r = 0; r < kRows; ++r) {
      RecurrentToken& own = tokens[r];
      if (t + r < count) {
        load_token(p, begin + t + r, head, own);
      } else {
        for (int i = 0; i < vectors; ++i) own.q[i] = own.k[i] = Floats{}, own.factor[i] = Floats{} + 1.f;
        own.beta = own.step = 0.f;
      }
      w.known[t + r] = own.beta, w.values[t + r] = own.beta * own.step, w.outputs[t + r] = w.written[t + r] = 1.f;
    }
    for (int i = 0; i < vectors; ++i) {
      Floats decay = Floats{} + 1.f;
      for (int r = 0; r < kRows; ++r) {
        decay *= tokens[r].factor[i];
        const Floats of_k = tokens[r].k[i] * decay, of_q = tokens[r].q[i] * decay;
        store(of_k, k[r], i), store(of_q, q[r], i);
        store(of_k * total[i], c.k[t + r], i), store(of_q * total[i], c.q[t + r], i);
      }
      total[i] *= decay;
    }
    for (int column = 0; column < t; column += kColumns) {
      Sums s = {};
      add_products<FloatProducts, kKeyPitch, 1, kTokenPitch>(s, q[0], c.channels[0] + column, dim);
      store_sums<kTokenPitch>(s, w.p[t] + column);
      s = {};
      if (p.delta) add_products<FloatProducts, kKeyPitch, 1, kTokenPitch>(s, k[0], c.channels[0] + column, dim);
      for (int r = 0; r < kRows; ++r) s.of[r][0] *= -tokens[r].beta, s.of[r][1] *= -tokens[r].beta;
      store_sums<kTokenPitch>(s, w.a[t] + column);
    }
    for (int j = 0; j < kRows; ++j) {
      Floats key[kKeyVectors];
      for (int i = 0; i < vectors; ++i) key[i] = tokens[j].k[i];
      for (int r = 0; r < kRows; ++r) w.p[t + r][t + j] = w.a[t + r][t + j] = 0.f;
      for (int r = j; r < kRows; ++r) {
        Floats of_q = {}, of_k = {};
        for (int i = 0; i < vectors; ++i) {
          if (r > j) key[i] *= tokens[r].factor[i];
          of_q += tokens[r].q[i] * key[i], of_k += tokens[r].k[i] * key[i];
        }
        w.p[t + r][t + j] = sum_of(of_q);
        if (r > j) w.a[t + r][t + j] = -tokens[r].beta * sum_of(of_k);
      }
    }
    // Earlier keys decay by these tokens, which are added.
    for (int i = 0; i < vectors; ++i) {
      Floats decay = Floats{} + 1.f;
      for (int r = kRows - 1; r >= 0; --r) store(tokens[r].k[i] * decay, k[r], i), decay *= tokens[r].factor[i];
      for (int lane = 0; lane < kLanes && i * kLanes + lane < dim; ++lane) {
        float* const row = c.channels[i * kLanes + lane];
        for (int v = 0; v * kLanes < t; ++v) store(load_floats(row + v * kLanes, kLanes) * decay[lane], row, v);
        for (int r = 0; r < kRows; ++r) row[t + r] = k[r][i * kLanes + lane];
      }
    }
  }
  for (int i = 0; i < vectors; ++i) store(total[i], w.decays, i);
}

}  // namespace
}  // namespace imbrex::cpu
