// Panels of values of recurrent_amx.inl, which includes this.
//
// Vectors make what tiles multiply next and use what these have made, a block of tokens or channels behind or ahead: neither waits for
// the other, as far as the core looks ahead.

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
inline void multiply_state(const RecurrentParams& p, int t, TileScratch& c) {
  const int steps = rounded_up(p.dim_k, 2 * kTile) / (2 * kTile);
  const bool channels = has_channel_decays(p);
  const auto factors = [&](int part) {
    const auto queries = [&](int row) { return channels ? c.queries[part][row] : reinterpret_cast<const u16*>(c.of_heads.q[row]); };
    const u16* const keys = channels ? c.keys[part][t] : reinterpret_cast<const u16*>(c.of_heads.k[t]);
    return p.delta ? TileFactors{keys, queries(t), c.state[0]} : TileFactors{queries(t), queries(t + kTile), c.state[0]};
  };
  const TileFactors all[2] = {factors(0), factors(channels ? 1 : 0)};
  multiply_tiles(all, channels ? 2 : 1, kKeyPitch, kColumns, steps, c.of_state[t / tokens_of_block(p.delta)]);
}

// X with T and P T, or P.
inline void multiply_tokens(const RecurrentParams& p, int t, TileScratch& c) {
  const auto factors = [&](int of_weights, int of_x) {
    const u16* const own = c.p[of_weights][t];
    return p.delta ? TileFactors{c.t[of_weights][t], own, c.x[of_x][0]} : TileFactors{own, c.p[of_weights][t + kTile], c.x[of_x][0]};
  };
  const TileFactors all[3] = {factors(1, 0), factors(0, 1), factors(0, 0)};
  const int steps = t / kBlock + 1;
  multiply_tiles(all, 3, kTokenRow, kColumns, steps, c.of_tokens[t / tokens_of_block(p.delta) % 2]);
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

// X of a block of tokens as operands. Without the delta rule that is what they write: `nothing` stays zero while all is finite.
template <bool delta>
inline void make_x(const RecurrentParams& p, const PanelRows& panel, const ChunkWeights& w, int begin, Floats& nothing, TileScratch& c) {
  const float* const block = c.of_state[begin / tokens_of_block(delta)];
  for (int t = begin; t < begin + tokens_of_block(delta); t += 2) {
    c.ahead.fetch_values(p, t), c.ahead.fetch_values(p, t + 1);
    for (int half = 0; half < 2; ++half) {
      Floats x[2];
      for (int i = 0; i < 2; ++i) {
        x[i] = panel.value(t + i, half) * w.values[t + i];
        if (delta) x[i] -= of_block(block, (t + i) % kTile, half) * w.known[t + i];
      }
      if (!delta) store_written(p, w, x[0], x[1], t, half, c);
      const __m512i pairs = PairProducts::pairs_of(x[0], x[1]);
      const Floats first = (Floats)_mm512_slli_epi32(pairs, 16), second = (Floats)_mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff));
      if (!delta) nothing += first * 0.f, nothing += second * 0.f;
      _mm512_storeu_si512(c.x[0][t / 2] + half * kLanes, pairs);
      PairProducts::store_pairs(c.x[1][t / 2] + half * kLanes, x[0] - first, x[1] - second);
    }
  }
}

// Outputs of a block of tokens, and with the delta rule what they write: `nothing` stays zero while that is finite.
template <bool delta>
inline void make_outputs(const RecurrentParams& p, const PanelRows& panel, const ChunkWeights& w, int begin, float skip, Floats& nothing,
                         TileScratch& c) {
  const int number = begin / tokens_of_block(delta);
  const float *const of_state = c.of_state[number], *const of_tokens = c.of_tokens[number % 2];
  for (int t = begin; t < begin + tokens_of_block(delta); t += 2) {
    c.ahead.fetch_outputs(p, t), c.ahead.fetch_outputs(p, t + 1);
    for (int half = 0; half < 2; ++half) {
      if (delta) {
        const Floats first = of_block(of_tokens, t % kTile, half), second = of_block(of_tokens, (t + 1) % kTile, half);
        nothing += first * 0.f, nothing += second * 0.f;
        store_written(p, w, first, second, t, half, c);
      }
      for (int i = 0; i < 2; ++i) {
        const int row = query_row(delta, t + i);
        Floats y = of_block(of_state, row, half) * w.outputs[t + i];
        if (p.skip != nullptr) y += panel.value(t + i, half) * skip;
        panel.store(y + of_block(of_tokens, row, half), t + i, half);
      }
    }
  }
}

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
  const int rows = rounded_up(panel.count, kBlock), dim = rounded_up(p.dim_k, kRows), block_tokens = tokens_of_block(delta);
  const float skip = p.skip == nullptr ? 0.f : p.skip[panel.head];
  const PanelRows in_memory(p, panel);
  Floats nothing = {};
  store_state(panel.state, dim, c);
  for (int t = 0; t <= rows; t += block_tokens) {
    if (t < rows) multiply_state(p, t, c);
    if (t > 0) make_x<delta>(p, in_memory, w, t - block_tokens, nothing, c);
  }
  for (int t = 0; t <= rows; t += block_tokens) {
    if (t < rows) multiply_tokens(p, t, c);
    if (t > 0) make_outputs<delta>(p, in_memory, w, t - block_tokens, skip, nothing, c);
  }
  if (_mm512_cmp_ps_mask((__m512)nothing, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0) run_all_rows(p, panel, w, c);
  constexpr int kParts = delta ? 1 : kMostParts;
  TileFactors factors[2 * kParts];
  for (int i = 0; i < dim + kBlock; i += kBlock) {
    const int number = i / kBlock;
    if (i < dim) {
      // Least products first.
      int count = 0;
      for (int of_keys = channels ? 1 : 0; of_keys >= 0; --of_keys)
        for (int part = kParts - 1; part >= 0; --part)
          factors[count++] = {c.channels[of_keys][i], c.channels[of_keys][i + kTile], c.written[part][0]};
      multiply_tiles(factors, count, kTokenRow, kColumns, rows / kBlock, c.of_tokens[number % 2]);
    }
    if (i == 0) continue;
    const int first = i - kBlock, there = dim - first < kBlock ? dim - first : kBlock;
    const float* const block = c.of_tokens[(number + 1) % 2];
    for (int r = 0; r < there; ++r)
      for (int half = 0; half < 2; ++half) {
        float* const at = panel.state + long(first + r) * kColumns + half * kLanes;
        store_vector<kF32>(load_floats(at, kLanes) * w.decays[first + r] + of_block(block, r, half), kLanes, reinterpret_cast<char*>(at));
      }
  }
}
void run_panel(const RecurrentParams& p, const ChunkPanel& panel, TileScratch& c) {
  const ChunkWeights& w = has_channel_decays(p) ? c.of_channels.weights : c.of_heads.weights;
  p.delta ? run_panel<true>(p, panel, w, c) : run_panel<false>(p, panel, w, c);
}

}  // namespace
}  // namespace imbrex::cpu
