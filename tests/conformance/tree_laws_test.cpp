// Laws of trees of drafts: a tree is its paths, each computed as a chain; it is the mask of bytes that shows the same keys; and a tree that
// is a chain is causal.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "imbrex/parallel.h"
#include "matrix.h"
#include "tree_rows.h"

namespace imbrex::test {
namespace {

std::vector<Case> tree_cases() {
  struct Layer {
    DType q, kv;
    TreePattern tree;
    Mask mask;
    ScoreMod score;
  };
  using enum TreePattern;
  const Layer layers[] = {
      {DType::bf16, DType::bf16, random, {.tree = true}, {}},
      {DType::f32, DType::f32, random, {.window_left = 3, .tree = true}, {.alibi = true}},
      {DType::bf16, DType::fp8_e4m3, binary, {.window_left = 30, .tree = true}, {.sinks = true}},
      {DType::bf16, DType::bf16, forest, {.chunk = 7, .chunk_lookback = 1, .tree = true}, {.soft_cap = 20.f}},
      {DType::f16, DType::f16, random, {.tree = true}, {.relative_buckets = 32, .relative_max_distance = 128}},
  };
  std::vector<Case> cases;
  for (const Layer& layer : layers) {
    Case c;
    c.name = "tree_law";
    c.spec.num_q_heads = 6, c.spec.num_kv_heads = 2, c.spec.head_dim_qk = c.spec.head_dim_v = 64;
    c.spec.q_dtype = layer.q, c.spec.kv_dtype = layer.kv;
    c.spec.mask = layer.mask, c.spec.score = layer.score;
    c.tree = layer.tree;
    c.requests = {{8, 130, 0}, {1, 40, 1}, {12, 250, 2}, {70, 90, 3}, {64, 64, 5}, {0, 9, 6}, {6, 390, 7}};
    c.seed = 40 + cases.size();
    cases.push_back(std::move(c));
  }
  return cases;
}

class TreeLaws : public testing::TestWithParam<Target> {
 protected:
  // The cases that the target runs.
  std::vector<Case> own_cases() const {
    std::vector<Case> own;
    for (Case c : tree_cases()) {
      if (holds(GetParam().kv_format, c.spec)) c.spec.kv_format = GetParam().kv_format;
      if (runs(c, GetParam())) own.push_back(c);
    }
    return own;
  }
  bool on_cpu() const { return !GetParam().on_gpu(); }
  RunOptions options(const Case& c) const {
    RunOptions o;
    EXPECT_TRUE(options_for(c, GetParam(), o));
    o.check_cache = false;
    return o;
  }
  RunResult run(const CaseInputs& in, const RunOptions& o) const {
    RunResult result = run_case(*GetParam().backend, GetParam().device, in, o);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
};

TEST_P(TreeLaws, ATreeIsItsPaths) {
  int paths = 0;
  for (const Case& c : own_cases()) {
    const CaseInputs in = make_inputs(c);
    const RunResult tree = run(in, options(c));
    const int64_t heads = c.spec.num_q_heads;
    int64_t token = 0, key = 0;
    for (const CaseRequest& r : c.requests) {
      const int context = r.seq_len - r.q_len;
      for (int leaf = std::max(0, r.q_len - 3); leaf < r.q_len; ++leaf, ++paths) {
        std::vector<int64_t> tokens, keys;
        for (int j = 0; j < context; ++j) keys.push_back(key + j);
        for (int i = leaf; i >= 0; i = in.parent_of(token, i)) tokens.push_back(i);
        std::ranges::reverse(tokens);
        for (int64_t& i : tokens) keys.push_back(key + context + i), i += token;
        CaseInputs path = in;
        path.spec.mask.tree = false, path.draft_parents = {};
        path.requests = {{int(tokens.size()), int(keys.size()), 0}};
        path.q = rows_at(in.q, tokens), path.k = rows_at(in.k, keys), path.v = rows_at(in.v, keys);
        const RunResult own{
            .out = rows_at(tree.out, tokens, heads * c.spec.head_dim_v), .lse = rows_at(tree.lse, tokens, heads), .violations = {}};
        const Judgement judgement = judge(expect(path), own);
        EXPECT_TRUE(judgement.pass()) << c.spec.str() << ", path to token " << leaf << " of " << r.q_len << ": " << judgement.failure;
      }
      token += r.q_len, key += r.seq_len;
    }
  }
  if (paths == 0) GTEST_SKIP() << GetParam().name() << " has no trees";
}

TEST_P(TreeLaws, ATreeIsTheMaskOfItsBytes) {
  int compared = 0;
  for (const Case& c : own_cases()) {
    if (c.spec.score.relative_buckets > 0 || c.spec.score.alibi) continue;  // keys have other positions there
    CaseInputs in = make_inputs(c), bytes = in;
    bytes.spec.mask = {.causal = false, .custom = true}, bytes.draft_parents = {};
    std::vector<uint8_t> shown;
    int64_t token = 0;
    for (const CaseRequest& r : c.requests) {
      for (int i = 0; i < r.q_len; ++i)
        for (int j = 0; j < r.seq_len; ++j) {
          const int64_t p = in.position_of(r, token, i), at = in.key_position_of(r, token, j);
          const Mask& mask = c.spec.mask;
          const bool in_chunk = mask.chunk == 0 || (p / mask.chunk - at / mask.chunk <= mask.chunk_lookback);
          shown.push_back(in.tree_shows(r, token, i, j) && at <= p && (mask.window_left < 0 || at >= p - mask.window_left) && in_chunk);
        }
      token += r.q_len;
    }
    bytes.custom_mask = HostTensor::make(DType::u8, {int64_t(shown.size())});
    std::ranges::copy(shown, bytes.custom_mask.bytes.begin());
    const RunOptions o = options(c);
    if (!GetParam().backend->unsupported(run_spec(bytes, o), GetParam().device).empty()) continue;
    const RunResult tree = run(in, o);
    ++compared;
    // The rounding of a soft cap, and kernels of GPUs, are others under a mask of bytes.
    if (on_cpu() && c.spec.score.soft_cap == 0.f) expect_same(tree, run(bytes, o), c.spec.str() + " as bytes");
    const Judgement judgement = judge(expect(bytes), tree);
    EXPECT_TRUE(judgement.pass()) << c.spec.str() << ": " << judgement.failure;
  }
  if (compared == 0) GTEST_SKIP() << GetParam().name() << " has no trees, or no masks of bytes";
}

TEST_P(TreeLaws, AChainIsCausal) {
  int compared = 0;
  for (const Case& c : own_cases()) {
    CaseInputs causal = make_inputs(c);
    causal.spec.mask.tree = false, causal.draft_parents = {};
    const RunResult expected = run(causal, options(c));
    CaseInputs chain = causal;
    chain.spec.mask.tree = true;
    const RunResult without_parents = run(chain, options(c));
    std::vector<int32_t> parents;
    for (const CaseRequest& r : c.requests)
      for (int i = 0; i < r.q_len; ++i) parents.push_back(i - 1);
    chain.draft_parents = tensor_of(parents);
    const RunResult with_parents = run(chain, options(c));
    expect_same(with_parents, without_parents, c.spec.str() + " giving the parents of a chain");
    if (on_cpu()) expect_same(with_parents, expected, c.spec.str() + " being a chain");
    const Judgement judgement = judge(expect(causal), with_parents);
    EXPECT_TRUE(judgement.pass()) << c.spec.str() << ": " << judgement.failure;
    ++compared;
  }
  if (compared == 0) GTEST_SKIP() << GetParam().name() << " has no trees";
}

TEST_P(TreeLaws, NeighboursPagesAndThreadsDoNotMatter) {
  int compared = 0;
  for (const Case& c : own_cases()) {
    const RunResult together = run(make_inputs(c), options(c));
    const int64_t heads = c.spec.num_q_heads;
    int64_t token = 0;
    for (const CaseRequest& r : c.requests) {
      std::vector<int64_t> tokens;
      for (int i = 0; i < r.q_len; ++i) tokens.push_back(token++);
      Case alone = c;
      alone.requests = {r};
      const RunResult own{
          .out = rows_at(together.out, tokens, heads * c.spec.head_dim_v), .lse = rows_at(together.lse, tokens, heads), .violations = {}};
      expect_same(run(make_inputs(alone), options(alone)), own, c.spec.str() + " being alone");
    }
    RunOptions other = options(c);
    if (other.block_size > 0 && GetParam().kv_format == KvFormat::strided && on_cpu()) other.block_size = 3, other.csr = true;
    ThreadPool pool(3);
    other.threads = pool.parallel_for();
    expect_same(run(make_inputs(c), other), together, c.spec.str() + " other pages");
    ++compared;
  }
  if (compared == 0) GTEST_SKIP() << GetParam().name() << " has no trees";
}

// Two requests with the same prompt read it together: one is a chain, the others are trees behind it.
TEST_P(TreeLaws, BlocksInCommonDoNotMatter) {
  int compared = 0;
  for (Case c : own_cases()) {
    c.requests = {{8, 2100, 0}, {1, 2100, 0}, {6, 2150, 0}, {3, 4300, 0}, {1, 4290, 0}};
    RunOptions apart = options(c);
    if (apart.block_size == 0) apart.block_size = 16;
    RunOptions together = apart;
    together.share_blocks = true;
    const CaseInputs in = make_inputs(c);
    expect_same(run(in, together), run(in, apart), c.spec.str() + " blocks in common");
    ++compared;
  }
  if (compared == 0) GTEST_SKIP() << GetParam().name() << " has no trees";
}

INSTANTIATE_TEST_SUITE_P(Backends, TreeLaws, testing::ValuesIn(targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test
