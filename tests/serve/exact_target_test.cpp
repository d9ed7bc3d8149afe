// Targets of recurrent layers that are scanned have what the judge makes of them token by token, and so have what is left out.
#include "serve/exact_target.h"

#include <gtest/gtest.h>

#include <cmath>

#include "imbrex/model.h"

namespace imbrex::serve {
namespace {

RecurrentSpec layer_of(const char* model) {
  const ModelSpec spec = load_model(model);
  for (const ModelLayer& layer : spec.layers)
    if (const auto* recurrent = std::get_if<RecurrentSpec>(&layer.spec)) return *recurrent;
  ADD_FAILURE() << model << " has no recurrent layer";
  return {};
}

std::vector<uint64_t> keys_of(int tokens) {
  std::vector<uint64_t> keys;
  for (int p = 0; p < tokens; ++p) keys.push_back(token_key(hash_numbers(7, uint64_t(p)), p));
  return keys;
}

// The largest difference as a share of what the judge allows, and of the bounds as a share of his; bounds of scans are not smaller.
struct Difference {
  double numbers = 0, bounds = 0;
  void add(const std::vector<double>& wanted, const std::vector<double>& allowed, const std::vector<double>& got,
           const std::vector<double>& room) {
    ASSERT_EQ(wanted.size(), got.size());
    for (size_t i = 0; i < wanted.size(); ++i) {
      numbers = std::max(numbers, std::abs(got[i] - wanted[i]) / allowed[i]);
      bounds = std::max(bounds, std::abs(room[i] / allowed[i] - 1));
    }
  }
};

void expect_same(const RecurrentSpec& spec, int tokens, bool rounded_products) {
  SCOPED_TRACE(spec.str());
  const Synthetic synthetic(3);
  const RecurrentParameters parameters(spec, 3, 5);
  const std::vector<uint64_t> keys = keys_of(tokens);
  const int heads = RecurrentTarget::heads_of(spec);
  for (int first = 0; first < spec.num_v_heads; first += heads) {
    const RecurrentTarget target{.spec = &spec, .parameters = &parameters, .first_head = first, .rounded_products = rounded_products};
    const RecurrentExpected judged = judged_target(target, synthetic, 5, keys), scanned = expected_of_target(target, synthetic, 5, keys);
    EXPECT_EQ(judged.conv_state.bytes, scanned.conv_state.bytes);
    Difference out, state;
    out.add(judged.out, judged.allowed, scanned.out, scanned.allowed);
    state.add(judged.state, judged.allowed_state, scanned.state, scanned.allowed_state);
    EXPECT_LT(out.numbers, 1e-6);
    EXPECT_LT(state.numbers, 1e-6);
    EXPECT_LT(out.bounds, 1e-3);
    EXPECT_LT(state.bounds, 1e-3);
  }
}

RecurrentSpec narrowed(RecurrentSpec spec, int shared, int key_heads) {
  spec.num_k_heads = key_heads, spec.num_v_heads = shared * key_heads;
  if (spec.norm_groups > 0) spec.norm_groups = key_heads;
  return spec;
}

TEST(ExactTarget, ScansAreTheJudges) {
  for (const int tokens : {1, 3, 16, 75}) {
    expect_same(narrowed(layer_of("qwen3-next-80b-a3b"), 2, 1), tokens, true);
    expect_same(narrowed(layer_of("kimi-linear-48b-a3b"), 1, 2), tokens, true);
    expect_same(narrowed(layer_of("nemotron-3-nano-30b-a3b"), 3, 2), tokens, false);
    expect_same(narrowed(layer_of("minimax-01"), 1, 2), tokens, true);
    expect_same(narrowed(layer_of("granite-4-h-small"), 2, 1), tokens, false);
  }
}

// Heads of channels with a rate of their own, one value wide, and states of 16 bits are the judge's.
TEST(ExactTarget, OthersAreJudged) {
  expect_same(narrowed(layer_of("falcon-mamba-7b"), 24, 1), 9, false);
  RecurrentSpec half = narrowed(layer_of("qwen3-next-80b-a3b"), 1, 1);
  half.state_dtype = DType::bf16;
  expect_same(half, 9, true);
}

// A head that forgets fast, after many tokens: the first of them weigh nothing.
TEST(ExactTarget, ForgottenTokensAreLeftOut) {
  for (const char* model : {"qwen3-next-80b-a3b", "nemotron-3-nano-30b-a3b"}) {
    RecurrentSpec spec = narrowed(layer_of(model), 2, 4);
    spec.head_dim_k = spec.head_dim_v = 16;
    spec.gate_min = 40;  // the least step
    expect_same(spec, 900, true);
  }
}

}  // namespace
}  // namespace imbrex::serve
