// The kernels of recurrent layers, in vectors as wide as the instruction set that they are compiled for has, token by token. Vectors are
// along the dimension of the state that lies contiguous in memory. In prompts the part of a state that a call works on stays in the
// first-level cache; in decode it is computed where it lies, if it can be. docs/kernels/recurrent.md has the roofline and the times.
#include "cpu/recurrent_params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/vectors.inl"
#include "cpu/kernels/exp_vectors.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kKeyVectors = kRecurrentDim / kLanes, kValueVectors = kRecurrentValues / kLanes;

// log(1 + e^x), accurate however small: of z = e^-|x| <= 1 the series of 2 atanh(z / (2 + z)).
inline Floats softplus_vector(Floats x) {
  const Floats magnitude = (Floats)((Words)x & 0x7fffffffu), z = exp_vector(-magnitude), w = z / (z + 2.f), squared = w * w;
  constexpr int kLast = 17;  // power of the series
  Floats sum = {};
  for (int power = kLast; power > 0; power -= 2) sum = sum * squared + 1.f / float(power);
  const Floats result = greatest(x, Floats{}) + sum * w * 2.f;
  return chosen(x != x, x, result);
}
inline Floats sigmoid_vector(Floats x) {
  const Floats z = exp_vector(-(Floats)((Words)x & 0x7fffffffu)), small = z / (z + 1.f);
  return chosen(x < 0.f, small, 1.f - small);
}

typedef float Floats4 __attribute__((vector_size(16)));

// Halves of a vector are added until one number is left.
inline float sum_of(Floats4 x) {
  const Floats4 y = x + __builtin_shufflevector(x, x, 2, 3, 0, 1);
  return y[0] + y[1];
}
#if defined(__AVX2__)
typedef float Floats8 __attribute__((vector_size(32)));
inline float sum_of(Floats8 x) { return sum_of(__builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7)); }
#endif
#if defined(__AVX512F__)
inline float sum_of(Floats x) {
  return sum_of(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif

// n floats from p on, zeros behind them.
inline Floats load_floats(const float* p, int n) { return load_vector<kF32>(reinterpret_cast<const char*>(p), n); }

// Rows of vectors, whose tails are zero.
inline void load_vectors(const char* p, int type, int n, Floats* to) {
  const int vectors = (n + kLanes - 1) / kLanes;
  if (type == kBf16 && n % kLanes == 0) {
    for (int i = 0; i < vectors; ++i) to[i] = load_vector<kBf16>(p + 2l * i * kLanes, kLanes);
    return;
  }
  to[vectors - 1] = Floats{};
  load_row(p, element_size(type), type, n, reinterpret_cast<float*>(to));
}

// In recurrent_outputs.inl; as in RecurrentKernels.
void finish_outputs(const RecurrentParams& p, int token_begin, int token_end, int head_begin, int head_end);

// What of a token does not depend on the values.
struct RecurrentToken {
  Floats q[kKeyVectors], k[kKeyVectors];
  Floats factor[kKeyVectors];  // of the state, by key channel: e^g
  float step, beta;            // that values, and what is written, are multiplied by
};

inline void load_key(const RecurrentParams& p, const char* from, float factor, Floats* to) {
  const int vectors = (p.dim_k + kLanes - 1) / kLanes;
  load_vectors(from, p.type, p.dim_k, to);
  if (p.qk_norm) {
    Floats squares = {};
    for (int i = 0; i < vectors; ++i) squares += to[i] * to[i];
    factor /= __builtin_sqrtf(sum_of(squares) + 1e-6f);
  }
  for (int i = 0; i < vectors; ++i) to[i] *= factor;
}

// e^g of channels, and the softplus that it is made of. All arguments are of one vector; those that a head has one of are in all lanes.
inline Floats decay_factor(const RecurrentParams& p, Floats gate, Floats bias, Floats rate, Floats& step) {
  switch (p.gate_kind) {
    case kFixedGate: return exp_vector(-rate);
    case kLogGate: return exp_vector(gate);
    case kSoftplusGate:
      // A NaN stays one: it is the second of two that are compared.
      step = least(Floats{} + p.gate_max, greatest(Floats{} + p.gate_min, softplus_vector(gate + bias)));
      return exp_vector(-exp_vector(rate) * step);
    default: return exp_vector(p.gate_min * sigmoid_vector(exp_vector(rate) * (gate + bias)));
  }
}

void load_token(const RecurrentParams& p, int token, int head, RecurrentToken& t) {
  const int key_head = head / p.group, vectors = (p.dim_k + kLanes - 1) / kLanes;
  load_key(p, p.q + token * p.q_token_stride + key_head * p.q_head_stride, p.scale, t.q);
  load_key(p, p.k + token * p.k_token_stride + key_head * p.k_head_stride, 1.f, t.k);
  const char* const gate = p.gate == nullptr ? nullptr : p.gate + token * p.gate_token_stride + head * p.gate_head_stride;
  const float *const rates = p.rates + head * p.rates_stride, *const bias = p.gate_bias + head * p.bias_stride;
  Floats step = {};
  if (!p.channel_gate && !p.channel_rates) {
    const Floats factor =
        decay_factor(p, Floats{} + (gate == nullptr ? 0.f : load_element(gate, p.gate_type)),
                     Floats{} + (p.gate_bias == nullptr ? 0.f : *bias), Floats{} + (p.rates == nullptr ? 0.f : *rates), step);
    for (int i = 0; i < vectors; ++i) t.factor[i] = factor;
  } else {
    Floats gates[kKeyVectors];
    if (p.channel_gate) load_vectors(gate, p.gate_type, p.dim_k, gates);
    for (int i = 0; i < vectors; ++i) {
      const int n = p.dim_k - i * kLanes < kLanes ? p.dim_k - i * kLanes : kLanes;
      const Floats x = p.channel_gate ? gates[i] : Floats{} + (gate == nullptr ? 0.f : load_element(gate, p.gate_type));
      const Floats b = p.gate_bias == nullptr ? Floats{} : p.channel_gate ? load_floats(bias + i * kLanes, n) : Floats{} + *bias;
      const Floats rate = p.rates == nullptr ? Floats{} : p.channel_rates ? load_floats(rates + i * kLanes, n) : Floats{} + *rates;
      t.factor[i] = decay_factor(p, x, b, rate, step);
    }
  }
  t.step = p.scaled_values ? step[0] : 1.f;
  t.beta = 1.f;
  if (p.delta) {
    const float beta = load_element(p.beta + token * p.beta_token_stride + head * element_size(p.beta_type), p.beta_type);
    t.beta = (p.sigmoid_beta ? sigmoid_vector(Floats{} + beta)[0] : beta) * p.beta_scale;
  }
}

// The part of a state that a call works on: rows of the dimension that does not lie contiguous.
struct RecurrentTile {
  Floats by_value[kRecurrentValues][kKeyVectors];  // v_first
  Floats by_key[kRecurrentDim][kValueVectors];     // k_first
};

// A tile between memory and floats.
struct RecurrentPlace {
  char* at;
  long row_bytes;
  int rows, n;  // rows, and numbers of a row
};
inline RecurrentPlace place_of(const RecurrentParams& p, int slot, int row, int head, int v_begin, int v_end) {
  const long size = element_size(p.state_type);
  char* const at = p.state + slot * p.state_slot_stride + row * p.state_row_stride + head * p.state_head_stride;
  if (p.k_first) return {at + v_begin * size, p.dim_v * size, p.dim_k, v_end - v_begin};
  return {at + v_begin * p.dim_k * size, p.dim_k * size, v_end - v_begin, p.dim_k};
}
template <int vectors>
void load_tile(const RecurrentParams& p, const RecurrentPlace& place, bool fresh, Floats (*tile)[vectors]) {
  for (int r = 0; r < place.rows; ++r) {
    if (fresh) {
      for (int i = 0; i < vectors; ++i) tile[r][i] = Floats{};
    } else {
      load_vectors(place.at + r * place.row_bytes, p.state_type, place.n, tile[r]);
    }
  }
}
template <int vectors>
void store_tile(const RecurrentParams& p, const RecurrentPlace& place, const Floats (*tile)[vectors]) {
  for (int r = 0; r < place.rows; ++r)
    store_row(place.at + r * place.row_bytes, element_size(p.state_type), p.state_type, place.n, reinterpret_cast<const float*>(tile[r]));
}

// Rows of a state with keys innermost: in a tile, or where the state lies.
struct RecurrentRows {
  char* at;
  long bytes;  // from one to the next
};

// A token's step of states with vectors along the key. values: in, and what is returned for q. kVectors: of a key, 0 where that is known
// only here; a value's row of a state is in registers then, as far as there are so many.
template <int kVectors>
void step_by_value(const RecurrentParams& p, const RecurrentToken& t, int count, float* values, const RecurrentRows& rows) {
  const int vectors = kVectors > 0 ? kVectors : (p.dim_k + kLanes - 1) / kLanes;
  for (int v = 0; v < count; ++v) {
    char* const at = rows.at + v * rows.bytes;
    Floats row[kVectors > 0 ? kVectors : kKeyVectors], known = {}, y = {};
    for (int i = 0; i < vectors; ++i) {
      row[i] = load_vector<kF32>(at + i * long(sizeof(Floats)), kLanes) * t.factor[i];
      known += row[i] * t.k[i];
    }
    const float written = t.beta * (values[v] * t.step - (p.delta ? sum_of(known) : 0.f));
    for (int i = 0; i < vectors; ++i) {
      row[i] += t.k[i] * written;
      store_vector<kF32>(row[i], kLanes, at + i * long(sizeof(Floats)));
      y += row[i] * t.q[i];
    }
    values[v] = sum_of(y);
  }
}
void step_by_value(const RecurrentParams& p, const RecurrentToken& t, int count, float* values, const RecurrentRows& rows) {
  switch ((p.dim_k + kLanes - 1) / kLanes) {
    case 1: return step_by_value<1>(p, t, count, values, rows);
    case 4: return step_by_value<4>(p, t, count, values, rows);
    case 8: return step_by_value<8>(p, t, count, values, rows);
    default: return step_by_value<0>(p, t, count, values, rows);
  }
}

// And with vectors along the values.
template <int kVectors>
void step_by_key(const RecurrentParams& p, const RecurrentToken& t, int count, float* values, Floats (*s)[kValueVectors]) {
  const float *const k = reinterpret_cast<const float*>(t.k), *const q = reinterpret_cast<const float*>(t.q),
                     *const factor = reinterpret_cast<const float*>(t.factor);
  constexpr int kSums = 4;  // that are added up side by side
  Floats known[kSums][kVectors] = {}, y[kSums][kVectors] = {}, written[kVectors];
  int c = 0;
  const auto know = [&](int sum) {
    for (int i = 0; i < kVectors; ++i) known[sum][i] += s[c][i] * (factor[c] * k[c]);
    ++c;
  };
  if (p.delta) {
    while (c + kSums <= p.dim_k) know(0), know(1), know(2), know(3);
    while (c < p.dim_k) know(0);
  }
  for (int i = 0; i < kVectors; ++i) {
    const int n = count - i * kLanes < kLanes ? count - i * kLanes : kLanes;
    written[i] = (load_floats(values + i * kLanes, n) * t.step - ((known[0][i] + known[1][i]) + (known[2][i] + known[3][i]))) * t.beta;
  }
  c = 0;
  const auto write = [&](int sum) {
    for (int i = 0; i < kVectors; ++i) {
      s[c][i] = s[c][i] * factor[c] + written[i] * k[c];
      y[sum][i] += s[c][i] * q[c];
    }
    ++c;
  };
  while (c + kSums <= p.dim_k) write(0), write(1), write(2), write(3);
  while (c < p.dim_k) write(0);
  for (int i = 0; i < kVectors; ++i) {
    const int n = count - i * kLanes < kLanes ? count - i * kLanes : kLanes;
    store_vector<kF32>((y[0][i] + y[1][i]) + (y[2][i] + y[3][i]), n, reinterpret_cast<char*>(values + i * kLanes));
  }
}
template <int kMost>
void step_by_key_of(const RecurrentParams& p, const RecurrentToken& t, int count, float* values, Floats (*s)[kValueVectors]) {
  if (kMost == 1 || count > (kMost - 1) * kLanes) return step_by_key<kMost>(p, t, count, values, s);
  if constexpr (kMost > 1) step_by_key_of<kMost - 1>(p, t, count, values, s);
}

// Whether a token, which leaves its state in a row, is a draft that does not begin from the row in front.
inline bool begins_elsewhere(const RecurrentItem& item, int token, int row) {
  return item.parent_rows != nullptr && row > 0 && item.parent_rows[token] != row - 1;
}
// Whether drafts begin from states that have fewer bits than a float.
inline bool rows_are_rounded(const RecurrentParams& p, const RecurrentItem& item) {
  return item.tree && item.drafts > 0 && p.state_type != kF32;
}

void run_recurrent(const RecurrentParams& p, const RecurrentItem& item, int head, int v_begin, int v_end) {
  RecurrentTile tile;
  RecurrentToken t;
  const int count = v_end - v_begin;
  const long size = element_size(p.type);
  const RecurrentPlace first = place_of(p, item.source, item.first_row, head, v_begin, v_end);
  // What is computed where it lies is neither loaded first nor stored last.
  const bool in_place = is_in_place(p.k_first, p.state_type, p.dim_k, item);
  const RecurrentRows rows =
      in_place ? RecurrentRows{first.at, first.row_bytes} : RecurrentRows{reinterpret_cast<char*>(tile.by_value), sizeof tile.by_value[0]};
  const auto load = [&](const RecurrentPlace& place, bool fresh) {
    p.k_first ? load_tile(p, place, fresh, tile.by_key) : load_tile(p, place, fresh, tile.by_value);
  };
  const auto store = [&](int row) {
    if (in_place) return;
    const RecurrentPlace place = place_of(p, item.slot, row, head, v_begin, v_end);
    p.k_first ? store_tile(p, place, tile.by_key) : store_tile(p, place, tile.by_value);
    if (rows_are_rounded(p, item)) load(place, false);
  };
  if (!in_place) {
    load(first, item.fresh);
  } else if (item.fresh) {
    __builtin_memset(first.at, 0, (unsigned long)(first.rows * first.row_bytes));
  }
  if (item.end - item.begin == item.drafts) store(0);  // what is read of the slot has been read
  for (int token = item.begin; token < item.end; ++token) {
    const int row = token + 1 - (item.end - item.drafts);
    if (begins_elsewhere(item, token, row)) load(place_of(p, item.slot, item.parent_rows[token], head, v_begin, v_end), false);
    load_token(p, token, head, t);
    float values[kRecurrentDim], given[kRecurrentDim];
    load_row(p.v + token * p.v_token_stride + head * p.v_head_stride + v_begin * size, size, p.type, count, given);
    for (int v = 0; v < count; ++v) values[v] = given[v];
    p.k_first ? step_by_key_of<kValueVectors>(p, t, count, values, tile.by_key) : step_by_value(p, t, count, values, rows);
    if (p.skip != nullptr)
      for (int v = 0; v < count; ++v) values[v] += p.skip[head] * given[v];
    store_row(p.out + token * p.out_token_stride + head * p.out_head_stride + v_begin * size, size, p.type, count, values);
    if (p.finish && count == p.dim_v) finish_outputs(p, token, token + 1, head, head + 1);
    if (row >= 0) store(row);
  }
}

}  // namespace
}  // namespace imbrex::cpu
