// Expressions along rows of keys: operation by operation on a few keys at a time, in loops that compilers make vectors of.
#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "expression/bound_parts.h"

namespace imbrex {
namespace {

constexpr int kRowChunk = 128;  // keys at a time: the buffers of a usual expression stay in L1
constexpr size_t kFewNodes = 24;

using RowLanes = int32_t[kRowChunk];

// Loops are compiled for vectors of 16 lanes too, whatever the rest of the library is compiled for: everything that they call becomes a
// part of them. Bits are the same, since nothing is contracted.
#if defined(__x86_64__) && !defined(__AVX512F__) && !defined(__clang__)  // clang has no such width for a function
#define IMBREX_ROWS_OF_16 1
[[nodiscard]] bool has_16_lanes() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  return has;
}
#endif

template <class F>
struct RowOf;
template <class F, class R, class... T>
struct RowOf<R (F::*)(T...) const> {
  using In = std::array<const int32_t*, 3>;
  template <size_t... kPlaces>
  [[gnu::always_inline]] static inline void loop(const F& f, int count, int32_t* __restrict out, const In& in,
                                                 std::index_sequence<kPlaces...>) {
    const int32_t* const lanes[] = {in[kPlaces]...};
    for (int i = 0; i < count; ++i) out[i] = ExpressionBits::of(f(value_as<T>(ExpressionBits{lanes[kPlaces][i]})...)).bits;
  }
#ifdef IMBREX_ROWS_OF_16
  [[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]] static void run_16(const F& f, int count,
                                                                                                                 int32_t* out,
                                                                                                                 const In& in) {
    loop(f, count, out, in, std::make_index_sequence<sizeof...(T)>());
  }
#endif
  static void run(const F& f, int count, int32_t* out, const In& in) {
#ifdef IMBREX_ROWS_OF_16
    if (has_16_lanes()) return run_16(f, count, out, in);
#endif
    loop(f, count, out, in, std::make_index_sequence<sizeof...(T)>());
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

void read_elements(const ExpressionTensorData& tensor, ExpressionType type, bool checked, int count, int32_t* out,
                   const std::array<const int32_t*, 3>& in) {
  if (type == ExpressionType::boolean) {
    return checked ? read_elements<uint8_t, true>(tensor, count, out, in) : read_elements<uint8_t, false>(tensor, count, out, in);
  }
  return checked ? read_elements<int32_t, true>(tensor, count, out, in) : read_elements<int32_t, false>(tensor, count, out, in);
}

// Elements one behind the other along the keys, all within the tensor. False where they are not of 32 bits or not neighbours.
bool copy_elements(const ExpressionTensorData& tensor, ExpressionType type, size_t along, int count, int32_t* out,
                   const std::array<const int32_t*, 3>& in) {
  if (type == ExpressionType::boolean || tensor.strides[along] != 1) return false;
  long first = 0;
  for (size_t i = 0; i < in.size(); ++i)
    if (in[i]) first += in[i][0] * tensor.strides[i];
  std::memcpy(out, static_cast<const int32_t*>(tensor.data) + first, size_t(count) * sizeof(int32_t));
  return true;
}

}  // namespace

// Buffers of lanes are used again once their values are not needed any more.
void BoundExpression::Parts::plan_rows() {
  const std::span<const ExpressionNode> nodes = expression.nodes();
  const int count = int(nodes.size());
  std::vector<bool> varies(nodes.size());
  std::vector<int> last_use(nodes.size(), -1), buffer(nodes.size(), -1), free;
  for (int n = 0; n < count; ++n) {
    const ExpressionNode& node = nodes[size_t(n)];
    varies[size_t(n)] =
        node.op == ExpressionOp::variable && (node.value == int(ExpressionVariable::kv) || node.value == int(ExpressionVariable::score));
    if (node.op == ExpressionOp::variable && node.value == int(ExpressionVariable::score)) score_node = n;
    for (const int16_t arg : node.args)
      if (arg >= 0 && varies[size_t(arg)]) varies[size_t(n)] = true;
    for (const int16_t arg : node.args)
      if (arg >= 0) last_use[size_t(arg)] = n;
    if (!varies[size_t(n)]) fixed_nodes.push_back(n);
  }
  for (int n = 0; n < count; ++n) {
    if (!varies[size_t(n)]) continue;
    RowStep step{.node = n, .out = -1};
    for (size_t i = 0; i < 3; ++i) {
      const int arg = nodes[size_t(n)].args[i];
      if (arg < 0) continue;
      if (buffer[size_t(arg)] < 0) {  // the same for all keys: its buffer is its own
        buffer[size_t(arg)] = num_buffers++;
        spread.push_back({.node = arg, .out = buffer[size_t(arg)]});
      }
      step.in[i] = buffer[size_t(arg)];
    }
    const ExpressionNode& read = nodes[size_t(n)];
    if (read.op == ExpressionOp::tensor) {
      int others = 0;  // that are not the same for all keys, and not kv
      for (size_t i = 0; i < 3; ++i) {
        const int arg = read.args[i];
        if (arg < 0 || !varies[size_t(arg)]) continue;
        const ExpressionNode& index = nodes[size_t(arg)];
        const bool is_kv = index.op == ExpressionOp::variable && index.value == int(ExpressionVariable::kv) && step.along < 0;
        is_kv ? void(step.along = int(i)) : void(++others);
      }
      if (others > 0) step.along = -1;
    }
    // Before those of its arguments are free: no operation writes over what it reads.
    if (free.empty()) free.push_back(num_buffers++);
    step.out = buffer[size_t(n)] = free.back();
    free.pop_back();
    for (size_t i = 0; i < 3; ++i) {
      const int arg = nodes[size_t(n)].args[i];
      if (arg < 0 || !varies[size_t(arg)] || last_use[size_t(arg)] != n) continue;
      last_use[size_t(arg)] = -1;  // once, where it is two of the arguments
      free.push_back(buffer[size_t(arg)]);
    }
    steps.push_back(step);
  }
  result_buffer = varies.back() ? buffer.back() : -1;
}

bool BoundExpression::Parts::holds(const ExpressionVariables& at, int kv_begin, int kv_end) const {
  return ranges.batch.contains(at.batch) && ranges.head.contains(at.head) && ranges.q.contains(at.q) && ranges.kv.contains(kv_begin) &&
         ranges.kv.contains(kv_end - 1) && ranges.q_len.contains(at.q_len) && ranges.kv_len.contains(at.kv_len);
}

namespace {

// `lanes`: num_buffers of them; `fixed`: as many as there are nodes.
template <class Parts>
void run_steps(const Parts& parts, const ExpressionVariables& at, int kv_begin, int kv_end, const float* scores, float* to_scores,
               uint8_t* to_bytes, RowLanes* lanes, ExpressionBits* fixed) {
  const std::span<const ExpressionNode> nodes = parts.expression.nodes();
  for (const int n : parts.fixed_nodes) fixed[size_t(n)] = parts.value_of(n, at, fixed);
  for (const RowStep& step : parts.spread) std::fill_n(lanes[step.out], kRowChunk, fixed[size_t(step.node)].bits);
  const bool outside = !parts.holds(at, kv_begin, kv_end);
  for (int begin = kv_begin; begin < kv_end;) {
    const int count = std::min(kv_end - begin, kRowChunk);
    const int done = begin - kv_begin;
    // The scores that are given are a buffer as they lie.
    const auto* const given = reinterpret_cast<const int32_t*>(scores == nullptr ? nullptr : scores + done);
    for (const RowStep& step : parts.steps) {
      const ExpressionNode& node = nodes[size_t(step.node)];
      if (given != nullptr && step.node == parts.score_node) continue;
      int32_t* const out = lanes[step.out];
      std::array<const int32_t*, 3> in{};
      for (size_t i = 0; i < 3; ++i)
        in[i] = step.in[i] < 0 ? nullptr : given != nullptr && node.args[i] == parts.score_node ? given : lanes[step.in[i]];
      if (node.op == ExpressionOp::variable && node.value == int(ExpressionVariable::kv)) {
        for (int i = 0; i < count; ++i) out[i] = begin + i;
      } else if (node.op == ExpressionOp::variable) {
        std::fill_n(out, count, ExpressionBits::of(at.score).bits);
      } else if (node.op == ExpressionOp::tensor) {
        const ExpressionTensorData& tensor = parts.tensors[size_t(node.value)];
        const bool checked = outside || parts.checked[size_t(step.node)];
        if (checked || step.along < 0 || !copy_elements(tensor, node.type, size_t(step.along), count, out, in))
          read_elements(tensor, node.type, checked, count, out, in);
      } else {
        with_operation(node.op, operand_type(nodes, node),
                       [&](const auto& f) { RowOf<decltype(&std::decay_t<decltype(f)>::operator())>::run(f, count, out, in); });
      }
    }
    const bool is_given = given != nullptr && parts.score_node == int(nodes.size()) - 1;
    const int32_t* const result = is_given ? given : parts.result_buffer < 0 ? nullptr : lanes[parts.result_buffer];
    const int32_t same = fixed[nodes.size() - 1].bits;
    if (to_scores && result) {
      std::memmove(to_scores + done, result, size_t(count) * sizeof(float));
    } else if (to_scores) {
      for (int i = 0; i < count; ++i) to_scores[done + i] = ExpressionBits{same}.real();
    } else {
      for (int i = 0; i < count; ++i) to_bytes[done + i] = uint8_t(result ? result[i] : same);
    }
    begin += count;
  }
}

}  // namespace

void BoundExpression::Parts::run_row(const ExpressionVariables& at, int kv_begin, int kv_end, const float* scores, float* to_scores,
                                     uint8_t* to_bytes) const {
  if (kv_begin >= kv_end) return;
  if (expression.nodes().size() <= kFewNodes) {
    alignas(64) RowLanes lanes[kFewNodes];
    ExpressionBits fixed[kFewNodes];
    run_steps(*this, at, kv_begin, kv_end, scores, to_scores, to_bytes, lanes, fixed);
  } else {
    alignas(64) RowLanes lanes[Expression::kMaxNodes];
    ExpressionBits fixed[Expression::kMaxNodes];
    run_steps(*this, at, kv_begin, kv_end, scores, to_scores, to_bytes, lanes, fixed);
  }
}

void BoundExpression::score_row(const ExpressionVariables& at, int kv_begin, int kv_end, float* scores) const {
  check(parts_->expression.type() == ExpressionType::real, "expression.type", "a score is a float expression, got {}",
        to_string(parts_->expression.type()));
  parts_->run_row(at, kv_begin, kv_end, scores, scores, nullptr);
}

void BoundExpression::mask_row(const ExpressionVariables& at, int kv_begin, int kv_end, uint8_t* shown, const float* scores) const {
  check(parts_->expression.type() == ExpressionType::boolean, "expression.type", "a mask is a bool expression, got {}",
        to_string(parts_->expression.type()));
  parts_->run_row(at, kv_begin, kv_end, scores, nullptr, shown);
}

}  // namespace imbrex
