// Expressions along rows of keys: operation by operation on a few keys at a time, in loops that compilers make vectors of.
#include <algorithm>

#include "core/check.h"
#include "expression/bound_parts.h"

// What is compiled for several instruction sets, of which the loader takes the widest that the CPU has; with all that it calls. Sanitizers
// are not there yet when the loader asks.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define IMBREX_WIDEST __attribute__((flatten, target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define IMBREX_WIDEST
#endif

namespace imbrex {
namespace {

constexpr int kRowChunk = 128;  // keys at a time: the buffers of a usual expression stay in L1
constexpr int kFewBuffers = 24;

using RowLanes = int32_t[kRowChunk];

template <class F>
struct RowOf;
template <class F, class R, class... T>
struct RowOf<R (F::*)(T...) const> {
  template <size_t... kPlaces>
  static void run(const F& f, int count, int32_t* __restrict out, const std::array<const int32_t*, 3>& in,
                  std::index_sequence<kPlaces...>) {
    const int32_t* const lanes[] = {in[kPlaces]...};
    for (int i = 0; i < count; ++i) out[i] = ExpressionBits::of(f(value_as<T>(ExpressionBits{lanes[kPlaces][i]})...)).bits;
  }
  static void run(const F& f, int count, int32_t* out, const std::array<const int32_t*, 3>& in) {
    run(f, count, out, in, std::make_index_sequence<sizeof...(T)>());
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

// `lanes`: num_buffers of them.
template <class Parts>
IMBREX_WIDEST void run_steps(const Parts& parts, const ExpressionVariables& at, int kv_begin, int kv_end, const float* scores, float* to_scores,
               uint8_t* to_bytes, RowLanes* lanes) {
  const std::span<const ExpressionNode> nodes = parts.expression.nodes();
  std::array<ExpressionBits, Expression::kMaxNodes> fixed;
  for (const int n : parts.fixed_nodes) fixed[size_t(n)] = parts.value_of(n, at, fixed.data());
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
        read_elements(parts.tensors[size_t(node.value)], node.type, outside || parts.checked[size_t(step.node)], count, out, in);
      } else {
        with_operation(node.op, operand_type(nodes, node),
                       [&](const auto& f) { RowOf<decltype(&std::decay_t<decltype(f)>::operator())>::run(f, count, out, in); });
      }
    }
    const bool is_given = given != nullptr && parts.score_node == int(nodes.size()) - 1;
    const int32_t* const result = is_given ? given : parts.result_buffer < 0 ? nullptr : lanes[parts.result_buffer];
    const int32_t same = fixed[nodes.size() - 1].bits;
    if (to_scores) {
      for (int i = 0; i < count; ++i) to_scores[done + i] = ExpressionBits{result ? result[i] : same}.real();
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
  if (num_buffers <= kFewBuffers) {
    alignas(64) RowLanes lanes[kFewBuffers];
    run_steps(*this, at, kv_begin, kv_end, scores, to_scores, to_bytes, lanes);
  } else {
    alignas(64) RowLanes lanes[Expression::kMaxNodes];
    run_steps(*this, at, kv_begin, kv_end, scores, to_scores, to_bytes, lanes);
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
