// Prompts of recurrent layers whose heads have one decay, in chunks of kRecurrentChunk tokens, for every instruction set. Included after
// recurrent.inl; docs/kernels/recurrent.md has the schedule and the times.
//
// Within a chunk nearly all is products of matrices. With f the decays of tokens, D[i][j] the product of those behind j up to i, E of all
// up to i, n the factors of norms, and A[i][j] = beta_i n_i n_j (k_i . k_j) D[i][j] below the diagonal, what tokens write is
//   U_i = X_i - sum over j < i of A[i][j] U_j,   X_i = beta_i (v_i - n_i E_i S^T k_i)
// and without the delta rule U_i = v_i. Then
//   out_i = scale n_i E_i S^T q_i + sum over j <= i of P[i][j] U_j,   P[i][j] = scale n_i n_j (q_i . k_j) D[i][j]
//   S = E_last S + sum over j of n_j D[last][j] k_j U_j^T
// Values are taken a panel of kColumns at a time, whose part of the state stays in the first-level cache for a chunk; products are made in
// tiles of kRows x kColumns sums in registers. A sum is one chain in the order of key channels or tokens, whatever is computed beside it.

namespace imbrex::cpu {
namespace {

constexpr int kRows = kLanes == 16 ? 8 : 4, kColumns = 2 * kLanes;
constexpr int kKeyPitch = kRecurrentDim + 16, kTokenPitch = kRecurrentChunk + 16;  // numbers of a row; not of 2^n bytes
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
    u16* const numbers = reinterpret_cast<u16*>(to);
    __builtin_memcpy(numbers, p, 2ul * dim);
    for (int i = dim; i < end; ++i) numbers[i] = 0;
  }
  static __m512i codes(Floats x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
  static void store_pairs(Word* to, Floats first, Floats second) {
    _mm512_storeu_si512(to, _mm512_or_si512(codes(first), _mm512_slli_epi32(codes(second), 16)));
  }
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
  float decay;                                                                                                // E_last
};

// What a worker has in memory, and behind it states: for each value head and panel rounded_up(dim_k, kRows) rows of kColumns floats.
template <class Products>
struct ChunkScratch {
  typedef typename Products::Word Word;
  static constexpr int kNumbers = Products::kNumbers;
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

// Keys and queries of a key head, and their products with keys up to their own.
template <class Products>
void load_chunk(const RecurrentParams& p, int begin, int count, int key_head, ChunkScratch<Products>& c) {
  const int rows = rounded_up(count, kRows), columns = rounded_up(count, kColumns), dim = rounded_up(p.dim_k, kRows),
            words = dim / Products::kNumbers;
  for (int t = 0; t < columns; ++t) {
    const int token = begin + t, there = t < count ? p.dim_k : 0;  // nothing is read behind the last token
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
  Floats factors[kTokenVectors], steps[kTokenVectors], betas[kTokenVectors], index, row[kTokenVectors] = {};
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
    for (int i = 0; i <= t / kLanes; ++i) row[i] *= factor;
    reinterpret_cast<float*>(row)[t] = 1.f;
    for (int i = 0; i <= t / kLanes; ++i) {
      const Floats of_key = row[i] * load_floats(c.k_norms + i * kLanes, kLanes), own = Floats{} + float(t - i * kLanes);
      const Floats q = chosen(index <= own, load_floats(c.qk[t] + i * kLanes, kLanes) * of_key * q_norm, Floats{});
      store_vector<kF32>(q, kLanes, reinterpret_cast<char*>(w.p[t] + i * kLanes));
      if (!p.delta) continue;
      const Floats k = chosen(index < own, load_floats(c.kk[t] + i * kLanes, kLanes) * of_key * -(beta * k_norm), Floats{});
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
  for (int i = 0; i < kTokenVectors; ++i)
    store_vector<kF32>(row[i] * load_floats(c.k_norms + i * kLanes, kLanes), kLanes, reinterpret_cast<char*>(w.written + i * kLanes));
  for (int t = count; t < kRecurrentChunk; ++t) w.written[t] = 0.f;
  w.decay = decay;
}

// A chunk for a panel of values, and its part of the state.
struct ChunkPanel {
  int begin, count, head, first, values;  // tokens, and the panel's values
  float* state;
};
template <class Products>
void run_panel(const RecurrentParams& p, const ChunkPanel& panel, ChunkScratch<Products>& c) {
  typedef typename Products::Word Word;
  constexpr int kPitch = kKeyPitch / Products::kNumbers;
  const ChunkWeights& w = c.weights;
  const int rows = rounded_up(panel.count, kRows), dim = rounded_up(p.dim_k, kRows), words = dim / Products::kNumbers;
  const long size = element_size(p.type);
  const float skip = p.skip == nullptr ? 0.f : p.skip[panel.head];
  const Word* state;
  if constexpr (Products::kNumbers == 1) {
    state = panel.state;
  } else {
    for (int i = 0; i < words; ++i)
      for (int half = 0; half < kColumns; half += kLanes) {
        const float* const from = panel.state + 2l * i * kColumns + half;
        Products::store_pairs(c.state[i] + half, load_floats(from, kLanes), load_floats(from + kColumns, kLanes));
      }
    state = c.state[0];
  }
  for (int t = 0; t < rows; t += kRows) {
    const int there = panel.count - t < kRows ? panel.count - t : kRows;
    float given[kRows][kColumns], out[kRows][kColumns];
    for (int r = 0; r < kRows; ++r) {
      const int n = r < there ? panel.values : 0;
      if (n > 0) {
        const char* const v = p.v + (panel.begin + t + r) * p.v_token_stride + panel.head * p.v_head_stride + panel.first * size;
        load_row(v, size, p.type, n, given[r]);
      }
      for (int i = n; i < kColumns; ++i) given[r][i] = 0.f;
    }
    Sums x = {};
    if (p.delta) add_products<Products, kPitch, 1, kColumns>(x, c.k[t], state, words);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < 2; ++i) {
        const Floats v = load_floats(given[r] + i * kLanes, kLanes) * w.values[t + r];
        x.of[r][i] = p.delta ? v - x.of[r][i] * w.known[t + r] : v;
      }
    if (p.delta) {
      add_products<FloatProducts, kTokenPitch, 1, kColumns>(x, w.a[t], c.u[0], t);
#pragma GCC unroll 8
      for (int j = 0; j < kRows - 1; ++j)
#pragma GCC unroll 8
        for (int r = j + 1; r < kRows; ++r) x.of[r][0] += x.of[j][0] * w.a[t + r][t + j], x.of[r][1] += x.of[j][1] * w.a[t + r][t + j];
    }
    store_sums(x, c.u[t]);
    Sums y = {};
    add_products<Products, kPitch, 1, kColumns>(y, c.q[t], state, words);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < 2; ++i) {
        y.of[r][i] *= w.outputs[t + r];
        if (p.skip != nullptr) y.of[r][i] += load_floats(given[r] + i * kLanes, kLanes) * skip;
      }
    add_products<FloatProducts, kTokenPitch, 1, kColumns>(y, w.p[t], c.u[0], t);
    // Of the tile's own tokens no product with a later one is made: what is no number there does not reach earlier ones.
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) {
      const Floats first = load_floats(c.u[t + j], kLanes), second = load_floats(c.u[t + j] + kLanes, kLanes);
#pragma GCC unroll 8
      for (int r = j; r < kRows; ++r) y.of[r][0] += first * w.p[t + r][t + j], y.of[r][1] += second * w.p[t + r][t + j];
    }
    store_sums(y, out[0]);
    for (int r = 0; r < there; ++r) {
      char* const to = p.out + (panel.begin + t + r) * p.out_token_stride + panel.head * p.out_head_stride + panel.first * size;
      store_row(to, size, p.type, panel.values, out[r]);
    }
  }
  const auto written = [&](int t, int half) { return load_floats(c.u[t] + half, kLanes) * w.written[t]; };
  const bool pairs = Products::kNumbers == 2 && p.delta;
  if constexpr (Products::kNumbers == 2) {
    for (int t = 0; t < rows && pairs; t += 2)
      for (int half = 0; half < kColumns; half += kLanes)
        Products::store_pairs(c.written[t / 2] + half, written(t, half), written(t + 1, half));
  }
  for (int t = 0; t < rows && !pairs; ++t)
    for (int half = 0; half < kColumns; half += kLanes)
      store_vector<kF32>(written(t, half), kLanes, reinterpret_cast<char*>(c.u[t] + half));
  const auto write = [&](auto add) {
    for (int i = 0; i < dim; i += kRows) {
      Sums s;
      load_sums(s, panel.state + long(i) * kColumns);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) s.of[r][0] *= w.decay, s.of[r][1] *= w.decay;
      add(s, i);
      store_sums(s, panel.state + long(i) * kColumns);
    }
  };
  if constexpr (Products::kNumbers == 1) {
    write([&](Sums& s, int i) { add_products<FloatProducts, 1, kKeyPitch, kColumns>(s, c.k[0] + i, c.u[0], rows); });
  } else if (pairs) {
    write([&](Sums& s, int i) { add_products<Products, 1, kKeyPitch, kColumns>(s, c.token_pairs[0] + i, c.written[0], rows / 2); });
  } else {
    write([&](Sums& s, int i) { add_products<FloatProducts, 1, kKeyPitch, kColumns>(s, c.float_keys[0] + i, c.u[0], rows); });
  }
}

// The state of a value head between memory and panels.
template <bool load>
void move_states(const RecurrentParams& p, const RecurrentItem& item, int head, int v_begin, int v_end, float* states) {
  const RecurrentPlace place = place_of(p, item, load ? item.first_row : 0, head, v_begin, v_end);
  const long size = element_size(p.state_type), panel = panel_floats(p);
  if (load)
    for (long i = 0; i < panel * panels_of(v_end - v_begin); ++i) states[i] = 0.f;
  if (load && item.fresh) return;
  float row[kRecurrentDim];
  const auto move = [](float& in_row, float& in_panel) { load ? in_panel = in_row : in_row = in_panel; };
  for (int r = 0; r < place.rows; ++r) {
    char* const at = place.at + r * place.row_bytes;
    if (load) load_row(at, size, p.state_type, place.n, row);
    if (p.k_first) {
      for (int v = 0; v < place.n; ++v) move(row[v], states[v / kColumns * panel + long(r) * kColumns + v % kColumns]);
    } else {
      float* const column = states + r / kColumns * panel + r % kColumns;
      for (int k = 0; k < place.n; ++k) move(row[k], column[long(k) * kColumns]);
    }
    if (!load) store_row(at, size, p.state_type, place.n, row);
  }
}

template <class Products>
void run_recurrent_chunks(const RecurrentParams& p, const RecurrentItem& item, int head_begin, int head_end, int v_begin, int v_end,
                          char* scratch) {
  ChunkScratch<Products>& c = *reinterpret_cast<ChunkScratch<Products>*>(scratch);
  const int panels = panels_of(v_end - v_begin), end = item.begin + chunked_tokens(p.state_type, item);
  const long of_panel = panel_floats(p), of_head = panels * of_panel, size = element_size(p.type);
  for (int head = head_begin; head < head_end; ++head)
    move_states<true>(p, item, head, v_begin, v_end, c.states() + (head - head_begin) * of_head);
  for (int begin = item.begin; begin < end; begin += kRecurrentChunk) {
    const int count = end - begin < kRecurrentChunk ? end - begin : kRecurrentChunk;
    load_chunk(p, begin, count, head_begin / p.group, c);
    const int next = begin + kRecurrentChunk, ahead = end - next < kRecurrentChunk ? end - next : kRecurrentChunk;
    prefetch_rows(p.k + next * p.k_token_stride + head_begin / p.group * p.k_head_stride, p.k_token_stride, ahead, p.dim_k * size);
    prefetch_rows(p.q + next * p.q_token_stride + head_begin / p.group * p.q_head_stride, p.q_token_stride, ahead, p.dim_k * size);
    for (int head = head_begin; head < head_end; ++head) {
      prefetch_rows(p.v + begin * p.v_token_stride + head * p.v_head_stride + v_begin * size, p.v_token_stride, count,
                    (v_end - v_begin) * size);
      make_weights(p, begin, count, head, c);
      for (int panel = 0; panel < panels; ++panel) {
        const int first = v_begin + panel * kColumns, values = v_end - first < kColumns ? v_end - first : kColumns;
        run_panel(p, {begin, count, head, first, values, c.states() + (head - head_begin) * of_head + panel * of_panel}, c);
      }
    }
  }
  const RecurrentItem rest{end, item.end, item.slot, 0, 0, false};
  for (int head = head_begin; head < head_end; ++head) {
    move_states<false>(p, item, head, v_begin, v_end, c.states() + (head - head_begin) * of_head);
    for (int v = v_begin; v < v_end && end < item.end; v += kRecurrentValues)
      run_recurrent(p, rest, head, v, v_end - v < kRecurrentValues ? v_end : v + kRecurrentValues);
  }
}

}  // namespace
}  // namespace imbrex::cpu
