// Laws of trees of drafts in latent attention, for every backend and each of the ways: a tree is its paths, each computed as a chain, it is
// the mask of bytes that shows the same keys, and a tree that is a chain is causal.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "mla_targets.h"
#include "tree_rows.h"

namespace imbrex::test {
namespace {

struct Way {
  const char* name;
  MlaPlanMaker make;
};

std::vector<Way> tree_ways(const BackendOf<MlaFamily>& backend) {
  std::vector<Way> ways{{"as it chooses", {}}};
  if (!is_composite(backend)) return ways;
  ways.push_back({"in latent space", forced_way(false, 0)});
  ways.push_back({"chains expanded", forced_way(true, 48)});
  ways.push_back({"in slices", in_slices(false, 16, 0)});
  ways.push_back({"chains expanded in slices", in_slices(true, 16, 2)});
  return ways;
}

std::vector<MlaCase> mla_tree_cases() {
  struct Layer {
    DType dtype, kv;
    TreePattern tree;
    Mask mask;
    bool sinks;
  };
  using enum TreePattern;
  const Layer layers[] = {{DType::bf16, DType::bf16, random, {.tree = true}, false},
                          {DType::f32, DType::f32, binary, {.window_left = 3, .tree = true}, true},
                          {DType::bf16, DType::fp8_e4m3, forest, {.window_left = 30, .tree = true}, false},
                          {DType::f16, DType::f16, random, {.chunk = 7, .chunk_lookback = 1, .tree = true}, true}};
  std::vector<MlaCase> all;
  for (const Layer& layer : layers) {
    MlaCase c{.spec = {.num_heads = 5, .kv_lora_rank = 64, .qk_nope_dim = 40, .qk_rope_dim = 8, .v_dim = 24}, .attention = {}};
    c.spec.dtype = layer.dtype, c.spec.kv_dtype = layer.kv, c.spec.mask = layer.mask, c.spec.sinks = layer.sinks;
    c.attention.spec = c.spec.latent_spec();
    c.attention.tree = layer.tree;
    c.attention.requests = {{8, 130, 0}, {1, 40, 1}, {12, 250, 2}, {70, 90, 3}, {64, 64, 5}, {0, 9, 6}, {6, 190, 7}, {90, 101, 8}};
    c.attention.q_gain = 3.f;
    c.attention.out_dtype = c.spec.dtype;
    c.attention.seed = 50 + all.size();
    all.push_back(std::move(c));
  }
  return all;
}

class MlaTreeLaws : public testing::TestWithParam<MlaTarget> {
 protected:
  bool runs(const MlaSpec& spec) const { return GetParam().backend->unsupported(spec, GetParam().device).empty(); }
  bool on_cpu() const { return GetParam().device.device.type == DeviceType::cpu; }
  RunResult run(const MlaCaseInputs& in, const RunOptions& options, const Way& way, const MlaMirrorOptions& mirror = {}) const {
    RunResult result = run_case(*GetParam().backend, GetParam().device, in, options, way.make, mirror);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
  // body(case, its inputs, options, way)
  template <class Body>
  void for_each(const Body& body) const {
    for (const MlaCase& c : mla_tree_cases()) {
      if (!runs(c.spec)) continue;
      RunOptions options = default_options(c.attention);
      options.check_cache = false;
      for (const Way& way : tree_ways(*GetParam().backend)) body(c, make_inputs(c), options, way);
    }
  }
};

void expect_same_bits(const RunResult& a, const RunResult& b, const std::string& what) {
  EXPECT_TRUE(bit_identical(a.out, b.out)) << what;
  EXPECT_TRUE(bit_identical(a.lse, b.lse)) << what;
}

MlaCaseInputs with_mask(MlaCaseInputs in, const Mask& mask) {
  in.spec.mask = mask;
  in.attention.spec = in.spec.latent_spec();
  in.attention.draft_parents = {};
  return in;
}

TEST_P(MlaTreeLaws, ATreeIsItsPaths) {
  for_each([&](const MlaCase& c, const MlaCaseInputs& in, const RunOptions& options, const Way& way) {
    const RunResult tree = run(in, options, way);
    const int64_t heads = c.spec.num_heads;
    int64_t token = 0, key = 0;
    for (const CaseRequest& r : c.attention.requests) {
      const int context = r.seq_len - r.q_len;
      for (int leaf = std::max(0, r.q_len - 3); leaf < r.q_len; ++leaf) {
        std::vector<int64_t> tokens, keys;
        for (int j = 0; j < context; ++j) keys.push_back(key + j);
        for (int i = leaf; i >= 0; i = in.attention.parent_of(token, i)) tokens.push_back(i);
        std::ranges::reverse(tokens);
        for (int64_t& i : tokens) keys.push_back(key + context + i), i += token;
        Mask chain = c.spec.mask;
        chain.tree = false;
        MlaCaseInputs path = with_mask(in, chain);
        path.attention.requests = {{int(tokens.size()), int(keys.size()), 0}};
        path.attention.q = rows_at(in.attention.q, tokens);
        path.attention.k = rows_at(in.attention.k, keys), path.attention.v = rows_at(in.attention.v, keys);
        const RunResult own{
            .out = rows_at(tree.out, tokens, heads * c.spec.out_dim()), .lse = rows_at(tree.lse, tokens, heads), .violations = {}};
        const Judgement judgement = judge(expect(path), own);
        EXPECT_TRUE(judgement.pass()) << c.spec.str() << " " << way.name << ", path to token " << leaf << " of " << r.q_len << ": "
                                      << judgement.failure;
      }
      token += r.q_len, key += r.seq_len;
    }
  });
}

// A mask of bytes keeps every request in latent space.
TEST_P(MlaTreeLaws, ATreeIsTheMaskOfItsBytes) {
  for_each([&](const MlaCase& c, const MlaCaseInputs& in, const RunOptions& options, const Way& way) {
    MlaCaseInputs bytes = with_mask(in, {.causal = false, .custom = true});
    if (!runs(bytes.spec)) return;
    std::vector<uint8_t> shown;
    int64_t token = 0;
    for (const CaseRequest& r : c.attention.requests) {
      for (int i = 0; i < r.q_len; ++i)
        for (int j = 0; j < r.seq_len; ++j) {
          const int64_t p = in.attention.position_of(r, token, i), at = in.attention.key_position_of(r, token, j);
          const Mask& mask = c.spec.mask;
          const bool in_chunk = mask.chunk == 0 || (p / mask.chunk - at / mask.chunk <= mask.chunk_lookback);
          shown.push_back(in.attention.tree_shows(r, token, i, j) && at <= p && (mask.window_left < 0 || at >= p - mask.window_left) &&
                          in_chunk);
        }
      token += r.q_len;
    }
    bytes.attention.custom_mask = HostTensor::make(DType::u8, {int64_t(shown.size())});
    std::ranges::copy(shown, bytes.attention.custom_mask.bytes.begin());
    const RunResult tree = run(in, options, way);
    if (on_cpu() && std::string_view(way.name) == "in latent space")
      expect_same_bits(tree, run(bytes, options, way), c.spec.str() + " as bytes");
    const Judgement judgement = judge(expect(bytes), tree);
    EXPECT_TRUE(judgement.pass()) << c.spec.str() << " " << way.name << ": " << judgement.failure;
  });
}

// Also where chains of more tokens than a tree may have are cut, and where their keys are expanded.
TEST_P(MlaTreeLaws, AChainIsCausal) {
  for_each([&](const MlaCase& c, const MlaCaseInputs& in, const RunOptions& options, const Way& way) {
    Mask mask = c.spec.mask;
    mask.tree = false;
    const MlaCaseInputs causal = with_mask(in, mask);
    const RunResult expected = run(causal, options, way);
    MlaCaseInputs chain = with_mask(in, c.spec.mask);
    const RunResult without_parents = run(chain, options, way);
    std::vector<int32_t> parents;
    for (const CaseRequest& r : c.attention.requests)
      for (int i = 0; i < r.q_len; ++i) parents.push_back(i - 1);
    chain.attention.draft_parents = tensor_of(parents);
    const RunResult with_parents = run(chain, options, way);
    const std::string what = c.spec.str() + " " + way.name;
    expect_same_bits(with_parents, without_parents, what + " giving the parents of a chain");
    if (on_cpu()) expect_same_bits(with_parents, expected, what + " being a chain");
    const Judgement judgement = judge(expect(causal), with_parents);
    EXPECT_TRUE(judgement.pass()) << what << ": " << judgement.failure;
  });
}

TEST_P(MlaTreeLaws, NeighboursAndPagesDoNotMatter) {
  for_each([&](const MlaCase& c, const MlaCaseInputs& in, const RunOptions& options, const Way& way) {
    const RunResult together = run(in, options, way);
    const int64_t heads = c.spec.num_heads;
    int64_t token = 0;
    for (const CaseRequest& r : c.attention.requests) {
      std::vector<int64_t> tokens;
      for (int i = 0; i < r.q_len; ++i) tokens.push_back(token++);
      MlaCase alone = c;
      alone.attention.requests = {r};
      const RunResult own{
          .out = rows_at(together.out, tokens, heads * c.spec.out_dim()), .lse = rows_at(together.lse, tokens, heads), .violations = {}};
      if (!tokens.empty()) expect_same_bits(run(make_inputs(alone), options, way), own, c.spec.str() + " " + way.name + " alone");
    }
    RunOptions other = options;
    other.block_size = 64, other.csr = true, other.page_seed = 9;
    expect_same_bits(run(in, other, way), together, c.spec.str() + " " + way.name + " other pages");
  });
}

TEST_P(MlaTreeLaws, GraphsChangeNoBit) {
  if (on_cpu()) GTEST_SKIP() << "for GPUs";
  for_each([&](const MlaCase& c, const MlaCaseInputs& in, const RunOptions& options, const Way& way) {
    expect_same_bits(run(in, options, way, {.in_graph = true}), run(in, options, way), c.spec.str() + " " + way.name);
  });
}

INSTANTIATE_TEST_SUITE_P(All, MlaTreeLaws, testing::ValuesIn(mla_targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test
