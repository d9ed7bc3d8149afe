// Expressions along rows of keys: step by step (bound_parts.h) on a few keys at a time, whose values stay in vector registers from a step
// to the next one where that can be.
#include <algorithm>

#include "core/check.h"
#include "expression/bound_parts.h"

namespace imbrex {
namespace {

constexpr int kFewLanes = 24 * kRowChunk;
constexpr size_t kFewNodes = 24;
constexpr int kMostLanes = Expression::kMaxNodes * (kRowChunk + kRowGroup) + kRowChunk;

// Rows are compiled for vectors of 8 and 16 lanes too, whatever the rest of the library is compiled for: everything that they call becomes
// a part of them. Bits are the same, since nothing is contracted.
#if defined(__x86_64__) && !defined(__AVX512F__) && !defined(__clang__)  // clang has no such width for a function
#define IMBREX_ROWS_OF_8_AND_16 1
#define IMBREX_ROWS_OF_8 gnu::flatten, gnu::target("avx2,fma,prefer-vector-width=256")
#define IMBREX_ROWS_OF_16 gnu::flatten, gnu::target("fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#if defined(__AVX512F__)
constexpr int kUsualLanes = 16;
#elif defined(__AVX2__)
constexpr int kUsualLanes = 8;
#else
constexpr int kUsualLanes = 4;
#endif
#define IMBREX_INLINE __attribute__((always_inline))
#define IMBREX_IN_ROW [[gnu::always_inline]] inline

#ifdef IMBREX_ROWS_OF_8_AND_16
int lanes_of_this_cpu() {
  static const bool has_16 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool has_8 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_16 ? 16 : has_8 ? 8 : kUsualLanes;
}
#endif

alignas(64) constexpr int32_t kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <int kLanes>
using Lanes [[gnu::vector_size(4 * kLanes)]] = int32_t;

template <int kLanes>
IMBREX_IN_ROW void load(Lanes<kLanes>& to, const void* from) {
  __builtin_memcpy(&to, from, sizeof to);  // at any address
}
template <int kLanes>
IMBREX_IN_ROW void store(void* to, const Lanes<kLanes>& from) {
  __builtin_memcpy(to, &from, sizeof from);
}

template <class F>
struct RowOf;
template <class F, class R, class... T>
struct RowOf<R (F::*)(T...) const> {
  using In = std::array<const int32_t*, 3>;
  static constexpr int kArguments = sizeof...(T);

  template <size_t... kPlaces>
  IMBREX_IN_ROW static void loop(const F& f, int count, int32_t* __restrict out, const int32_t* const* in,
                                 std::index_sequence<kPlaces...>) {
#pragma GCC unroll 1  // so that the whole loop becomes vectors
    for (int i = 0; i < count; ++i) out[i] = ExpressionBits::of(f(value_as<T>(ExpressionBits{in[kPlaces][i]})...)).bits;
  }
  IMBREX_IN_ROW static void loop(const F& f, int count, int32_t* out, const In& in) {
    const int32_t* const lanes[] = {in[0], in[1], in[2]};
    loop(f, count, out, lanes, std::make_index_sequence<sizeof...(T)>());
  }
  // Compilers keep all of this in registers.
  template <int kLanes>
  IMBREX_IN_ROW static void in_registers(const F& f, Lanes<kLanes>& out, const Lanes<kLanes>& a, const Lanes<kLanes>& b,
                                         const Lanes<kLanes>& c) {
    alignas(64) int32_t to[kLanes], from[3][kLanes];
    store<kLanes>(from[0], a), store<kLanes>(from[1], b), store<kLanes>(from[2], c);
    loop(f, kLanes, to, {from[0], from[1], from[2]});
    load<kLanes>(out, to);
  }

#ifdef IMBREX_ROWS_OF_8_AND_16
  [[gnu::noinline, IMBREX_ROWS_OF_16]] static void run_16(const F& f, int count, int32_t* out, const In& in) { loop(f, count, out, in); }
  [[gnu::noinline, IMBREX_ROWS_OF_8]] static void run_8(const F& f, int count, int32_t* out, const In& in) { loop(f, count, out, in); }
#endif
  [[gnu::noinline]] static void run_usual(const F& f, int count, int32_t* out, const In& in) { loop(f, count, out, in); }
  template <int kLanes>
  IMBREX_IN_ROW static void run(const F& f, int count, int32_t* out, const In& in) {
#ifdef IMBREX_ROWS_OF_8_AND_16
    if constexpr (kLanes == 16) return run_16(f, count, out, in);
    if constexpr (kLanes == 8) return run_8(f, count, out, in);
#endif
    run_usual(f, count, out, in);
  }
};

template <class T, bool kChecked>
void read_elements(const ExpressionTensorData& tensor, int count, int32_t* __restrict out, const std::array<const int32_t*, 3>& in) {
  const T* const data = static_cast<const T*>(tensor.data);
  for (int i = 0; i < count; ++i) {
    const int a = in[0][i], b = in[1] ? in[1][i] : 0, c = in[2] ? in[2][i] : 0;
    if (kChecked && !is_within(tensor, a, b, c)) {
      out[i] = 0;
      continue;
    }
    const T value = data[a * tensor.strides[0] + b * tensor.strides[1] + c * tensor.strides[2]];
    out[i] = sizeof(T) == 1 ? value != 0 : int32_t(value);
  }
}

[[gnu::noinline]] void read_elements(const ExpressionTensorData& tensor, ExpressionType type, bool checked, int count, int32_t* out,
                                     const std::array<const int32_t*, 3>& in) {
  if (type == ExpressionType::boolean) {
    return checked ? read_elements<uint8_t, true>(tensor, count, out, in) : read_elements<uint8_t, false>(tensor, count, out, in);
  }
  return checked ? read_elements<int32_t, true>(tensor, count, out, in) : read_elements<int32_t, false>(tensor, count, out, in);
}

// Elements whose index number `along` is the key, from `begin` on; the others are `index`. Where they are, or written to `edge`.
[[gnu::noinline]] const int32_t* elements_along(const ExpressionTensorData& tensor, ExpressionType type, int along,
                                                std::array<int, 3> index, int begin, int count, int32_t* edge) {
  index[size_t(along)] = 0;
  const long size = tensor.sizes[along], stride = tensor.strides[along];
  const int first = int(std::clamp<long>(-long(begin), 0, count)), last = int(std::clamp<long>(size - begin, first, count));
  const bool is_bool = type == ExpressionType::boolean;
  long at = begin * stride;
  bool within = first < last;
  for (size_t i = 0; i < 3; ++i) {
    within = within && (int(i) == along || unsigned(index[i]) < unsigned(tensor.sizes[i]));
    at += index[i] * tensor.strides[i];
  }
  const auto* const words = static_cast<const int32_t*>(tensor.data);
  if (within && first == 0 && last == count && !is_bool && stride == 1) return words + at;
  std::fill_n(edge, count, 0);
  for (int i = first; within && i < last; ++i)
    edge[i] = is_bool ? static_cast<const uint8_t*>(tensor.data)[at + i * stride] != 0 : words[at + i * stride];
  return edge;
}

// What the steps of a row read and write.
template <class Parts>
struct Row {
  const Parts& parts;
  const ExpressionVariables& at;
  const RowKeys& keys;
  bool outside;                 // keys may be, of the ranges in which elements need no check
  const ExpressionBits* fixed;  // of each node that is the same for all keys
  int32_t* lanes;
};

// The keys from `begin` on, all kLanes * kVectors of them.
template <int kLanes, int kVectors, class Parts>
IMBREX_IN_ROW void run_steps(const Row<Parts>& row, int begin, const float* scores, float* to_scores, uint8_t* to_bytes) {
  constexpr int kKeys = kLanes * kVectors;
  static_assert(kRowGroup % kLanes == 0 && kRowChunk % kKeys == 0);
  using Vector = Lanes<kLanes>;
  const Parts& parts = row.parts;
  const auto lanes_of = [&](const RowLanes& in, int t) IMBREX_INLINE {  // of vector t
    return row.lanes + in.begin + t * kLanes / kRowGroup * in.step + (in.step == 0 ? 0 : t * kLanes % kRowGroup);
  };
  const auto group_of = [&](int t) IMBREX_INLINE { return t * kLanes / kRowGroup * row.keys.pitch + t * kLanes % kRowGroup; };
  // Not an array, which compilers would not keep in registers.
  static_assert(kVectors == 4 || kVectors == 8);
  Vector v0{}, v1{}, v2{}, v3{}, v4{}, v5{}, v6{}, v7{};
  const auto all = [&](const auto& f) IMBREX_INLINE {
    f(0, v0), f(1, v1), f(2, v2), f(3, v3);
    if constexpr (kVectors == 8) f(4, v4), f(5, v5), f(6, v6), f(7, v7);
  };
  for (const RowStep& step : parts.rows.steps) {
    switch (step.kind) {
      case RowStep::positions:
        all([&](int t, Vector& v) IMBREX_INLINE {
          load<kLanes>(v, kNumbers);
          v += Vector{} + (begin + t * kLanes);
        });
        break;
      case RowStep::scores:
        all([&](int t, Vector& v) IMBREX_INLINE {
          using Floats [[gnu::vector_size(4 * kLanes)]] = float;
          if (scores) {
            load<kLanes>(v, scores + group_of(t));
            v = (Vector)((Floats)v * row.keys.scale);
          } else {
            v = (Vector)(Floats{} + row.at.score);
          }
        });
        break;
      case RowStep::load: all([&](int t, Vector& v) IMBREX_INLINE { load<kLanes>(v, lanes_of(step.in[0], t)); }); break;
      case RowStep::element: {
        const ExpressionNode& node = parts.nodes[size_t(step.node)];
        const ExpressionTensorData& tensor = parts.tensors[size_t(node.value)];
        const int32_t* elements = row.lanes + step.store;
        if (step.along >= 0) {
          std::array<int, 3> index{};
          for (size_t i = 0; i < 3; ++i)
            if (node.args[i] >= 0) index[i] = row.fixed[node.args[i]].integer();
          elements = elements_along(tensor, node.type, step.along, index, begin, kKeys, row.lanes + parts.rows.edge);
        } else {
          std::array<const int32_t*, 3> in{};
          for (size_t i = 0; i < 3; ++i)
            if (node.args[i] >= 0) in[i] = row.lanes + step.in[i].begin;
          read_elements(tensor, node.type, row.outside || parts.checked[size_t(step.node)], kKeys, row.lanes + step.store, in);
        }
        all([&](int t, Vector& v) IMBREX_INLINE { load<kLanes>(v, elements + t * kLanes); });
        break;
      }
      default:
        with_operation(step.op, step.type, [&](const auto& f) IMBREX_INLINE {
          using Of = RowOf<decltype(&std::decay_t<decltype(f)>::operator())>;
          if constexpr (is_long_operation<std::decay_t<decltype(f)>>) {
            int32_t* const out = row.lanes + step.store;
            Of::template run<kLanes>(f, kKeys, out,
                                     {row.lanes + step.in[0].begin, row.lanes + step.in[1].begin, row.lanes + step.in[2].begin});
            all([&](int t, Vector& v) IMBREX_INLINE { load<kLanes>(v, out + t * kLanes); });
          } else if constexpr (Of::kArguments == 1) {
            all([&](int, Vector& v) IMBREX_INLINE { Of::template in_registers<kLanes>(f, v, v, v, v); });
          } else if constexpr (Of::kArguments == 2) {
            if (step.kind == RowStep::with_second) {
              all([&](int t, Vector& v) IMBREX_INLINE {
                Vector second;
                load<kLanes>(second, lanes_of(step.in[1], t));
                Of::template in_registers<kLanes>(f, v, v, second, second);
              });
            } else {
              all([&](int t, Vector& v) IMBREX_INLINE {
                Vector first;
                load<kLanes>(first, lanes_of(step.in[0], t));
                Of::template in_registers<kLanes>(f, v, first, v, v);
              });
            }
          } else {
            all([&](int t, Vector& v) IMBREX_INLINE {
              Vector a, b, c;
              load<kLanes>(a, lanes_of(step.in[0], t)), load<kLanes>(b, lanes_of(step.in[1], t)), load<kLanes>(c, lanes_of(step.in[2], t));
              Of::template in_registers<kLanes>(f, v, a, b, c);
            });
          }
        });
    }
    if (step.store >= 0 && step.kind != RowStep::in_loop) {
      int32_t* const to = row.lanes + step.store;
      all([&](int t, const Vector& v) IMBREX_INLINE { store<kLanes>(to + t * kLanes, v); });
    }
  }
  if (to_scores) {
    all([&](int t, const Vector& v) IMBREX_INLINE { store<kLanes>(to_scores + group_of(t), v); });
  } else {
    all([&](int t, const Vector& v) IMBREX_INLINE {
      alignas(64) int32_t from[kLanes];
      store<kLanes>(from, v);
      for (int i = 0; i < kLanes; ++i) to_bytes[t * kLanes + i] = uint8_t(from[i]);
    });
  }
}

#ifdef IMBREX_ROWS_OF_8_AND_16
template <class Parts>
[[IMBREX_ROWS_OF_16]] void run_128(const Row<Parts>& row, int begin, const float* scores, float* to_scores, uint8_t* to_bytes) {
  run_steps<16, 8>(row, begin, scores, to_scores, to_bytes);
}
template <class Parts>
[[IMBREX_ROWS_OF_16]] void run_64(const Row<Parts>& row, int begin, const float* scores, float* to_scores, uint8_t* to_bytes) {
  run_steps<16, 4>(row, begin, scores, to_scores, to_bytes);
}
template <class Parts>
[[IMBREX_ROWS_OF_8]] void run_8_times_8(const Row<Parts>& row, int begin, const float* scores, float* to_scores, uint8_t* to_bytes) {
  run_steps<8, 8>(row, begin, scores, to_scores, to_bytes);
}
#endif
constexpr int kUsualKeys = kUsualLanes * 8;
template <class Parts>
void run_usual(const Row<Parts>& row, int begin, const float* scores, float* to_scores, uint8_t* to_bytes) {
  run_steps<kUsualLanes, 8>(row, begin, scores, to_scores, to_bytes);
}

template <class Parts>
IMBREX_IN_ROW void run_keys(const Row<Parts>& row) {
  using Run = void (*)(const Row<Parts>&, int, const float*, float*, uint8_t*);
  Run run = run_usual<Parts>, run_rest = run;  // run_rest: half as many keys
  int width = kUsualKeys;
  bool halves = false;
#ifdef IMBREX_ROWS_OF_8_AND_16
  if (const int lanes = lanes_of_this_cpu(); lanes == 16) {
    run = run_128<Parts>, run_rest = run_64<Parts>, width = 128, halves = true;
  } else if (lanes == 8) {
    run = run_rest = run_8_times_8<Parts>, width = 64;
  }
#endif
  const RowKeys& keys = row.keys;
  for (int begin = keys.begin; begin < keys.end;) {
    const int left = keys.end - begin, done = begin - keys.begin;
    if (halves && left <= width / 2) run = run_rest, width /= 2, halves = false;
    const long at = done / kRowGroup * keys.pitch + done % kRowGroup;
    const float* const scores = keys.scores ? keys.scores + at : nullptr;
    if (left >= width) {
      run(row, begin, scores, keys.to_scores ? keys.to_scores + at : nullptr, keys.to_bytes ? keys.to_bytes + done : nullptr);
      begin += width;
      continue;
    }
    // Fewer keys than vectors have: through memory that has room for as many.
    alignas(64) float given[kRowChunk] = {}, made[kRowChunk];
    uint8_t bytes[kRowChunk];
    const auto group = [&](int i) { return i / kRowGroup * keys.pitch + i % kRowGroup; };
    const RowKeys padded{.begin = begin, .end = keys.end, .scores = given, .to_scores = made, .to_bytes = bytes, .scale = keys.scale};
    for (int i = 0; scores && i < left; ++i) given[i] = scores[group(i)];
    run({row.parts, row.at, padded, true, row.fixed, row.lanes}, begin, scores ? given : nullptr, keys.to_scores ? made : nullptr,
        keys.to_bytes ? bytes : nullptr);
    for (int i = 0; keys.to_scores && i < left; ++i) keys.to_scores[at + group(i)] = made[i];
    for (int i = 0; keys.to_bytes && i < left; ++i) keys.to_bytes[done + i] = bytes[i];
    break;
  }
}

// `lanes`: RowPlan::num_lanes of them; `fixed`: as many as there are nodes.
template <class Parts>
IMBREX_IN_ROW void run_row_in(const Parts& parts, const ExpressionVariables& at, const RowKeys& keys, int32_t* lanes,
                              ExpressionBits* fixed) {
  const std::span<const ExpressionNode> nodes = parts.nodes;
  for (const int n : parts.rows.fixed_nodes) {
    const ExpressionNode& node = nodes[size_t(n)];
    fixed[n] = node.op == ExpressionOp::constant   ? ExpressionBits{node.value}
               : node.op == ExpressionOp::variable ? variable_value(at, node.value)
                                                   : parts.value_of(n, at, fixed);
  }
  if (parts.rows.steps.empty()) {
    const ExpressionBits same = fixed[nodes.size() - 1];
    for (int i = 0; i < keys.end - keys.begin; ++i) {
      if (keys.to_scores) keys.to_scores[i / kRowGroup * keys.pitch + i % kRowGroup] = same.real();
      if (keys.to_bytes) keys.to_bytes[i] = uint8_t(same.bits);
    }
    return;
  }
  for (const RowPlan::Spread& spread : parts.rows.spread) std::fill_n(lanes + spread.begin, spread.count, fixed[spread.node].bits);
  run_keys<Parts>({parts, at, keys, !parts.holds(at, keys.begin, keys.end), fixed, lanes});
}

}  // namespace

bool BoundExpression::Parts::holds(const ExpressionVariables& at, int kv_begin, int kv_end) const {
  return ranges.batch.contains(at.batch) && ranges.head.contains(at.head) && ranges.q.contains(at.q) && ranges.kv.contains(kv_begin) &&
         ranges.kv.contains(kv_end - 1) && ranges.q_len.contains(at.q_len) && ranges.kv_len.contains(at.kv_len);
}

void BoundExpression::Parts::run_row(const ExpressionVariables& at, const RowKeys& keys) const {
  if (keys.begin >= keys.end) return;
  if (rows.num_lanes <= kFewLanes && nodes.size() <= kFewNodes) {
    alignas(64) int32_t lanes[kFewLanes];
    ExpressionBits fixed[kFewNodes];
    run_row_in(*this, at, keys, lanes, fixed);
  } else {
    alignas(64) int32_t lanes[kMostLanes];
    ExpressionBits fixed[Expression::kMaxNodes];
    run_row_in(*this, at, keys, lanes, fixed);
  }
}

void BoundExpression::score_row(const ExpressionVariables& at, int kv_begin, int kv_end, float* scores) const {
  score_groups(at, kv_begin, kv_end, scores, kRowGroup, 1.f);
}

void BoundExpression::score_groups(const ExpressionVariables& at, int kv_begin, int kv_end, float* scores, int64_t pitch,
                                   float scale) const {
  if (parts_->type != ExpressionType::real) fail("expression.type", "a score is a float expression, got {}", to_string(parts_->type));
  parts_->run_row(
      at, {.begin = kv_begin, .end = kv_end, .scores = scores, .to_scores = scores, .to_bytes = nullptr, .pitch = pitch, .scale = scale});
}

void BoundExpression::mask_row(const ExpressionVariables& at, int kv_begin, int kv_end, uint8_t* shown, const float* scores) const {
  if (parts_->type != ExpressionType::boolean) fail("expression.type", "a mask is a bool expression, got {}", to_string(parts_->type));
  parts_->run_row(at, {.begin = kv_begin, .end = kv_end, .scores = scores, .to_scores = nullptr, .to_bytes = shown});
}

}  // namespace imbrex
