// Prompts of recurrent layers in chunks of kRecurrentChunk tokens, for every instruction set. Included after recurrent_weights.inl;
// docs/kernels/recurrent.md has the schedule and the times.
//
// Within a chunk nearly all is products of matrices. With f the decays of tokens, D[i][j] the product of those behind j up to i, E of all
// up to i, n the factors of norms, and A[i][j] = beta_i n_i n_j (k_i . k_j) D[i][j] below the diagonal, what tokens write is
//   U_i = X_i - sum over j < i of A[i][j] U_j,   X_i = beta_i (v_i - n_i E_i S^T k_i)
// and without the delta rule U_i = v_i. Then
//   out_i = scale n_i E_i S^T q_i + sum over j <= i of P[i][j] U_j,   P[i][j] = scale n_i n_j (q_i . k_j) D[i][j]
//   S = E_last S + sum over j of n_j D[last][j] k_j U_j^T
// Values are taken a panel of kColumns at a time, whose part of the state stays in the first-level cache for a chunk; products are made in
// tiles of kRows x kColumns sums in registers. A sum is one chain in the order of key channels or tokens, whatever is computed beside it.
// With gates of channels, decays are in keys and queries: what an earlier token has for a later one is the sum over channels c of k_i[c]
// k_j[c] D[i][j][c], E is of channels, and n is in the keys.

namespace imbrex::cpu {
namespace {

// A chunk for a panel of values, and its part of the state.
struct ChunkPanel {
  int begin, count, head, first, values;  // tokens, and the panel's values
  float* state;
};

// The values of a token, of a panel; whole rows of bf16 as vectors.
[[gnu::always_inline]] inline void load_value_row(const char* p, int type, int n, float* to) {
  if (type != kBf16 || n != kColumns) return load_row(p, element_size(type), type, n, to);
  for (int i = 0; i < kColumns; i += kLanes)
    store_vector<kF32>(load_vector<kBf16>(p + 2l * i, kLanes), kLanes, reinterpret_cast<char*>(to + i));
}
[[gnu::always_inline]] inline void store_value_row(char* p, int type, int n, const float* from) {
  if (type != kBf16 || n != kColumns) return store_row(p, element_size(type), type, n, from);
  for (int i = 0; i < kColumns; i += kLanes) store_vector<kBf16>(load_floats(from + i, kLanes), kLanes, p + 2l * i);
}
// Values of tokens [t, t + there) of the chunk, zeros behind them.
[[gnu::always_inline]] inline void load_values(const RecurrentParams& p, const ChunkPanel& panel, int t, int there,
                                               float (&to)[kRows][kColumns]) {
  const long size = element_size(p.type);
  for (int r = 0; r < kRows; ++r) {
    const int n = r < there ? panel.values : 0;
    if (n > 0) {
      const char* const v = p.v + (panel.begin + t + r) * p.v_token_stride + panel.head * p.v_head_stride + panel.first * size;
      load_value_row(v, p.type, n, to[r]);
    }
    for (int i = n; i < kColumns; ++i) to[r][i] = 0.f;
  }
}
// What kRows tokens write, of X less what all tokens in front of them have written.
[[gnu::always_inline]] inline void substitute(Sums& x, const ChunkWeights& w, int t) {
#pragma GCC unroll 8
  for (int j = 0; j < kRows - 1; ++j)
#pragma GCC unroll 8
    for (int r = j + 1; r < kRows; ++r) x.of[r][0] += x.of[j][0] * w.a[t + r][t + j], x.of[r][1] += x.of[j][1] * w.a[t + r][t + j];
}
// Adds what kRows tokens write to their outputs. No product with a later one is made: what is no number there does not reach earlier ones.
[[gnu::always_inline]] inline void add_own(Sums& y, const ChunkWeights& w, int t, const float (*u)[kColumns]) {
#pragma GCC unroll 8
  for (int j = 0; j < kRows; ++j) {
    const Floats first = load_floats(u[j], kLanes), second = load_floats(u[j] + kLanes, kLanes);
#pragma GCC unroll 8
    for (int r = j; r < kRows; ++r) y.of[r][0] += first * w.p[t + r][t + j], y.of[r][1] += second * w.p[t + r][t + j];
  }
}

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
    load_values(p, panel, t, there, given);
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
      substitute(x, w, t);
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
    add_own(y, w, t, c.u + t);
    store_sums(y, out[0]);
    for (int r = 0; r < there; ++r) {
      char* const to = p.out + (panel.begin + t + r) * p.out_token_stride + panel.head * p.out_head_stride + panel.first * size;
      store_value_row(to, p.type, panel.values, out[r]);
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
      for (int r = 0; r < kRows; ++r) s.of[r][0] *= w.decays[i + r], s.of[r][1] *= w.decays[i + r];
      add(s, i);
      store_sums(s, panel.state + long(i) * kColumns);
    }
  };
  if constexpr (Products::kNumbers == 1) {
    if (has_channel_decays(p)) {
      write([&](Sums& s, int i) { add_products<FloatProducts, kTokenPitch, 1, kColumns>(s, c.channels[i], c.u[0], rows); });
    } else {
      write([&](Sums& s, int i) { add_products<FloatProducts, 1, kKeyPitch, kColumns>(s, c.k[0] + i, c.u[0], rows); });
    }
  } else if (pairs) {
    write([&](Sums& s, int i) { add_products<Products, 1, kKeyPitch, kColumns>(s, c.token_pairs[0] + i, c.written[0], rows / 2); });
  } else {
    write([&](Sums& s, int i) { add_products<FloatProducts, 1, kKeyPitch, kColumns>(s, c.float_keys[0] + i, c.u[0], rows); });
  }
}

// The state of a value head between memory and panels.
template <bool load>
void move_states(const RecurrentParams& p, const RecurrentItem& item, int head, int v_begin, int v_end, float* states) {
  const RecurrentPlace place =
      load ? place_of(p, item.source, item.first_row, head, v_begin, v_end) : place_of(p, item.slot, 0, head, v_begin, v_end);
  const long size = element_size(p.state_type), panel = panel_floats(p);
  if (load)
    for (long i = 0; i < panel * panels_of(v_end - v_begin); ++i) states[i] = 0.f;
  if (load && item.fresh) return;
  if (p.state_type == kF32 && !p.k_first && place.n % kLanes == 0 && place.rows % kLanes == 0) {
    for (int r = 0; r < place.rows; r += kLanes)
      for (int k = 0; k < place.n; k += kLanes) {
        Floats block[kLanes];
        const auto in_row = [&](int i) { return reinterpret_cast<float*>(place.at + (r + i) * place.row_bytes) + k; };
        const auto in_panel = [&](int i) { return states + r / kColumns * panel + (k + i) * long(kColumns) + r % kColumns; };
        for (int i = 0; i < kLanes; ++i) block[i] = load_floats(load ? in_row(i) : in_panel(i), kLanes);
        transpose_lanes(block);
        for (int i = 0; i < kLanes; ++i) store_vector<kF32>(block[i], kLanes, reinterpret_cast<char*>(load ? in_panel(i) : in_row(i)));
      }
    return;
  }
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

// The scratch says which products are made.
template <class Scratch>
void run_recurrent_chunks(const RecurrentParams& p, const RecurrentItem& item, int head_begin, int head_end, int v_begin, int v_end,
                          char* scratch) {
  Scratch& c = *reinterpret_cast<Scratch*>(scratch);
  const int panels = panels_of(v_end - v_begin), end = item.begin + chunked_tokens(p.state_type, item);
  const long of_panel = panel_floats(p), of_head = panels * of_panel, size = element_size(p.type);
  for (int head = head_begin; head < head_end; ++head)
    move_states<true>(p, item, head, v_begin, v_end, c.states() + (head - head_begin) * of_head);
  for (int begin = item.begin; begin < end; begin += kRecurrentChunk) {
    const int count = end - begin < kRecurrentChunk ? end - begin : kRecurrentChunk;
    if (!has_channel_decays(p)) load_chunk(p, begin, count, head_begin / p.group, c);
    const int next = begin + kRecurrentChunk, ahead = end - next < kRecurrentChunk ? end - next : kRecurrentChunk;
    prefetch_rows(p.k + next * p.k_token_stride + head_begin / p.group * p.k_head_stride, p.k_token_stride, ahead, p.dim_k * size);
    prefetch_rows(p.q + next * p.q_token_stride + head_begin / p.group * p.q_head_stride, p.q_token_stride, ahead, p.dim_k * size);
    for (int head = head_begin; head < head_end; ++head) {
      prefetch_rows(p.v + begin * p.v_token_stride + head * p.v_head_stride + v_begin * size, p.v_token_stride, count,
                    (v_end - v_begin) * size);
      prefetch_rows(p.out + begin * p.out_token_stride + head * p.out_head_stride + v_begin * size, p.out_token_stride, count,
                    (v_end - v_begin) * size);
      if constexpr (Scratch::kChannelDecays) {
        has_channel_decays(p) ? make_channel_weights(p, begin, count, head, c) : make_weights(p, begin, count, head, c);
      } else {
        make_weights(p, begin, count, head, c);
      }
      for (int panel = 0; panel < panels; ++panel) {
        const int first = v_begin + panel * kColumns, values = v_end - first < kColumns ? v_end - first : kColumns;
        run_panel(p, {begin, count, head, first, values, c.states() + (head - head_begin) * of_head + panel * of_panel}, c);
      }
      if (p.finish) finish_outputs(p, begin, begin + count, head, head + 1);
    }
  }
  const RecurrentItem rest{end, item.end, item.slot, item.slot, 0, 0, false, false, nullptr};
  for (int head = head_begin; head < head_end; ++head) {
    move_states<false>(p, item, head, v_begin, v_end, c.states() + (head - head_begin) * of_head);
    for (int v = v_begin; v < v_end && end < item.end; v += kRecurrentValues)
      run_recurrent(p, rest, head, v, v_end - v < kRecurrentValues ? v_end : v + kRecurrentValues);
    // A head whose values are not one call's is whole here.
    if (p.finish && p.dim_v > kRecurrentValues) finish_outputs(p, end, item.end, head, head + 1);
  }
}

// The kernels of an instruction set whose chunks have these products.
template <class Products>
constexpr RecurrentKernels kernels_with(const char* isa, bool rounded) {
  return {isa,
          run_recurrent,
          run_narrow_recurrent,
          run_recurrent_chunks<ChunkScratch<Products>>,
          chunk_scratch_bytes<Products>,
          finish_outputs,
          rounded};
}

}  // namespace
}  // namespace imbrex::cpu
