// What other engines once got wrong about which keys a query sees, sinks and logits: each test is named for what has to hold, and its
// comment says who had it otherwise. docs/quirks.md lists these and the tests elsewhere that hold the rest.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "expect_error.h"
#include "imbrex/merge.h"
#include "imbrex/parallel.h"
#include "quirks/step.h"

namespace imbrex::test {
namespace {

// SGLang's Triton decode gathered min(seq_len, W) keys for a window of radius W: one too few, against W + 1 in FlashInfer (b3f1e78e).
TEST(WindowQuirks, ADecodeStepSeesTheRadiusAndItsOwnKey) {
  QuirkStep step({{1, 1}, {1, 16}, {1, 17}, {1, 18}, {1, 300}, {3, 40}});
  step.equal_logits();
  step.spec.mask.window_left = 16;
  step.sees = [&](int r, int i, int j) { return j <= step.context(r) + i && step.context(r) + i - j < 17; };
  step.check();
}

// SGLang takes sliding_window_size 0, a window of the query's own key alone, for no window, because it is false in Python.
TEST(WindowQuirks, ARadiusOfZeroIsTheQuerysOwnKey) {
  QuirkStep step({{1, 50}, {20, 20}, {5, 33}});
  step.spec.mask.window_left = 0;
  step.sees = [&](int r, int i, int j) { return j == step.context(r) + i; };
  step.check();
}

// SGLang's paged prefill through FlashInfer ignored the window (sglang #31501), and clipped prefixes were gathered from their beginning
// (#22679, #39287).
TEST(WindowQuirks, AChunkOfAPromptSeesTheEndOfItsContext) {
  QuirkStep step({{40, 140}, {25, 26}, {70, 200}});
  step.spec.mask.window_left = 30;
  step.sees = [&](int r, int i, int j) { return j <= step.context(r) + i && j >= step.context(r) + i - 30; };
  step.check();
}

// vLLM cuts local chunks into virtual requests: this is the example of its own definition, make_local_attention_virtual_batches.
TEST(ChunkQuirks, LocalChunksAreVllmsVirtualRequests) {
  QuirkStep step({{4, 6}, {10, 17}, {5, 9}});
  step.equal_logits();
  step.spec.mask.chunk = 4;
  const std::vector<int> own{2, 2, 1, 4, 4, 1, 4, 1}, keys{4, 2, 4, 4, 4, 1, 4, 1};
  std::vector<int> seen;  // of each token
  for (size_t v = 0; v < own.size(); ++v)
    for (int i = 0; i < own[v]; ++i) seen.push_back(keys[v] - own[v] + i + 1);
  const int first[] = {0, 4, 14};
  step.sees = [&](int r, int i, int j) { return j <= step.context(r) + i && step.context(r) + i - j < seen[size_t(first[r] + i)]; };
  step.check();
}

// SGLang's CPU extend let rows see later keys where a tile of queries was longer than half of a tile of keys, and its DRAFT_EXTEND_V2 had a
// wrong number of keys for steps with a context.
TEST(CausalQuirks, EveryRowSeesAllKeysToItsOwnAndNoLater) {
  QuirkStep step({{4, 300}, {600, 600}, {1, 129}, {150, 700}, {2, 2}, {7, 130}});
  step.equal_logits();
  step.check();
}

// SGLang's Triton extend does not look at `causal` where there is a custom mask, but its loop ends where a causal one would; FlashInfer
// adds offsets that count elements of the mask to a mask of bits, which is wrong from the second request on (flashinfer.md 1.1).
TEST(MaskQuirks, ACustomMaskMayShowLaterKeysToEachOfSeveralRequests) {
  QuirkStep step({{3, 37}, {5, 150}, {1, 9}, {33, 75}});
  step.spec.mask.causal = false, step.spec.mask.custom = true;
  std::vector<size_t> first;
  for (size_t r = 0; r < step.requests.size(); ++r) {
    first.push_back(step.mask.size());
    for (int n = 0; n < step.requests[r].first * step.requests[r].second; ++n) step.mask.push_back((n * 7 + n / 11) % 3 != 0);
  }
  step.sees = [&](int r, int i, int j) { return step.mask[first[size_t(r)] + size_t(i * step.requests[size_t(r)].second + j)] != 0; };
  step.check();
}

// SGLang's CPU softmax for AVX-512 took the maximum of the block instead of the running one, so that a block with no visible key gave
// exp(inf); vLLM's and SGLang's Triton kernels divide 0 by 0 for rows without keys (flashinfer #4051, #5262).
TEST(MaskQuirks, BlocksAndRowsWithoutAVisibleKeyAreNotNumbersToExponentiate) {
  QuirkStep step({{0, 0}, {6, 700}, {0, 0}, {40, 700}, {0, 30}});
  step.spec.mask.causal = false, step.spec.mask.custom = true;
  step.sees = [](int, int i, int j) { return i % 3 != 1 && (i % 3 == 0 ? j < 100 || j >= 520 : j >= 640); };
  for (size_t r = 0; r < step.requests.size(); ++r)
    for (int i = 0; i < step.requests[r].first; ++i)
      for (int j = 0; j < step.requests[r].second; ++j) step.mask.push_back(step.sees(int(r), i, j));
  step.check();
}

// EAGLE trees with a window: SGLang counts the window from a draft's index in the step instead of from its depth, so that siblings see
// different keys (sglang #22679, #39287).
TEST(MaskQuirks, TheWindowOfADraftGoesByItsDepth) {
  const std::vector<int> parents{-1, 0, 0, 0, 1, 1, 2, 6};
  const int count = int(parents.size()), window = 9;
  QuirkStep step({{count, 60}, {count, 9}, {count, 150}});
  step.spec.mask = {.causal = false, .window_left = window, .custom = true, .positions = true};
  const auto depth = [&](int i) {
    int steps = 0;
    for (; parents[size_t(i)] >= 0; i = parents[size_t(i)]) ++steps;
    return steps;
  };
  const auto in_tree = [&](int r, int i, int j) {
    const int node = j - step.context(r);
    for (int at = i; at >= 0 && node >= 0; at = parents[size_t(at)])
      if (at == node) return true;
    return node < 0;
  };
  for (int r = 0; r < 3; ++r)
    for (int i = 0; i < count; ++i) {
      step.positions.push_back(step.context(r) + depth(i));
      for (int j = 0; j < step.requests[size_t(r)].second; ++j) step.mask.push_back(in_tree(r, i, j));
    }
  step.sees = [&](int r, int i, int j) { return in_tree(r, i, j) && j >= step.context(r) + depth(i) - window; };
  step.check();
}

// Where keys are split, a sink belongs to one part: vLLM and SGLang have an exception for the first segment or the last pass, and ranks of
// a context-parallel group would each count it (distributed.md 5).
TEST(SinkQuirks, ASinkIsCountedOnceHoweverKeysAreSplit) {
  ThreadPool pool(3);
  for (const bool balanced : {false, true}) {
    QuirkStep step({{1, 9000}, {2, 4200}, {1, 100}}, 2, 1);
    step.equal_logits();
    step.sinks = {9.f, 4.f};
    step.spec.score.sinks = true;
    step.options.balanced = balanced, step.options.threads = pool.parallel_for();
    step.check();
  }
}

// A prefix that is shared is seen without a causal mask and the rest with one (causal twice is the mistake), and the sink goes with one of
// the two: vLLM's cascade gives it to the prefix.
TEST(SinkQuirks, APrefixAndTheRestJoinToTheWholeWithOneSink) {
  QuirkStep whole({{5, 65}});
  whole.sinks = {1.f, -2.f, 0.5f, 3.f};
  whole.spec.score.sinks = true;
  const auto part = [&](int begin, int end, bool causal, bool sinks) {
    QuirkStep step({{5, end - begin}});
    const auto cut = [&](const std::vector<float>& x) { return std::vector<float>(x.begin() + begin * 64, x.begin() + end * 64); };
    step.keys[0] = cut(whole.keys[0]), step.values[0] = cut(whole.values[0]), step.q = whole.q;
    step.spec.mask.causal = causal, step.spec.score.sinks = sinks;
    if (sinks) step.sinks = whole.sinks;
    step.spec.q_dtype = step.spec.kv_dtype = DType::f32;
    return step;
  };
  const QuirkStep prefix = part(0, 60, false, true), rest = part(60, 65, true, false);
  const QuirkResult wanted = whole.expected();
  const int runs = for_each_cpu_target<AttentionFamily>(prefix.spec, [&](const Backend& backend, const DeviceInfo& device) {
    const auto view = [](std::vector<float>& x, std::vector<float>& lse) {
      return PartialResult{TensorView::contiguous(x.data(), DType::f32, {5, 4, 32}),
                           TensorView::contiguous(lse.data(), DType::f32, {5, 4})};
    };
    const QuirkResult a = prefix.run(backend, device), b = rest.run(backend, device);
    std::vector<float> out_a(a.out.begin(), a.out.end()), lse_a(a.lse.begin(), a.lse.end());
    std::vector<float> out_b(b.out.begin(), b.out.end()), lse_b(b.lse.begin(), b.lse.end());
    const std::vector<PartialResult> parts{view(out_a, lse_a), view(out_b, lse_b)};
    merge_partial_results(parts, parts[0].out, parts[0].lse);
    for (size_t n = 0; n < out_a.size(); ++n) ASSERT_NEAR(out_a[n], wanted.out[n], 2e-5) << backend.name();
    for (size_t n = 0; n < lse_a.size(); ++n) ASSERT_NEAR(lse_a[n], wanted.lse[n], 2e-5) << backend.name();
  });
  EXPECT_GE(runs, 2);
}

// FlashInfer's fa2 and fa3 accept sinks and drop them (prefill.py, paged_run; state-2026-11.md 1.4).
TEST(SinkQuirks, SinksThatASpecDoesNotNameAreRefusedAndSoAreMissingOnes) {
  for (const bool named : {false, true}) {
    QuirkStep step({{2, 20}});
    step.spec.q_dtype = step.spec.kv_dtype = DType::f32;
    step.spec.score.sinks = named;
    if (!named) step.sinks = {1.f, 1.f, 1.f, 1.f};
    const int runs = for_each_cpu_target<AttentionFamily>(step.spec, [&](const Backend& backend, const DeviceInfo& device) {
      EXPECT_EQ(error_code([&] { step.run(backend, device); }), "run.sinks") << backend.name();
    });
    EXPECT_GE(runs, 2);
  }
}

// FlashInfer's ALiBi with a soft cap multiplies by the scale twice (variants.cuh), and vLLM's drops the part of the bias that is the same
// for a whole row, so that log-sum-exps cannot be joined with others.
TEST(LogitQuirks, AlibiWithASoftCapScalesOnceAndCountsFromTheQuery) {
  QuirkStep step({{1, 70}, {30, 41}, {3, 140}});
  step.spec.score = {.scale = 0.7f, .soft_cap = 3.f, .alibi = true};
  step.slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  step.bend = [&](double logit, int h, int r, int i, int j) {
    return 3 * std::tanh(logit / 3) + double(step.slopes[size_t(h)]) * (j - step.context(r) - i);
  };
  step.check();
}

// FlashInfer's log-sum-exps are to the base 2, those of FlashAttention to the base e: they were mixed up where results are merged
// (vllm #28840, #43919, #47079; sglang #33064), and a kernel left them zero (sglang #34355).
TEST(LogitQuirks, LogSumExpsAreNaturalAndOfEveryRow) {
  QuirkStep step({{1, 400}, {17, 90}, {1, 1}});
  step.spec.score.scale = 1.f;
  step.check();
}

// FlashInfer computed groups of 5, 6 and 7 wrong or not at all (flashinfer #996, #3563), and head dimensions that are no multiples of 16
// without an error (#4299).
TEST(LogitQuirks, OddGroupsAndDimensionsAreComputedOrRefused) {
  for (const int group : {1, 3, 5, 6, 7})
    for (const int dim : {8, 24, 40, 72, 96}) {
      const QuirkStep step({{1, 70}, {9, 33}}, 2 * group, 2, dim);
      step.check();
    }
}

// SGLang's Triton backend ignored the scales of an fp8 cache (sglang #18882, #20479), and the store divided the caller's keys in place.
TEST(LogitQuirks, ScalesOfAnFp8CacheCount) {
  QuirkStep step({{1, 90}, {20, 75}, {4, 30}});
  step.spec.kv_dtype = DType::fp8_e4m3;
  step.k_scale = 0.5f, step.v_scale = 0.25f;
  step.check();
}

}  // namespace
}  // namespace imbrex::test
