// Panels of values of recurrent_amx.inl, which includes this.
//
// Vectors make what tiles multiply next and use what these have made, a block of tokens or channels behind or ahead, a piece behind each
// product: neither waits for the other, and tile operations do not follow each other closely.

namespace imbrex::cpu {
namespace {

// With the delta rule blocks have 16 tokens' keys and queries, or T and P T, one below the other; without it 32 tokens' queries, or P.
inline int tokens_of_block(bool delta) { return delta ? kTile : kBlock; }
inline int query_row(bool delta, int t) { return delta ? kTile + t % kTile : t % kBlock; }

inline void store_state(const float* state, int dim, TileScratch& c) {
  for (int i = 0; i < rounded_up(dim, 2 * kTile) / 2; ++i)
    for (int half = 0; half < kColumns; half += kLanes) {
      const float* const from = state + 2l * i * kColumns + half;
      const bool there = 2 * i < dim;
      PairProducts::store_pairs(c.state[i] + half, there ? load_floats(from, kLanes) : Floats{},
                                there ? load_floats(from + kColumns, kLanes) : Floats{});
    }
}

// Keys and queries of the block of tokens from `t` on with the state.
template <class Work>
[[gnu::always_inline]] inline void multiply_state(const RecurrentParams& p, int t, TileScratch& c, Work&& work) {
  const int steps = rounded_up(p.dim_k, 2 * kTile) / (2 * kTile);
  const bool channels = has_channel_decays(p);
  const auto factors = [&](int part) {
    const auto queries = [&](int row) { return channels ? c.queries[part][row] : reinterpret_cast<const u16*>(c.of_heads.q[row]); };
    const u16* const keys = channels ? c.keys[part][t] : reinterpret_cast<const u16*>(c.of_heads.k[t]);
    return p.delta ? TileFactors{keys, queries(t), c.state[0]} : TileFactors{queries(t), queries(t + kTile), c.state[0]};
  };
  const TileFactors all[2] = {factors(0), factors(channels ? 1 : 0)};
  multiply_tiles(all, channels ? 2 : 1, kKeyPitch, kColumns, steps, c.of_state[t / tokens_of_block(p.delta)], work);
}

// X with T and P T, or P.
template <class Work>
[[gnu::always_inline]] inline void multiply_tokens(const RecurrentParams& p, int t, TileScratch& c, Work&& work) {
  const auto part = [&](int number) {
    const u16* const own = c.p[number][t];
    return p.delta ? TileFactors{c.t[number][t], own, c.x[number][0]} : TileFactors{own, c.p[number][t + kTile], c.x[number][0]};
  };
  multiply_parts({part(0), part(1)}, kTokenRow, kColumns, t / kBlock + 1, c.of_tokens[t / tokens_of_block(p.delta) % 2], work);
}

// A panel's values and outputs: rows of bf16, of which some columns are there.
struct PanelRows {
  const char* values;
  char* outputs;
  long values_stride, outputs_stride;
  int count;
  __mmask16 there[2];

  PanelRows(const RecurrentParams& p, const ChunkPanel& panel)
      : values(p.v + panel.begin * p.v_token_stride + panel.head * p.v_head_stride + panel.first * 2l),
        outputs(p.out + panel.begin * p.out_token_stride + panel.head * p.out_head_stride + panel.first * 2l),
        values_stride(p.v_token_stride),
        outputs_stride(p.out_token_stride),
        count(panel.count),
        there{of(panel.values), of(panel.values - kLanes)} {}
  static __mmask16 of(int values) { return values >= kLanes ? __mmask16(~0) : values > 0 ? __mmask16((1u << values) - 1) : __mmask16(0); }
  Floats value(int t, int half) const {
    const __m256i codes = _mm256_maskz_loadu_epi16(t < count ? there[half] : __mmask16(0), values + t * values_stride + 2l * kLanes * half);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16);
  }
  void store(Floats x, int t, int half) const {
    _mm256_mask_storeu_epi16(outputs + t * outputs_stride + 2l * kLanes * half, t < count ? there[half] : __mmask16(0),
                             (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }
};

// What tokens write for the state, two of them.
inline void store_written(const RecurrentParams& p, const ChunkWeights& w, Floats first, Floats second, int t, int half, TileScratch& c) {
  first *= w.written[t], second *= w.written[t + 1];
  if (p.delta) {
    PairProducts::store_pairs(c.written[0][t / 2] + half * kLanes, first, second);
  } else {
    store_token_pairs(first, second, c.written, kMostParts, t / 2, half * kLanes);
  }
}

// A panel, and what vectors make of it beside products.
template <bool delta>
struct PanelWork {
  static constexpr int kPieces = delta ? kTile : kBlock;  // of a block of tokens: two tokens and half of the panel's values each
  const RecurrentParams& p;
  const PanelRows rows;
  const ChunkWeights& w;
  TileScratch& c;
  const float skip;
  Floats nothing = {};  // stays zero while all is finite

  // X as operands. Without the delta rule that is what tokens write.
  [[gnu::always_inline]] inline void make_x(int begin, int piece, int more) {
    const int t = begin + piece + more / 2 * 2, half = more % 2;
    const float* const block = c.of_state[begin / tokens_of_block(delta)];
    Floats x[2];
    for (int i = 0; i < 2; ++i) {
      x[i] = rows.value(t + i, half) * w.values[t + i];
      if (delta) x[i] -= of_block(block, (t + i) % kTile, half) * w.known[t + i];
    }
    if (!delta) store_written(p, w, x[0], x[1], t, half, c);
    const __m512i pairs = PairProducts::pairs_of(x[0], x[1]);
    const Floats first = (Floats)_mm512_slli_epi32(pairs, 16), second = (Floats)_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff));
    if (!delta) nothing += first * 0.f, nothing += second * 0.f;
    _mm512_storeu_si512(c.x[0][t / 2] + half * kLanes, pairs);
    PairProducts::store_pairs(c.x[1][t / 2] + half * kLanes, x[0] - first, x[1] - second);
  }
  // Outputs, and with the delta rule what tokens write.
  [[gnu::always_inline]] inline void make_outputs(int begin, int piece, int more) {
    const int number = begin / tokens_of_block(delta), t = begin + piece + more / 2 * 2, half = more % 2;
    const float *const of_state = c.of_state[number], *const of_tokens = c.of_tokens[number % 2];
    if (delta) {
      const Floats first = of_block(of_tokens, t % kTile, half), second = of_block(of_tokens, (t + 1) % kTile, half);
      nothing += first * 0.f, nothing += second * 0.f;
      store_written(p, w, first, second, t, half, c);
    }
    for (int i = 0; i < 2; ++i) {
      const int row = query_row(delta, t + i);
      Floats y = of_block(of_state, row, half) * w.outputs[t + i];
      if (p.skip != nullptr) y += rows.value(t + i, half) * skip;
      rows.store(y + of_block(of_tokens, row, half), t + i, half);
    }
  }
  // A row of the state from a block of what is added.
  [[gnu::always_inline]] inline void update_row(float* state, int i, const float* block) const {
    for (int half = 0; half < 2; ++half) {
      float* const at = state + long(i) * kColumns + half * kLanes;
      const Floats x = load_floats(at, kLanes) * w.decays[i] + of_block(block, i % kBlock, half);
      store_vector<kF32>(x, kLanes, reinterpret_cast<char*>(at));
    }
  }
  bool all_finite() const { return _mm512_cmp_ps_mask((__m512)nothing, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0; }
};

// What tokens [t, t + kRows) write, and their outputs, one after the other: no product with a later token is made, so that what is no
// number there does not reach earlier ones.
void run_rows(const RecurrentParams& p, const ChunkPanel& panel, int t, const ChunkWeights& w, float (&u)[kRecurrentChunk][kColumns],
              const TileScratch& c) {
  const int there = panel.count - t < kRows ? panel.count - t : kRows;
  const long size = element_size(p.type);
  const float* const block = c.of_state[t / tokens_of_block(p.delta)];
  const float skip = p.skip == nullptr ? 0.f : p.skip[panel.head];
  float given[kRows][kColumns], out[kRows][kColumns];
  load_values(p, panel, t, there, given);
  Sums x, y;
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < 2; ++i) {
      const Floats v = load_floats(given[r] + i * kLanes, kLanes);
      x.of[r][i] = v * w.values[t + r];
      if (p.delta) x.of[r][i] -= of_block(block, (t + r) % kTile, i) * w.known[t + r];
      y.of[r][i] = of_block(block, query_row(p.delta, t + r), i) * w.outputs[t + r];
      if (p.skip != nullptr) y.of[r][i] += v * skip;
    }
  if (p.delta) {
    add_products<FloatProducts, kTokenPitch, 1, kColumns>(x, w.a[t], u[0], t);
    substitute(x, w, t);
  }
  store_sums(x, u[t]);
  add_products<FloatProducts, kTokenPitch, 1, kColumns>(y, w.p[t], u[0], t);
  add_own(y, w, t, u + t);
  store_sums(y, out[0]);
  for (int r = 0; r < there; ++r) {
    char* const to = p.out + (panel.begin + t + r) * p.out_token_stride + panel.head * p.out_head_stride + panel.first * size;
    store_value_row(to, p.type, panel.values, out[r]);
  }
}
[[gnu::noinline, gnu::cold]] void run_all_rows(const RecurrentParams& p, const ChunkPanel& panel, const ChunkWeights& w, TileScratch& c) {
  float u[kRecurrentChunk][kColumns];
  const int rows = rounded_up(panel.count, kBlock);
  for (int t = 0; t < rows; t += kRows) run_rows(p, panel, t, w, u, c);
  for (int t = 0; t < rows; t += 2)
    for (int half = 0; half < 2; ++half)
      store_written(p, w, load_floats(u[t] + half * kLanes, kLanes), load_floats(u[t + 1] + half * kLanes, kLanes), t, half, c);
}

template <bool delta>
void run_panel(const RecurrentParams& p, const ChunkPanel& panel, const ChunkWeights& w, TileScratch& c) {
  const bool channels = has_channel_decays(p);
  const int rows = rounded_up(panel.count, kBlock), dim = rounded_up(p.dim_k, kRows), step = tokens_of_block(delta), last = rows - step;
  PanelWork<delta> work{p, PanelRows(p, panel), w, c, p.skip == nullptr ? 0.f : p.skip[panel.head]};
  constexpr int kPieces = PanelWork<delta>::kPieces;
  store_state(panel.state, dim, c);
  multiply_state(p, 0, c, NoWork());
  for (int t = step; t < rows; t += step) {
    const auto piece = [&](int i, int more) __attribute__((always_inline)) { work.make_x(t - step, i, more); };
    WorkBeside<delta ? 1 : 2, decltype(piece)> beside{piece, kPieces};
    multiply_state(p, t, c, beside);
    beside.end();
  }
  // The first product of tokens does not need the last ones where there are more than a step of products.
  const auto last_x = [&](int i, int more) __attribute__((always_inline)) { work.make_x(last, i, more); };
  WorkBeside<delta ? 2 : 4, decltype(last_x)> beside_first{last_x, kPieces};
  if (rows <= kBlock) beside_first.end();
  multiply_tokens(p, 0, c, beside_first);
  beside_first.end();
  for (int t = step; t < rows; t += step) {
    const auto piece = [&](int i, int more) __attribute__((always_inline)) { work.make_outputs(t - step, i, more); };
    WorkBeside<delta ? 2 : 4, decltype(piece)> beside{piece, kPieces};
    multiply_tokens(p, t, c, beside);
    beside.end();
  }
  for (int i = 0; i < kPieces; i += 2) work.make_outputs(last, i, 0), work.make_outputs(last, i, 1);
  if (!work.all_finite()) run_all_rows(p, panel, w, c);
  constexpr int kParts = delta ? 1 : kMostParts;
  const int keys = channels ? 2 : 1;
  TileFactors factors[2 * kParts];
  for (int i = 0; i < dim; i += kBlock) {
    // Least products first.
    int count = 0;
    for (int of_keys = keys - 1; of_keys >= 0; --of_keys)
      for (int part = kParts - 1; part >= 0; --part)
        factors[count++] = {c.channels[of_keys][i], c.channels[of_keys][i + kTile], c.written[part][0]};
    const float* const before = c.of_tokens[(i / kBlock + 1) % 2];
    const auto piece = [&](int r, int more) __attribute__((always_inline)) { work.update_row(panel.state, i - kBlock + r + more, before); };
    WorkBeside<4, decltype(piece)> beside{piece, i == 0 ? 0 : kBlock};
    multiply_tiles(factors, count, kTokenRow, kColumns, rows / kBlock, c.of_tokens[i / kBlock % 2], beside);
    beside.end();
  }
  const int done = (dim - 1) / kBlock * kBlock;
  for (int i = done; i < dim; ++i) work.update_row(panel.state, i, c.of_tokens[done / kBlock % 2]);
}
void run_panel(const RecurrentParams& p, const ChunkPanel& panel, TileScratch& c) {
  const ChunkWeights& w = has_channel_decays(p) ? c.of_channels.weights : c.of_heads.weights;
  p.delta ? run_panel<true>(p, panel, w, c) : run_panel<false>(p, panel, w, c);
}

}  // namespace
}  // namespace imbrex::cpu
