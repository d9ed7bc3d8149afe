// What other engines once got wrong about pages, slots and the parts of a batch. See attention_quirks_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "imbrex/select.h"
#include "quirks/step.h"

namespace imbrex::test {
namespace {

// FA3 and FA4 in SGLang take new slots to rise with the tokens, and FlashInfer-MLA and FlashMLA read outside of the cache where pages of
// requests alternate (SGLang's own table of 2026-05-27); vLLM and FLA's kernels take page or slot 0 for padding.
TEST(CacheQuirks, PagesMayFallAlternateAndBeginWithBlockZero) {
  QuirkStep step({{40, 70}, {37, 80}, {1, 33}});
  step.pages = {{12, 9, 6, 3, 0}, {13, 10, 7, 4, 1}, {2, 14, 5}};
  step.check();
}

// NaN in parts of pages that nobody has written reached FA3's outputs (flash-attention #1745), and 0 times a stale NaN behind a window
// was NaN in vLLM's Triton kernel, which therefore clears such values.
TEST(CacheQuirks, KeysThatNobodySeesMayBeNaN) {
  QuirkStep step({{1, 200}, {30, 150}, {1, 77}});
  step.spec.mask.window_left = 20;
  step.sees = [&](int r, int i, int j) { return j <= step.context(r) + i && j >= step.context(r) + i - 20; };
  for (size_t r = 0; r < step.requests.size(); ++r) {
    const size_t hidden = size_t(step.context(int(r)) - 20) * 64;  // numbers of keys that the first query does not see any more
    for (size_t n = 0; n < hidden; ++n) step.keys[r][n] = step.values[r][n] = std::numeric_limits<float>::quiet_NaN();
  }
  step.check();
}

// vLLM's ubatches drop `causal`, `positions` and more of a batch when they split it (vllm.md 4.11), and a builder changed the arrays that
// all layers share (static sinks). Here a batch is split by phase, with every array that an attention batch has.
TEST(CacheQuirks, NothingOfABatchIsLostWhereItIsSplit) {
  QuirkStep step({{1, 40}, {9, 30}, {1, 65}, {5, 90}, {1, 1}});
  step.pages = {{3, 0, 5}, {9, 1}, {2, 8, 4, 6, 7}, {15, 14, 13, 12, 11, 10}, {16}};
  step.spec.mask = {.causal = false, .window_left = 25, .custom = true, .positions = true};
  step.sinks = {1.f, 0.f, -1.f, 2.f};
  step.spec.score.sinks = true;
  std::vector<size_t> first, token;
  for (size_t r = 0; r < step.requests.size(); ++r) {
    const auto [own, keys] = step.requests[r];
    first.push_back(step.mask.size()), token.push_back(step.positions.size());
    for (int i = 0; i < own; ++i) step.positions.push_back(keys - 1 - 3 * i);
    for (int n = 0; n < own * keys; ++n) step.mask.push_back((n * 5 + n / 7) % 4 != 0);
  }
  for (int32_t& p : step.positions) p = std::max(p, 0);
  step.sees = [&](int r, int i, int j) {
    const int p = step.positions[token[size_t(r)] + size_t(i)];
    return step.mask[first[size_t(r)] + size_t(i * step.requests[size_t(r)].second + j)] != 0 && j >= p - 25;
  };
  step.check();
  step.make_plan = [](const Backend& backend, const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
    return plan_by_phase(backend, backend, spec, device, options, 1);
  };
  step.check();
}

}  // namespace
}  // namespace imbrex::test
