// Heads with values of one dimension and without the delta rule (Mamba1), token by token. Vectors are along heads: a state's numbers of
// kLanes heads are transposed where they come from memory and where they go back, so that a token's keys and queries are the same for all
// lanes, and outputs take no sums of lanes. Included after recurrent.inl.

namespace imbrex::cpu {
namespace {

// What a state is multiplied by: 2^(coefficient times a number of the head), or the product of the two, or of a sigmoid.
enum NarrowDecay : int { kPowerDecay, kProductDecay, kSigmoidDecay };

constexpr int kNarrowTokens = 8;  // of a group of heads, or groups of a token, that are at work together
constexpr int kFetched = 4;       // groups of heads behind the one that is loaded, whose states are fetched

// 2^x of several vectors, or e^x, for x <= 0, to a unit in the last place or two: 2^n times a polynomial in what n leaves of the exponent.
// 0 below the normal numbers; not for NaN. An operation is written for all vectors before the next one: a core looks only so far ahead.
template <bool natural, int count>
inline void exponentials(Floats (&x)[count]) {
  const Floats magic = Floats{} + 0x1.8p23f, least_exponent = Floats{} - (natural ? 87.3f : 126.f);
  constexpr float kFirst = 0x1.44138ap-13f,
                  kPolynomial[] = {0x1.5f089p-10f, 0x1.3b2a54p-7f, 0x1.c6af6cp-5f, 0x1.ebfbep-3f, 0x1.62e43p-1f, 1.f};
  Floats n[count], sum[count], r[count];
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) n[i] = natural ? x[i] * kLog2e + magic : x[i] + magic;
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    const Floats whole = n[i] - magic;
    r[i] = natural ? ((x[i] - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f) * kLog2e : x[i] - whole;  // ln 2 in two parts
    sum[i] = Floats{} + kFirst;
  }
#pragma GCC unroll 8
  for (const float c : kPolynomial)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) sum[i] = sum[i] * r[i] + c;
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) x[i] = chosen(x[i] < least_exponent, Floats{}, (Floats)((Words)sum[i] + ((Words)n[i] << 23)));
}

// softplus_vector() of several vectors.
template <int count>
inline void softplus_vectors(Floats (&x)[count]) {
  constexpr int kLast = 17;  // power of the series
  Floats z[count], squared[count], sum[count];
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) z[i] = -(Floats)((Words)x[i] & 0x7fffffffu), sum[i] = Floats{} + 1.f / float(kLast);
  exponentials<true>(z);
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) z[i] = z[i] / (z[i] + 2.f), squared[i] = z[i] * z[i];
#pragma GCC unroll 8
  for (int power = kLast - 2; power > 0; power -= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) sum[i] = sum[i] * squared[i] + 1.f / float(power);
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) x[i] = chosen(x[i] != x[i], x[i], greatest(x[i], Floats{}) + sum[i] * z[i] * 2.f);
}

// Halves of the rows of a matrix of kLanes vectors are interleaved.
[[gnu::always_inline]] inline void interleave_rows(const Floats (&from)[kLanes], Floats (&to)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes / 2; ++i) {
    const Floats a = from[i], b = from[i + kLanes / 2];
#if defined(__AVX512F__)
    to[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    to[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
    to[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    to[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    to[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    to[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
  }
}
// Until each row is a column.
template <int size = 1>
[[gnu::always_inline]] inline void transpose_lanes(Floats (&rows)[kLanes]) {
  if constexpr (size < kLanes) {
    Floats other[kLanes];
    interleave_rows(rows, other);
    transpose_lanes<2 * size>(other);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = other[i];
  }
}

// n numbers, `stride` bytes apart.
inline Floats load_heads(const char* p, long stride, int type, int n) {
  if (stride == element_size(type)) {
    switch (type) {
      case kF32: return load_vector<kF32>(p, n);
      case kBf16: return load_vector<kBf16>(p, n);
      case kF16: return load_vector<kF16>(p, n);
      default: break;
    }
  }
  Floats x = {};
  for (int i = 0; i < n; ++i) x[i] = load_element(p + i * stride, type);
  return x;
}
inline void store_heads(Floats x, char* p, long stride, int type, int n) {
  if (stride == element_size(type)) {
    switch (type) {
      case kF32: return store_vector<kF32>(x, n, p);
      case kBf16: return store_vector<kBf16>(x, n, p);
      case kF16: return store_vector<kF16>(x, n, p);
      default: break;
    }
  }
  for (int i = 0; i < n; ++i) store_element(p + i * stride, type, x[i]);
}

// A group of up to kLanes heads.
struct NarrowGroup {
  int number;  // of the call
  int head, count;
  int key_head;  // of the first one
  bool shared;   // by all of them
};

// A group's states between memory and vectors along heads, kLanes numbers of each head at a time. `whole`: all heads and numbers are there.
template <int type, bool whole>
inline void load_square(const char* from, long stride, int count, int n, Floats* to) {
  Floats rows[kLanes];
  if constexpr (whole) {
#pragma GCC unroll 16
    for (int h = 0; h < kLanes; ++h) __builtin_prefetch(from + (h + kFetched * kLanes) * stride);
  }
#pragma GCC unroll 16
  for (int h = 0; h < kLanes; ++h) rows[h] = whole || h < count ? load_vector<type>(from + h * stride, whole ? kLanes : n) : Floats{};
  transpose_lanes(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (whole || i < n) to[i] = rows[i];
}
template <int type, bool whole>
inline void store_square(const Floats* from, char* to, long stride, int count, int n) {
  Floats rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = whole || i < n ? from[i] : Floats{};
  transpose_lanes(rows);
#pragma GCC unroll 16
  for (int h = 0; h < kLanes; ++h)
    if (whole || h < count) store_vector<type>(rows[h], whole ? kLanes : n, to + h * stride);
}
template <int type>
[[gnu::noinline]] void load_group(const char* from, long stride, int count, int dim, Floats* to) {
  for (int first = 0; first < dim; first += kLanes) {
    const char* const at = from + first * element_size(type);
    if (count == kLanes && first + kLanes <= dim) {
      load_square<type, true>(at, stride, kLanes, kLanes, to + first);
    } else {
      load_square<type, false>(at, stride, count, dim - first < kLanes ? dim - first : kLanes, to + first);
    }
  }
}
template <int type>
[[gnu::noinline]] void store_group(const Floats* from, char* to, long stride, int count, int dim) {
  for (int first = 0; first < dim; first += kLanes) {
    char* const at = to + first * element_size(type);
    if (count == kLanes && first + kLanes <= dim) {
      store_square<type, true>(from + first, at, stride, kLanes, kLanes);
    } else {
      store_square<type, false>(from + first, at, stride, count, dim - first < kLanes ? dim - first : kLanes);
    }
  }
}
inline void load_group(const RecurrentParams& p, const NarrowGroup& g, int slot, int row, Floats* to) {
  const char* const from = place_of(p, slot, row, g.head, 0, 1).at;
  if (p.state_type == kF32) return load_group<kF32>(from, p.state_head_stride, g.count, p.dim_k, to);
  if (p.state_type == kF16) return load_group<kF16>(from, p.state_head_stride, g.count, p.dim_k, to);
  load_group<kBf16>(from, p.state_head_stride, g.count, p.dim_k, to);
}
inline void store_group(const RecurrentParams& p, const NarrowGroup& g, int slot, int row, const Floats* from) {
  char* const to = place_of(p, slot, row, g.head, 0, 1).at;
  if (p.state_type == kF32) return store_group<kF32>(from, to, p.state_head_stride, g.count, p.dim_k);
  if (p.state_type == kF16) return store_group<kF16>(from, to, p.state_head_stride, g.count, p.dim_k);
  store_group<kBf16>(from, to, p.state_head_stride, g.count, p.dim_k);
}

// Queries and keys of the tokens at work: of a key head, or of each lane.
struct NarrowKeys {
  Floats q[kNarrowTokens][kKeyVectors], k[kNarrowTokens][kKeyVectors];
  Floats q_of_lanes[kRecurrentDim], k_of_lanes[kRecurrentDim];
};
inline void load_keys(const RecurrentParams& p, int token, int key_head, Floats* q, Floats* k) {
  load_key(p, p.q + token * p.q_token_stride + key_head * p.q_head_stride, p.scale, q);
  load_key(p, p.k + token * p.k_token_stride + key_head * p.k_head_stride, 1.f, k);
}
inline void load_keys_of_lanes(const RecurrentParams& p, int token, const NarrowGroup& g, NarrowKeys& keys) {
  for (int h = 0; h < g.count; ++h) {
    load_keys(p, token, (g.head + h) / p.group, keys.q[0], keys.k[0]);
    for (int n = 0; n < p.dim_k; ++n) {
      keys.q_of_lanes[n][h] = reinterpret_cast<const float*>(keys.q[0])[n];
      keys.k_of_lanes[n][h] = reinterpret_cast<const float*>(keys.k[0])[n];
    }
  }
}

// What tokens bring of groups, and what they give.
struct NarrowNumbers {
  Floats given[kNarrowTokens], written[kNarrowTokens], x[kNarrowTokens], y[kNarrowTokens];  // x: what decays are made of
};

// A step of some channels of a group.
template <int kCount, int kDecay, class Key>
inline void step_channels(float gate_min, const Floats* coefficients, Floats* state, const Key* q, const Key* k, Floats x, Floats written,
                          Floats& y) {
  Floats factors[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) factors[i] = coefficients[i] * x;
  if constexpr (kDecay == kPowerDecay) exponentials<false>(factors);
  if constexpr (kDecay == kSigmoidDecay)
    for (int i = 0; i < kCount; ++i) factors[i] = exp_vector(gate_min * sigmoid_vector(factors[i]));
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    const Floats s = state[i] * factors[i] + written * k[i];
    state[i] = s;
    y += s * q[i];
  }
}
// Steps of tokens, places [first, first + count). Key is a float where heads share one, and else a vector.
template <int kDecay, class Key>
void step_group(int dim, float gate_min, const Floats* coefficients, Floats* state, const Key* q, const Key* k, long key_stride, int first,
                int count, NarrowNumbers& of) {
  constexpr int kTogether = kDecay == kSigmoidDecay ? 1 : 4;
  for (int t = first; t < first + count; ++t, q += key_stride, k += key_stride) {
    Floats y = {};
    int n = 0;
    for (; n + kTogether <= dim; n += kTogether)
      step_channels<kTogether, kDecay>(gate_min, coefficients + n, state + n, q + n, k + n, of.x[t], of.written[t], y);
    for (; n < dim; ++n) step_channels<1, kDecay>(gate_min, coefficients + n, state + n, q + n, k + n, of.x[t], of.written[t], y);
    of.y[t] = y;
  }
}

// Of a plan's layer: what the groups of a call have in common with all tokens.
struct NarrowLayer {
  Floats coefficients[kNarrowNumbers / kLanes];
  Floats bias[kNarrowNumbers / kLanes], skip[kNarrowNumbers / kLanes];
};

// kPowerDecay: -e^rates / ln 2, finite, so that 0 times it is 0. A head with a rate that is no number has a bias that is none.
void load_coefficients(const RecurrentParams& p, const NarrowGroup& g, Floats* to, Floats& bias) {
  constexpr float kMost = 0x1p120f;
  const bool fixed = p.gate_kind == kFixedGate;
  const float* const rates = p.rates + g.head * p.rates_stride;
  if (p.rates != nullptr && p.channel_rates)
    load_group<kF32>(reinterpret_cast<const char*>(rates), p.rates_stride * long(sizeof(float)), g.count, p.dim_k, to);
  Floats of_head = {};
  for (int h = 0; p.rates != nullptr && !p.channel_rates && h < g.count; ++h) of_head[h] = rates[h * p.rates_stride];
  for (int n = 0; n < p.dim_k; ++n) {
    const Floats rate = p.channel_rates ? to[n] : of_head;
    bias = chosen(rate != rate, rate, bias);
    to[n] = p.gate_kind == kLogGate ? Floats{} + 1.f : exp_vector(fixed ? -rate : rate);
    if (p.gate_kind == kSoftplusGate) to[n] = greatest(-to[n], Floats{} - kMost) * kLog2e;
  }
}

// What a token brings of a group, as place i; and what is made of the places.
inline void load_numbers(const RecurrentParams& p, const NarrowGroup& g, int token, Floats bias, int i, NarrowNumbers& to) {
  to.given[i] = load_heads(p.v + token * p.v_token_stride + g.head * p.v_head_stride, p.v_head_stride, p.type, g.count);
  to.x[i] = Floats{};
  if (p.gate != nullptr)
    to.x[i] = load_heads(p.gate + token * p.gate_token_stride + g.head * p.gate_head_stride, p.gate_head_stride, p.gate_type, g.count);
  if (p.gate_kind == kSoftplusGate || p.gate_kind == kSigmoidGate) to.x[i] += bias;
}
inline void make_numbers(const RecurrentParams& p, int count, NarrowNumbers& of) {
  constexpr float kMost = 0x1p120f;
  constexpr int kTogether = 4;
  for (int first = 0; p.gate_kind == kSoftplusGate && first < count; first += kTogether) {
    Floats x[kTogether];
    for (int i = 0; i < kTogether; ++i) x[i] = first + i < count ? of.x[first + i] : Floats{};
    softplus_vectors(x);
    for (int i = 0; i < kTogether; ++i) of.x[first + i] = x[i];
  }
  for (int i = 0; i < count; ++i) {
    Floats x = of.x[i], written = of.given[i];
    if (p.gate_kind == kSoftplusGate) {
      x = least(Floats{} + p.gate_max, greatest(Floats{} + p.gate_min, x));
      if (p.scaled_values) written *= x;
      written = chosen(x != x, x, written);  // decays lose it
      x = least(x, Floats{} + kMost);
    }
    if (p.gate_kind == kLogGate) x = exp_vector(x);
    if (p.gate_kind == kFixedGate) x = Floats{} + 1.f;
    of.x[i] = x, of.written[i] = written;
  }
}

template <class Key>
void step_group(const RecurrentParams& p, const Floats* coefficients, Floats* state, const Key* q, const Key* k, long key_stride, int count,
                NarrowNumbers& of, int first) {
  const auto step = [&]<int kDecay>() { step_group<kDecay>(p.dim_k, p.gate_min, coefficients, state, q, k, key_stride, first, count, of); };
  if (p.gate_kind == kSoftplusGate) return step.template operator()<kPowerDecay>();
  if (p.gate_kind == kSigmoidGate) return step.template operator()<kSigmoidDecay>();
  step.template operator()<kProductDecay>();
}

// A group's tokens [token, token + count), places of `of` from `first` on.
void run_group_tokens(const RecurrentParams& p, const NarrowGroup& g, int token, int count, const NarrowLayer& layer, NarrowKeys& keys,
                      Floats* state, NarrowNumbers& of, int first) {
  const Floats* const coefficients = layer.coefficients + g.number * p.dim_k;
  if (g.shared) {
    step_group(p, coefficients, state, reinterpret_cast<const float*>(keys.q[0]), reinterpret_cast<const float*>(keys.k[0]),
               kKeyVectors * kLanes, count, of, first);
  } else {
    for (int t = 0; t < count; ++t) {
      load_keys_of_lanes(p, token + t, g, keys);
      step_group(p, coefficients, state, keys.q_of_lanes, keys.k_of_lanes, 0, 1, of, first + t);
    }
  }
  for (int t = 0; t < count; ++t)
    store_heads(of.y[first + t] + layer.skip[g.number] * of.given[first + t],
                p.out + (token + t) * p.out_token_stride + g.head * p.out_head_stride, p.out_head_stride, p.type, g.count);
}

// Calls visit(group) for those of the heads.
inline void each_group(const RecurrentParams& p, int head_begin, int head_end, const auto& visit) {
  for (int head = head_begin, number = 0; head < head_end; head += kLanes, ++number) {
    const int count = head_end - head < kLanes ? head_end - head : kLanes, key_head = head / p.group;
    visit(NarrowGroup{number, head, count, key_head, key_head == (head + count - 1) / p.group});
  }
}

// An item of one token, which leaves one row: a group's state is computed on its way through.
void run_narrow_token(const RecurrentParams& p, const RecurrentItem& item, int head_begin, int head_end, const NarrowLayer& layer,
                      NarrowKeys& keys) {
  Floats state[kRecurrentDim];
  NarrowNumbers of;
  int key_head = -1;
  const int token = item.begin;
  for (int begin = head_begin; begin < head_end; begin += kNarrowTokens * kLanes) {
    const int end = head_end - begin < kNarrowTokens * kLanes ? head_end : begin + kNarrowTokens * kLanes;
    const int before = (begin - head_begin) / kLanes;  // groups
    each_group(p, begin, end, [&](const NarrowGroup& g) { load_numbers(p, g, token, layer.bias[before + g.number], g.number, of); });
    make_numbers(p, (end - begin + kLanes - 1) / kLanes, of);
    each_group(p, begin, end, [&](NarrowGroup g) {
      const int place = g.number;
      g.number += before;
      if (!item.fresh) load_group(p, g, item.source, item.first_row, state);
      for (int n = 0; item.fresh && n < p.dim_k; ++n) state[n] = Floats{};
      if (g.shared && g.key_head != key_head) load_keys(p, token, g.key_head, keys.q[0], keys.k[0]);
      key_head = g.shared ? g.key_head : -1;
      run_group_tokens(p, g, token, 1, layer, keys, state, of, place);
      store_group(p, g, item.slot, 0, state);
    });
  }
  if (p.finish) finish_outputs(p, token, token + 1, head_begin, head_end);
}

void run_narrow_item(const RecurrentParams& p, const RecurrentItem& item, int head_begin, int head_end, const NarrowLayer& layer,
                     NarrowKeys& keys) {
  Floats states[kNarrowNumbers / kLanes];
  const auto state_of = [&](const NarrowGroup& g) { return states + g.number * p.dim_k; };
  const auto load = [&](int slot, int row) {
    each_group(p, head_begin, head_end, [&](const NarrowGroup& g) { load_group(p, g, slot, row, state_of(g)); });
  };
  const auto store = [&](int row) {
    each_group(p, head_begin, head_end, [&](const NarrowGroup& g) { store_group(p, g, item.slot, row, state_of(g)); });
    if (rows_are_rounded(p, item)) load(item.slot, row);
  };
  if (item.fresh) {
    for (int i = 0; i < kNarrowNumbers / kLanes; ++i) states[i] = Floats{};
  } else {
    load(item.source, item.first_row);
  }
  if (item.end - item.begin == item.drafts) store(0);  // what is read of the slot has been read
  const int plain = item.end - item.drafts;            // the tokens from there on leave a row each, those before it one
  for (int token = item.begin; token < item.end;) {
    const int left = token < plain ? plain - token : 1, count = left < kNarrowTokens ? left : kNarrowTokens;
    const int row = token + count - plain;
    if (begins_elsewhere(item, token, row)) load(item.slot, item.parent_rows[token]);
    int key_head = -1;
    each_group(p, head_begin, head_end, [&](const NarrowGroup& g) {
      if (g.shared && g.key_head != key_head)
        for (int t = 0; t < count; ++t) load_keys(p, token + t, g.key_head, keys.q[t], keys.k[t]);
      key_head = g.shared ? g.key_head : -1;
      NarrowNumbers of;
      for (int t = 0; t < count; ++t) load_numbers(p, g, token + t, layer.bias[g.number], t, of);
      make_numbers(p, count, of);
      run_group_tokens(p, g, token, count, layer, keys, state_of(g), of, 0);
    });
    if (p.finish) finish_outputs(p, token, token + count, head_begin, head_end);
    if (row >= 0) store(row);
    token += count;
  }
}

void run_narrow_recurrent(const RecurrentParams& p, const RecurrentItem* items, int num_items, int head_begin, int head_end) {
  NarrowLayer layer;
  for (int head = head_begin, number = 0; head < head_end; head += kLanes, ++number) {
    const NarrowGroup g{number, head, head_end - head < kLanes ? head_end - head : kLanes, 0, false};
    Floats &bias = layer.bias[number], &skip = layer.skip[number];
    bias = skip = Floats{};
    for (int h = 0; h < g.count; ++h) {
      if (p.gate_bias != nullptr) bias[h] = p.gate_bias[(head + h) * p.bias_stride];
      if (p.skip != nullptr) skip[h] = p.skip[head + h];
    }
    load_coefficients(p, g, layer.coefficients + number * p.dim_k, bias);
  }
  NarrowKeys keys;
  for (int i = 0; i < num_items; ++i) {
    if (items[i].end - items[i].begin == 1 && items[i].drafts == 0) {
      run_narrow_token(p, items[i], head_begin, head_end, layer, keys);
    } else {
      run_narrow_item(p, items[i], head_begin, head_end, layer, keys);
    }
  }
}

}  // namespace
}  // namespace imbrex::cpu
