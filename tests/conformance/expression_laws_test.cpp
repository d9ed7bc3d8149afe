// Laws of expressions: one that says what a field of the spec says gives what the field gives, and parts that expressions make of the keys
// join to a whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "imbrex/merge.h"
#include "matrix.h"

namespace imbrex::test {
namespace {

class ExpressionLaws : public testing::TestWithParam<Target> {};

// Judged by what the built-in is expected to give, from another seed than the conformance cases have.
TEST_P(ExpressionLaws, AnExpressionIsItsBuiltInTwin) {
  struct Twins {
    Mask mask;
    ScoreMod score;
    const char *mask_mod, *score_mod;  // "": none
  };
  const Twins twins[] = {
      {{.causal = true}, {}, "kv <= q", ""},
      {{.causal = true}, {}, "kv <= q & q_len > 0", ""},
      {{.causal = true, .window_left = 30}, {}, "kv <= q & q - kv <= 30", ""},
      {{.causal = true, .window_left = 30}, {}, "kv <= q & q - kv <= 30 & q_len > 0", ""},
      {{.causal = true, .chunk = 48}, {}, "q // 48 == kv // 48 & kv <= q", ""},
      {{.causal = true}, {.soft_cap = 20.f}, "kv <= q & q_len > 0", "20 * tanh(score / 20)"},
      {{.causal = true}, {.alibi = true}, "kv <= q", "float slope[]; score + slope[head] * (kv - q)"},
      {{.causal = false, .window_left = 20, .window_right = 9}, {.sinks = true}, "q - kv <= 20 & kv - q <= 9", ""},
      {{.causal = false, .window_left = 20, .window_right = 9}, {.sinks = true}, "q - kv <= 20 & kv - q <= 9 & q_len > 0", ""},
  };
  int compared = 0;
  for (const Twins& twin : twins) {
    Case c;
    c.name = "expression_law";
    c.spec.num_q_heads = 6, c.spec.num_kv_heads = 2, c.spec.head_dim_qk = c.spec.head_dim_v = 64;
    c.spec.mask = twin.mask, c.spec.score = twin.score;
    c.requests = {{8, 130, 0}, {1, 40, 1}, {140, 250, 2}, {0, 9, 3}, {1, 390, 4}};
    c.seed = 77;
    const CaseInputs built_in = make_inputs(c);
    CaseInputs in = built_in;
    in.spec.mask = {.causal = false};
    in.spec.score = {.sinks = twin.score.sinks}, in.alibi_slopes = {};
    if (*twin.mask_mod != 0) in.spec.mask_mod = parse_expression(twin.mask_mod);
    if (*twin.score_mod != 0) in.spec.score_mod = parse_expression(twin.score_mod);
    if (twin.score.alibi) in.expression_tensors.push_back({"slope", built_in.alibi_slopes});
    c.spec = in.spec;
    RunOptions o;
    if (!runs(c, GetParam()) || !options_for(c, GetParam(), o)) continue;
    o.check_cache = false;
    const RunResult result = run_case(*GetParam().backend, GetParam().device, in, o);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    const Judgement judgement = judge(expect(built_in), result);
    EXPECT_TRUE(judgement.pass()) << in.spec.str() << ": " << judgement.failure;
    ++compared;
  }
  if (compared == 0) GTEST_SKIP() << GetParam().name() << " has no expressions";
}

// Dual-chunk attention: keys of the query's chunk, of the chunk in front of it, and of all chunks before that one, each with queries of
// their own, which stand here for three ways to rotate the same one. The whole is one softmax over all of these logits.
class DualChunk {
 public:
  static constexpr int kChunk = 24, kParts = 3;
  static constexpr std::array<double, kParts> kFactors{1.0, -1.0, 0.5};  // of the queries; bf16 has the products

  DualChunk() {
    case_.name = "dual_chunk_law";
    case_.spec.num_q_heads = 6, case_.spec.num_kv_heads = 2, case_.spec.head_dim_qk = case_.spec.head_dim_v = 64;
    case_.requests = {{140, 250, 0}, {1, 130, 1}, {8, 70, 2}, {0, 9, 3}, {30, 30, 4}};
    case_.seed = 78;
    whole_ = make_inputs(case_);
  }

  CaseInputs part(size_t p) const {
    CaseInputs in = whole_;
    if (p == 0) {
      in.spec.mask.chunk = kChunk;
    } else {
      in.spec.mask.causal = false;
      in.spec.mask_mod = parse_expression(p == 1 ? "q // 24 == kv // 24 + 1" : "q // 24 > kv // 24 + 1");
    }
    for (int64_t i = 0; i < in.q.num_elements(); ++i) in.q.set(i, whole_.q.get(i) * kFactors[p]);
    return in;
  }
  Case case_of(const CaseInputs& in) const {
    Case c = case_;
    c.spec = in.spec;
    return c;
  }

  // The greatest difference of an output from what loops over all keys give.
  double worst_error(const RunResult& result) const {
    const AttentionSpec& spec = whole_.spec;
    double worst = 0;
    int64_t token = 0, first_key = 0;
    for (const CaseRequest& r : whole_.requests) {
      for (int i = 0; i < r.q_len; ++i, ++token)
        for (int h = 0; h < spec.num_q_heads; ++h) worst = std::max(worst, error_of(result, token, h, r.seq_len - r.q_len + i, first_key));
      first_key += r.seq_len;
    }
    return worst;
  }

 private:
  double error_of(const RunResult& result, int64_t token, int head, int position, int64_t first_key) const {
    const AttentionSpec& spec = whole_.spec;
    const int64_t dim = spec.head_dim_v, row = token * spec.num_q_heads + head, kv_head = head / spec.group_size();
    std::vector<double> sums(size_t(dim), 0.0);
    double weights = 0, worst = 0;
    for (int j = 0; j <= position; ++j) {
      const int64_t key = ((first_key + j) * spec.num_kv_heads + kv_head) * dim;
      double product = 0;
      for (int64_t d = 0; d < dim; ++d) product += whole_.q.get(row * dim + d) * whole_.k.get(key + d);
      const auto p = size_t(std::min(position / kChunk - j / kChunk, kParts - 1));
      const double weight = std::exp(product * kFactors[p] * double(spec.scale()));
      weights += weight;
      for (int64_t d = 0; d < dim; ++d) sums[size_t(d)] += weight * whole_.v.get(key + d);
    }
    for (int64_t d = 0; d < dim; ++d)
      worst = std::max(worst, std::abs(sums[size_t(d)] / weights - double(result.out[size_t(row * dim + d)])));
    return std::max(worst, std::abs(std::log(weights) - double(result.lse[size_t(row)])));
  }

  Case case_;
  CaseInputs whole_;
};

TEST_P(ExpressionLaws, PartsOfDualChunksJoinToTheWhole) {
  const DualChunk dual;
  std::vector<RunResult> parts;
  for (size_t p = 0; p < DualChunk::kParts; ++p) {
    const CaseInputs in = dual.part(p);
    const Case c = dual.case_of(in);
    RunOptions o;
    if (!runs(c, GetParam()) || !options_for(c, GetParam(), o)) GTEST_SKIP() << GetParam().name() << " does not run " << in.spec.str();
    o.check_cache = false;
    parts.push_back(run_case(*GetParam().backend, GetParam().device, in, o));
    EXPECT_TRUE(parts.back().violations.empty()) << parts.back().violations.front();
  }
  RunResult merged = parts[0];
  const int64_t heads = 6, dim = 64, tokens = int64_t(merged.lse.size()) / heads;
  const auto out = [&](RunResult& r) { return TensorView::contiguous(r.out.data(), DType::f32, {tokens, heads, dim}); };
  const auto lse = [&](RunResult& r) { return TensorView::contiguous(r.lse.data(), DType::f32, {tokens, heads}); };
  std::vector<PartialResult> partial;
  for (RunResult& r : parts) partial.push_back({out(r), lse(r)});
  merge_partial_results(partial, out(merged), lse(merged));
  EXPECT_LE(dual.worst_error(merged), 0.03);
}

INSTANTIATE_TEST_SUITE_P(Backends, ExpressionLaws, testing::ValuesIn(targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test
