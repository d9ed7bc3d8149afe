// Panels of values of recurrent_amx.inl, which includes this.
//
// Vectors make what tiles multiply next and use what these have made, a block of tokens or channels behind or ahead, a piece behind each
// product: neither waits for the other, and tile operations do not follow each other closely.

namespace imbrex::cpu {
namespace {

inline void store_state(const float* state, int dim, TileScratch& c) {
  for (int i = 0; i < rounded_up(dim, 2 * kTile) / 2; ++i)
    for (int half = 0; half < kColumns; half += kLanes) {
      const float* const from = state + 2l * i * kColumns + half;
      const bool there = 2 * i < dim;
      PairProducts::store_pairs(c.state[i] + half, there ? load_floats(from, kLanes) : Floats{},
                                there ? load_floats(from + kColumns, kLanes) : Floats{});
    }
}

// Keys or queries of a block of tokens with the state.
template <bool of_keys, class Work>
[[gnu::always_inline]] inline void multiply_state(const RecurrentParams& p, int number, TileScratch& c, Work&& work) {
  const int t = number * kBlock, steps = rounded_up(p.dim_k, 2 * kTile) / (2 * kTile);
  const bool channels = has_channel_decays(p);
  const auto factors = [&](int part) {
    const u16* const rows = channels  ? (of_keys ? c.keys : c.queries)[part][t]
                            : of_keys ? reinterpret_cast<const u16*>(c.of_heads.k[t])
                                      : reinterpret_cast<const u16*>(c.of_heads.q[t]);
    return TileFactors{rows, rows + kTile * kKeyPitch, c.state[0]};
  };
  const TileFactors all[2] = {factors(channels ? 1 : 0), factors(0)};
  multiply_tiles(all, channels ? 2 : 1, kKeyPitch, kColumns, steps, (of_keys ? c.of_keys : c.of_queries)[number], work);
}

// T or P, of a block of tokens, with X or what tokens write.
template <class Work>
[[gnu::always_inline]] inline void multiply_tokens(const u16 (&weights)[2][kRecurrentChunk][kTokenRow], const TokenPairs (&right)[2],
                                                   int number, float* to, Work&& work) {
  const auto factors = [&](int of_weights, int of_right) {
    const u16* const rows = weights[of_weights][number * kBlock];
    return TileFactors{rows, rows + kTile * kTokenRow, right[of_right][0]};
  };
  const TileFactors all[3] = {factors(0, 1), factors(0, 0), factors(1, 0)};
  multiply_tiles(all, 3, kTokenRow, kColumns, number + 1, to, work);
}

// A panel's values and outputs: rows of bf16. Unless it is whole some columns, or some rows of the last block, are not there.
template <bool whole>
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
  __mmask16 mask(int t, int half) const { return whole ? __mmask16(~0) : t < count ? there[half] : __mmask16(0); }
  Floats value(int t, int half) const {
    const char* const at = values + t * values_stride + 2l * kLanes * half;
    const __m256i codes = whole ? _mm256_loadu_si256((const __m256i*)at) : _mm256_maskz_loadu_epi16(mask(t, half), at);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16);
  }
  void store(Floats x, int t, int half) const {
    char* const at = outputs + t * outputs_stride + 2l * kLanes * half;
    const __m256i codes = (__m256i)_mm512_cvtneps_pbh((__m512)x);
    whole ? _mm256_storeu_si256((__m256i*)at, codes) : _mm256_mask_storeu_epi16(at, mask(t, half), codes);
  }
};

// What two tokens write for the state.
template <bool delta>
[[gnu::always_inline]] inline void store_for_state(const ChunkWeights& w, Floats first, Floats second, int t, int half, TileScratch& c) {
  first *= w.written[t], second *= w.written[t + 1];
  if (delta) {
    PairProducts::store_pairs(c.written[0][t / 2] + half * kLanes, first, second);
  } else {
    store_token_pairs(first, second, c.written, kMostParts, t / 2, half * kLanes);
  }
}

// A panel, and what vectors make of it beside products: of blocks of tokens in pieces of two tokens and half of the panel's values.
template <bool delta, bool whole>
struct PanelWork {
  const RecurrentParams& p;
  const PanelRows<whole> rows;
  const ChunkWeights& w;
  TileScratch& c;
  const float skip;
  Floats nothing = {};  // stays zero while all is finite

  // Pieces of the rows of a block from `first` on: two rows, the first of which is `more` behind, and half of the panel's values. X, or
  // without the delta rule what tokens write.
  [[gnu::always_inline]] inline void make_x(int number, int first, int more, int half) {
    const float* const row = row_of(c.of_keys[number], first);
    const int t = number * kBlock + first;
    Floats x[2];
    for (int i = 0; i < 2; ++i) {
      x[i] = rows.value(t + more + i, half) * w.values[t + more + i];
      if (delta) x[i] -= of_row(row, more + i, half) * w.known[t + more + i];
    }
    delta ? store(c.x, x, t + more, half) : store_written(x, t + more, half);
  }
  // With the delta rule, what tokens write.
  [[gnu::always_inline]] inline void make_written(int number, int first, int more, int half) {
    const float* const row = row_of(c.of_keys[number], first);
    const Floats u[2] = {of_row(row, more, half), of_row(row, more + 1, half)};
    store_written(u, number * kBlock + first + more, half);
  }
  [[gnu::always_inline]] inline void make_outputs(int number, int first, int more, int half) {
    const float *const of_state = row_of(c.of_queries[number], first), *const of_tokens = row_of(c.of_written[number], first);
    for (int i = 0; i < 2; ++i) {
      const int t = number * kBlock + first + more + i;
      Floats y = of_row(of_state, more + i, half) * w.outputs[t];
      if (p.skip != nullptr) y += rows.value(t, half) * skip;
      rows.store(y + of_row(of_tokens, more + i, half), t, half);
    }
  }
  // A row of the state from a block of what is added.
  [[gnu::always_inline]] inline void update_row(float* state, int i, const float* row, int more) const {
    for (int half = 0; half < 2; ++half) {
      float* const at = state + long(i + more) * kColumns + half * kLanes;
      store_vector<kF32>(load_floats(at, kLanes) * w.decays[i + more] + of_row(row, more, half), kLanes, reinterpret_cast<char*>(at));
    }
  }
  bool all_finite() const { return _mm512_cmp_ps_mask((__m512)nothing, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0; }

 private:
  [[gnu::always_inline]] inline void store_written(const Floats (&u)[2], int t, int half) {
    store(c.u, u, t, half, true);
    store_for_state<delta>(w, u[0], u[1], t, half, c);
  }
  // Two numbers as a right operand of two parts.
  [[gnu::always_inline]] inline void store(TokenPairs (&to)[2], const Floats (&x)[2], int t, int half, bool checked = false) {
    const __m512i pairs = PairProducts::pairs_of(x[0], x[1]);
    const Floats first = (Floats)_mm512_slli_epi32(pairs, 16), second = (Floats)_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff));
    if (checked) nothing += first * 0.f, nothing += second * 0.f;
    _mm512_storeu_si512(to[0][t / 2] + half * kLanes, pairs);
    PairProducts::store_pairs(to[1][t / 2] + half * kLanes, x[0] - first, x[1] - second);
  }
};

// What tokens [t, t + kRows) write, and their outputs, one after the other: no product with a later token is made, so that what is no
// number there does not reach earlier ones.
void run_rows(const RecurrentParams& p, const ChunkPanel& panel, int t, const ChunkWeights& w, float (&u)[kRecurrentChunk][kColumns],
              const TileScratch& c) {
  const int there = panel.count - t < kRows ? panel.count - t : kRows, number = t / kBlock;
  const long size = element_size(p.type);
  const float skip = p.skip == nullptr ? 0.f : p.skip[panel.head];
  float given[kRows][kColumns], out[kRows][kColumns];
  load_values(p, panel, t, there, given);
  Sums x, y;
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < 2; ++i) {
      const Floats v = load_floats(given[r] + i * kLanes, kLanes);
      x.of[r][i] = v * w.values[t + r];
      if (p.delta) x.of[r][i] -= of_block(c.of_keys[number], t % kBlock + r, i) * w.known[t + r];
      y.of[r][i] = of_block(c.of_queries[number], t % kBlock + r, i) * w.outputs[t + r];
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
template <bool delta>
[[gnu::noinline, gnu::cold]] void run_all_rows(const RecurrentParams& p, const ChunkPanel& panel, const ChunkWeights& w, TileScratch& c) {
  float u[kRecurrentChunk][kColumns];
  const int rows = rounded_up(panel.count, kBlock);
  for (int number = 0; delta && number < rows / kBlock; ++number) multiply_state<true>(p, number, c, NoWork());
  for (int t = 0; t < rows; t += kRows) run_rows(p, panel, t, w, u, c);
  for (int t = 0; t < rows; t += 2)
    for (int i = 0; i < kColumns; i += kLanes)
      store_for_state<delta>(w, load_floats(u[t] + i, kLanes), load_floats(u[t + 1] + i, kLanes), t, i / kLanes, c);
}

template <bool delta, bool whole>
void run_panel(const RecurrentParams& p, const ChunkPanel& panel, const ChunkWeights& w, TileScratch& c) {
  const bool channels = has_channel_decays(p);
  const int blocks = rounded_up(panel.count, kBlock) / kBlock, last = blocks - 1, dim = rounded_up(p.dim_k, kRows);
  PanelWork<delta, whole> work{p, PanelRows<whole>(p, panel), w, c, p.skip == nullptr ? 0.f : p.skip[panel.head]};
  const auto x = [&](int number) {
    return [&work, number ](int i, int more) __attribute__((always_inline)) { work.make_x(number, i, more / 2 * 2, more % 2); };
  };
  const auto written = [&](int number) {
    return [&work, number ](int i, int more) __attribute__((always_inline)) { work.make_written(number, i, more / 2 * 2, more % 2); };
  };
  const auto outputs = [&](int number) {
    return [&work, number ](int i, int more) __attribute__((always_inline)) { work.make_outputs(number, i, more / 2 * 2, more % 2); };
  };
  store_state(panel.state, dim, c);
  if constexpr (delta) {
    multiply_state<true>(p, 0, c, NoWork());
    if (blocks > 1) {
      WorkBeside<2, decltype(x(0))> first{x(0)};
      multiply_state<true>(p, 1, c, first), first.end();
    }
    WorkBeside<2, decltype(x(0))> second{x(last)};
    multiply_state<false>(p, 0, c, second), second.end();
    multiply_tokens(c.t, c.x, 0, c.of_keys[0], NoWork());
    WorkBeside<2, decltype(written(0))> third{written(0)};
    if (blocks > 1) multiply_tokens(c.t, c.x, 1, c.of_keys[1], third);
    third.end();
    if (blocks > 1) {
      WorkBeside<2, decltype(written(0))> fourth{written(1)};
      multiply_state<false>(p, 1, c, fourth), fourth.end();
    }
  } else {
    for (int number = 0; number < blocks; ++number) {
      WorkBeside<2, decltype(x(0))> first{x(number)};
      multiply_state<false>(p, number, c, first), first.end();
    }
  }
  multiply_tokens(c.p, c.u, 0, c.of_written[0], NoWork());
  if (blocks > 1) {
    WorkBeside<2, decltype(outputs(0))> first{outputs(0)};
    multiply_tokens(c.p, c.u, 1, c.of_written[1], first), first.end();
  }
  const bool finite = work.all_finite();
  if (!finite) run_all_rows<delta>(p, panel, w, c);
  constexpr int kParts = delta ? 1 : kMostParts;
  const int keys = channels ? 2 : 1;
  TileFactors factors[2 * kParts];
  // The last block of outputs is read while the first one of channels is made.
  const auto block_of = [&](int i) { return c.of_written[(i / kBlock + blocks) % 2]; };
  const auto add_written = [&](int i, auto&& beside) __attribute__((always_inline)) {
    // Least products first.
    int count = 0;
    for (int of_keys = keys - 1; of_keys >= 0; --of_keys)
      for (int part = kParts - 1; part >= 0; --part)
        factors[count++] = {c.channels[of_keys][i], c.channels[of_keys][i + kTile], c.written[part][0]};
    multiply_tiles(factors, count, kTokenRow, kColumns, blocks, block_of(i), beside);
    beside.end();
  };
  WorkBeside<4, decltype(outputs(0))> first{outputs(last), finite ? kBlock : 0};
  add_written(0, first);
  for (int i = kBlock; i < dim; i += kBlock) {
    const float* const before = block_of(i - kBlock);
    const auto piece = [&](int r, int more) __attribute__((always_inline)) {
      work.update_row(panel.state, i - kBlock + r, row_of(before, r), more);
    };
    WorkBeside<4, decltype(piece)> beside{piece};
    add_written(i, beside);
  }
  const int done = (dim - 1) / kBlock * kBlock;
  for (int i = done; i < dim; ++i) work.update_row(panel.state, i, row_of(block_of(done), i - done), 0);
}
void run_panel(const RecurrentParams& p, const ChunkPanel& panel, TileScratch& c) {
  const ChunkWeights& w = has_channel_decays(p) ? c.of_channels.weights : c.of_heads.weights;
  const bool whole = panel.values == kColumns && panel.count % kBlock == 0;
  if (p.delta) return whole ? run_panel<true, true>(p, panel, w, c) : run_panel<true, false>(p, panel, w, c);
  whole ? run_panel<false, true>(p, panel, w, c) : run_panel<false, false>(p, panel, w, c);
}

}  // namespace
}  // namespace imbrex::cpu
