// The table of cases and the laws of recurrent layers on the fake driver, through the mirror: the plan for GPUs launches the kernels'
// texts, which are compiled for the host. Cases whose specialisation has no such text are left out.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

#include "conformance/recurrent/device_mirror.h"
#include "conformance/recurrent/judge.h"
#include "conformance/state_steps.h"
#include "conformance/state_trees.h"
#include "cuda/fake/recurrent_texts.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::random_steps, imbrex::test::recurrent_variants, imbrex::test::RecurrentVariant, imbrex::test::token_rows,
    imbrex::test::TreeAndPaths;

int64_t launches_of(std::string_view entry) {
  return std::ranges::count_if(fake::state().launches, [&](const fake::Launch& launch) { return launch.entry == entry; });
}

// So many blocks that stay, for plans of a test.
struct FewBlocks {
  explicit FewBlocks(int64_t blocks) { most_stream_blocks = blocks; }
  ~FewBlocks() { most_stream_blocks = before; }
  FewBlocks(const FewBlocks&) = delete;
  FewBlocks& operator=(const FewBlocks&) = delete;
  int64_t before = most_stream_blocks;
};

class RecurrentOnFakeDriver : public testing::Test {
 protected:
  void SetUp() override {
    if (!fake::has_texts()) GTEST_SKIP() << "there are no texts to run";
  }
  ~RecurrentOnFakeDriver() override { fake::forget_texts(); }
  void use(const RecurrentVariant& variant) { fake::use_recurrent_text(variant), device.sm = variant.sm; }

  // Requests of every kind, of which some have hard numbers.
  static std::vector<RecurrentCase> own_cases(const RecurrentVariant& variant) {
    std::vector<RecurrentCase> cases;
    for (const RecurrentValues values : {RecurrentValues::plain, RecurrentValues::forgetful, RecurrentValues::extreme}) {
      RecurrentCase c{.name = std::string(variant.name) + " " + std::to_string(int(values)),
                      .spec = variant.with_drafts(values == RecurrentValues::forgetful ? 0 : 4),
                      .requests = {{1, 9}, {0, 0}, {12, 0}, {0, 25}, {9, 1}, {1, 0}, {79, 0}, {17, 2}}};
      if (c.spec.num_drafts > 1) c.requests.insert(c.requests.end(), {{5, 14, 4, 2}, {3, 0, 3, 0}, {2, 7, 1, 4}});
      if (variant.layer.tree_drafts && c.spec.num_drafts > 1) c.spec = variant.with_drafts(kTreeDrafts), c.requests = tree_requests();
      for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
      c.other_sources = values != RecurrentValues::plain;
      c.gaps = Gaps(cases.size()), c.padding_tokens = 1, c.values = values;
      cases.push_back(std::move(c));
    }
    return cases;
  }
  static RecurrentCaseInputs law_inputs(const RecurrentVariant& variant, StateCaseRequests requests) {
    for (size_t r = 0; r < requests.size(); ++r)
      if (requests[r].id == 0) requests[r].id = int(r) + 1;
    return make_inputs({.name = "law", .spec = variant.with_drafts(2), .requests = std::move(requests), .seed = 7});
  }
  RecurrentRunResult run(const RecurrentCaseInputs& in, const RecurrentRunOptions& options = {}) const {
    RecurrentRunResult result = run_case(*mirror, device, in, options);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
  // From the host's lengths among zeros and ones, from the device's, and from a graph.
  void expect_right(const RecurrentCase& c) const {
    const RecurrentCaseInputs in = make_inputs(c);
    const bool products = backend.plan(c.spec, device, {.limits = limits_of(c.requests)})->rounded_products();
    const RecurrentExpected expected = expect(in, c.chunk, products);
    RecurrentRunOptions options = default_options(c);
    const auto passes = [&](const BackendOf<RecurrentFamily>& by, const char* how) {
      const RecurrentJudgement judgement = judge(expected, in, run_case(by, device, in, options));
      EXPECT_TRUE(judgement.pass()) << c.name << ", " << how << ": " << judgement.failure;
    };
    passes(*mirror, "nan");
    options.poison = Poison::ones;
    options.on_device = true;
    passes(*mirror, "ones, from the device");
    int captures = 0;
    const auto in_graph = device_mirror(backend, {.in_graph = true, .captures = &captures});
    options.on_device = false, options.rows = num_tokens(in.requests) + c.padding_tokens + 1;
    passes(*in_graph, "in a graph");
    EXPECT_EQ(captures, 1) << c.name;
  }

  DeviceInfo device = probe_cuda().at(0);
  const BackendOf<RecurrentFamily>& backend = *find_backend<RecurrentFamily>("cuda_sm80");
  const std::unique_ptr<BackendOf<RecurrentFamily>> mirror = device_mirror(backend);
};

TEST_F(RecurrentOnFakeDriver, CasesMatchTheReference) {
  int run = 0;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    use(variant);
    for (const RecurrentCase& c : recurrent_cases()) {
      constexpr int kTokens = 60;  // lanes are slow
      if (!variant.runs(c.spec) || c.spec.conv != RecurrentConv::none || num_tokens(c.requests) > kTokens) continue;
      expect_right(c);
      ++run;
    }
    for (const RecurrentCase& c : own_cases(variant)) expect_right(c);
  }
  EXPECT_GE(run, 30);
}

// Exponents at whose bounds floats end: of the sigmoid of beta, whose tokens write nothing or all, and of a softplus.
TEST_F(RecurrentOnFakeDriver, HugeExponents) {
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.chunks() || !variant.layer.delta || variant.layer.has_output_stage()) continue;
    use(variant);
    RecurrentCaseInputs in = make_inputs({.name = "huge", .spec = variant.layer, .requests = {{120}}});
    const int heads = in.spec.num_v_heads, gates = in.spec.channel_gate ? in.spec.head_dim_k : 1;  // of a head
    for (int token = 0; token < 120; ++token)
      for (int head = 0; head < heads; ++head) {
        const int number = token * heads + head;
        const double near_the_end = 88.5 + 0.001 * number;
        in.beta.set(number, token % 2 == 0 ? near_the_end : -near_the_end);
        for (int i = 0; i < gates; ++i)
          in.gate.set(number * gates + i, (token + i) % 6 == 4 ? 1e4 : (token + i) % 6 == 1 ? -near_the_end : i % 3 == 2 ? 60 : -4);
      }
    const RecurrentJudgement judgement = judge(expect(in, 0, true), in, run(in));
    EXPECT_TRUE(judgement.pass()) << variant.name << ": " << judgement.failure;
  }
}

// Where states are f32, drafts that are taken back leave what the tokens before them left, and those that are kept what they left.
TEST_F(RecurrentOnFakeDriver, VerifyIsDecodeTokenByToken) {
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (variant.layer.state_dtype != DType::f32) continue;
    use(variant);
    const RecurrentCaseInputs in = law_inputs(variant, {{9, 20, 0, 1}, {8, 0}});
    const RecurrentRunResult at_once = run(in);
    for (int kept = 0; kept <= 2; ++kept) {
      RecurrentRunOptions options;
      options.steps = {{{0, 3, 2, 1}, {0, 3, 2, 0}}, {{kept + 1, 9, 0, kept}, {kept + 1, 8, 0, kept}}};
      EXPECT_TRUE(same_bits(run(in, options), at_once)) << variant.name << ", " << kept << " drafts kept";
    }
  }
}

TEST_F(RecurrentOnFakeDriver, ATreeIsItsPaths) {
  int trees = 0;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.layer.tree_drafts) continue;
    use(variant);
    for (const int accepted : {0, 2, 5, kTreeDrafts}) {
      const TreeAndPaths steps(tree_requests(), accepted);
      RecurrentCaseInputs tree = law_inputs(variant, steps.tree);
      tree = make_inputs({.name = "tree", .spec = variant.with_drafts(kTreeDrafts), .requests = tree.requests, .seed = 7});
      RecurrentCaseInputs paths = tree;
      paths.requests = steps.paths;
      for (HostTensor* t : {&paths.q, &paths.k, &paths.v, &paths.gate, &paths.beta}) *t = token_rows(*t, steps.tokens);
      RecurrentRunOptions of_tree, of_paths;
      of_tree.steps = steps.tree_steps, of_paths.steps = steps.path_steps, of_paths.other_sources = true, of_tree.on_device = accepted == 5;
      RecurrentRunResult picked = run(tree, of_tree);
      picked.out = token_rows(picked.out, size_t(tree.spec.num_v_heads) * size_t(tree.spec.head_dim_v), steps.tokens);
      EXPECT_TRUE(same_bits(run(paths, of_paths), picked)) << variant.name << ", draft " << accepted << " kept";
      ++trees;
    }
  }
  EXPECT_GE(trees, 12);
}

// Steps that end at random, of which one graph is captured, in front of all of them.
TEST_F(RecurrentOnFakeDriver, OneGraphForAllSteps) {
  std::mt19937_64 random(8);
  for (const RecurrentVariant& variant : recurrent_variants()) {
    use(variant);
    const RecurrentCaseInputs in = law_inputs(variant, {{1, 99}, {0, 0}, {30, 0}, {6, 271}, {1, 0}, {13, 5}});
    RecurrentRunOptions options;
    options.steps = random_steps(in.requests, 11, random);
    ASSERT_GT(options.steps.size(), 3u);
    const RecurrentRunResult expected = run(in, options);
    options.rows = num_tokens(in.requests) + 3;
    for (const bool on_device : {false, true}) {
      int captures = 0;
      const auto in_graph = device_mirror(backend, {.in_graph = true, .captures = &captures});
      const auto plan = in_graph->plan(in.spec, device, {.limits = limits_of(in.requests), .on_device = on_device});
      EXPECT_TRUE(plan->capturable());
      options.on_device = on_device;
      const RecurrentRunResult result = run_case(*plan, in, options);
      EXPECT_TRUE(result.violations.empty()) << result.violations.front();
      EXPECT_TRUE(same_bits(result, expected)) << in.spec.str() << (on_device ? ", from the device" : "");
      EXPECT_EQ(captures, 1);
    }
  }
}

// States come through shared memory where they are more than the blocks that stay, with the bits that they have else.
TEST_F(RecurrentOnFakeDriver, ManyStatesStream) {
  int run_through = 0;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.stream_kernel()) continue;
    use(variant);
    for (RecurrentCase c : own_cases(variant)) {
      c.gaps = Gaps::none;
      const RecurrentCaseInputs in = make_inputs(c);
      const RecurrentRunResult expected = run(in, default_options(c));
      for (const int blocks : {1, 3}) {
        const FewBlocks few(blocks);
        fake::state().launches.clear();
        const RecurrentRunResult streamed = run(in, default_options(c));
        EXPECT_EQ(launches_of("recurrent_stream"), 1) << c.name;
        EXPECT_TRUE(same_bits(streamed, expected)) << c.name << ", " << blocks << " blocks";
        if (blocks == 3) expect_right(c);
        ++run_through;
      }
    }
  }
  EXPECT_GE(run_through, 48);
}

// Kernels that finish no outputs, for plans of a test.
struct OutputsApart {
  OutputsApart() { may_finish_outputs = false; }
  ~OutputsApart() { may_finish_outputs = true; }
  OutputsApart(const OutputsApart&) = delete;
  OutputsApart& operator=(const OutputsApart&) = delete;
};

// Outputs that are finished where they are computed have the bits of the kernel behind, which only tokens in chunks need then.
TEST_F(RecurrentOnFakeDriver, FinishedOutputsAreThoseOfTheKernelBehind) {
  int finished = 0;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.finishes()) continue;
    std::vector<RecurrentCase> cases = own_cases(variant);
    cases.push_back({.name = "decode", .spec = variant.layer, .requests = {{1, 9, 0, 0, 1}, {2, 0, 0, 0, 2}, {15, 3, 0, 0, 3}}});
    for (RecurrentCase& c : cases) {
      c.gaps = Gaps::none;
      const bool in_chunks = variant.chunks() && c.name != "decode";
      const RecurrentCaseInputs in = make_inputs(c);
      const auto [apart, launches_apart] = [&] {
        const OutputsApart outputs_apart;
        use(variant);
        fake::state().launches.clear();
        return std::pair{run(in, default_options(c)), launches_of("recurrent_outputs_aligned")};
      }();
      use(variant);
      fake::state().launches.clear();
      EXPECT_TRUE(same_bits(run(in, default_options(c)), apart)) << c.name;
      EXPECT_EQ(launches_apart, 1) << c.name;
      EXPECT_EQ(launches_of("recurrent_outputs_aligned"), in_chunks ? 1 : 0) << c.name;
      ++finished;
    }
  }
  EXPECT_GE(finished, 16);
}

// Thread blocks of narrow heads have one request after another, with the bits that they have alone.
TEST_F(RecurrentOnFakeDriver, NarrowBlocksTakeRequestsInTurn) {
  int run_through = 0;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (variant.layer.head_dim_v > 1 || variant.layer.has_output_stage()) continue;
    use(variant);
    for (RecurrentCase c : own_cases(variant)) {
      if (run_through % 2 == 0) c.gaps = Gaps::none;
      const RecurrentCaseInputs in = make_inputs(c);
      const RecurrentRunResult expected = run(in, default_options(c));
      for (const int blocks : {1, 3}) {
        const FewBlocks few(blocks);
        EXPECT_TRUE(same_bits(run(in, default_options(c)), expected)) << c.name << ", " << blocks << " blocks";
        ++run_through;
      }
    }
  }
  EXPECT_EQ(run_through, 12);
}

// Prompts of narrow heads have a kernel of their own, whose bits are those of steps of a few tokens.
TEST_F(RecurrentOnFakeDriver, NarrowPromptsAreTheirTokens) {
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.prompt_kernel() || variant.layer.state_dtype != DType::f32 || variant.layer.has_output_stage()) continue;
    use(variant);
    for (const auto& [k_heads, v_heads] : {std::pair{1, 24}, {1, 150}, {2, 256}}) {
      RecurrentCaseInputs in = law_inputs(variant, {{53, 3}, {16}});
      RecurrentSpec spec = in.spec;
      spec.num_k_heads = k_heads, spec.num_v_heads = v_heads, spec.qk_norm = k_heads == 2, spec.skip = v_heads != 150;
      in = make_inputs({.name = "law", .spec = spec, .requests = in.requests, .seed = 7});
      fake::state().launches.clear();
      RecurrentRunOptions options;
      options.gaps = Gaps::none;
      const RecurrentRunResult at_once = run(in, options);
      EXPECT_EQ(launches_of("recurrent_narrow_prompts"), 1);
      EXPECT_EQ(launches_of("recurrent_narrow_aligned"), 0);
      options.chunk = 13;
      fake::state().launches.clear();
      EXPECT_TRUE(same_bits(run(in, options), at_once)) << spec.str();
      EXPECT_EQ(launches_of("recurrent_narrow_prompts"), 0);
    }
  }
}

// Segments of one chunk, for plans of a test.
struct ShortSegments {
  ShortSegments() { least_segment = 1; }
  ~ShortSegments() { least_segment = before; }
  ShortSegments(const ShortSegments&) = delete;
  ShortSegments& operator=(const ShortSegments&) = delete;
  int before = least_segment;
};

// Of blocks of a cluster that load for each other, one may be far behind: what comes for it must not be over what it has not read.
TEST_F(RecurrentOnFakeDriver, BlocksOfAClusterWaitForEachOther) {
  int variants = 0;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.chunks() || variant.chunks()->cluster == 1) continue;
    ++variants;
    use(variant);
    RecurrentCase c{.name = variant.name, .spec = variant.layer, .requests = {{300}}};
    c.spec.num_v_heads /= c.spec.num_k_heads, c.spec.num_k_heads = 1;
    const RecurrentCaseInputs in = make_inputs(c);
    const RecurrentExpected expected = expect(in, 0, true);
    for (int turn = 0; turn < 4; ++turn) {  // another warp hardly runs in each
      const RecurrentJudgement judgement = judge(expected, in, run(in));
      EXPECT_TRUE(judgement.pass()) << c.name << ": " << judgement.failure;
    }
  }
  EXPECT_GE(variants, 1);
}

// Where blocks are few, each has several heads and requests one after the other, with the bits of a block for each.
TEST_F(RecurrentOnFakeDriver, BlocksOfChunksTakeUnitsInTurn) {
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.chunks() || variant.layer.has_output_stage()) continue;
    use(variant);
    const RecurrentCaseInputs in = law_inputs(variant, {{70}, {1, 3}, {20, 9}, {130, 5}, {64}});
    const RecurrentRunResult expected = run(in);
    const int workers = std::exchange(device.num_workers, 1);
    EXPECT_TRUE(same_bits(run(in), expected)) << variant.name;
    device.num_workers = workers;
  }
}

// Long requests come in segments, of three chunks and more, with a state in front of them and without one. What does not decay is still
// there in the last of them.
TEST_F(RecurrentOnFakeDriver, LongRequestsComeInSegments) {
  const ShortSegments short_segments;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.chunks() || variant.chunks()->most_segments == 1) continue;
    use(variant);
    for (const RecurrentValues values : {RecurrentValues::none, RecurrentValues::extreme}) {
      RecurrentCase c{.name = variant.name, .spec = variant.layer, .requests = {{150}, {70}, {1, 3}, {200, 9}}, .values = values};
      c.spec.num_v_heads /= c.spec.num_k_heads, c.spec.num_k_heads = 1;
      if (!variant.runs(c.spec)) continue;  // a norm over heads is one over a head then, which another text finishes
      for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
      const RecurrentCaseInputs in = make_inputs(c);
      fake::state().launches.clear();
      const RecurrentRunResult result = run(in);
      EXPECT_EQ(launches_of("recurrent_segments"), 1);
      const RecurrentJudgement judgement = judge(expect(in, 0, true), in, result);
      EXPECT_TRUE(judgement.pass()) << c.name << ": " << judgement.failure;
      if (values != RecurrentValues::none) continue;
      // The same bits without neighbours.
      c.requests = {c.requests.back()};
      const RecurrentRunResult alone = run(make_inputs(c));
      EXPECT_TRUE(std::equal(alone.out.rbegin(), alone.out.rend(), result.out.rbegin())) << c.name;
      EXPECT_TRUE(std::equal(alone.state.bytes.rbegin(), alone.state.bytes.rend(), result.state.bytes.rbegin())) << c.name;
    }
  }
}

// What a request's last chunk is without the tokens that others have behind these: the same bits, whichever of its blocks are computed.
TEST_F(RecurrentOnFakeDriver, TokensOfAChunkDoNotDependOnLaterOnes) {
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.chunks() || variant.layer.has_output_stage()) continue;
    use(variant);
    RecurrentCase c{.name = variant.name, .spec = variant.layer};
    for (const int tokens : {kRecurrentChunk, 16, 17, 24, 31, 32, 33, 40, 48, 49, 63}) c.requests.push_back({.q_len = tokens, .id = 1});
    const RecurrentCaseInputs in = make_inputs(c);
    const RecurrentRunResult result = run(in);
    const RecurrentJudgement judgement = judge(expect(in, 0, true), in, result);
    EXPECT_TRUE(judgement.pass()) << c.name << ": " << judgement.failure;
    const int64_t row = int64_t(c.spec.num_v_heads) * c.spec.head_dim_v;
    auto first = result.out.begin();
    for (const StateCaseRequest& r : c.requests) {
      EXPECT_TRUE(std::equal(first, first + r.q_len * row, result.out.begin())) << c.name << ", " << r.q_len;
      first += r.q_len * row;
    }
  }
}

// Thread blocks that have a multiprocessor each have more chunks in shared memory, also where others of the step come token by token.
TEST_F(RecurrentOnFakeDriver, LoneBlocksHaveMoreChunks) {
  const RecurrentVariant variant = recurrent_variants().front();
  use(variant);
  fake::state().on_launch = nullptr;
  const ChunkKernels chunks = *variant.chunks();
  const auto expect_stages = [&](StateCaseRequests requests, unsigned stages, unsigned blocks) {
    for (size_t r = 0; r < requests.size(); ++r) requests[r].id = int(r);
    fake::state().launches.clear();
    const RecurrentCaseInputs in = make_inputs({.name = "lone", .spec = variant.layer, .requests = std::move(requests)});
    run_case(*device_mirror(backend)->plan(variant.layer, device, {.limits = limits_of(in.requests)}), in, {});
    const auto launch = std::ranges::find(fake::state().launches, "recurrent_chunks", &fake::Launch::entry);
    ASSERT_NE(launch, fake::state().launches.end());
    EXPECT_EQ(launch->smem_bytes, stages * unsigned(chunks.stage_bytes));
    EXPECT_EQ(launch->grid_x, blocks);
  };
  const unsigned workers = unsigned(device.num_workers), units = unsigned(chunks.units);
  expect_stages({{20}}, 4, units);
  expect_stages(StateCaseRequests(workers / units, {16}), 4, workers);
  expect_stages(StateCaseRequests(workers / units + 1, {16}), 2, workers + units);
  StateCaseRequests mixed(workers, {1, 1});
  mixed.push_back({20});
  expect_stages(mixed, 4, workers);
  mixed.front() = {20};
  expect_stages(mixed, 2, 2 * workers);
}

// Where no request is long there are none, nor where there would be more than one round of chunks, nor where a balanced step has other
// requests for the multiprocessors.
TEST_F(RecurrentOnFakeDriver, SegmentsAreForFewHeads) {
  const ShortSegments short_segments;
  const RecurrentVariant variant = recurrent_variants().front();
  use(variant);
  fake::state().on_launch = nullptr;
  const auto segments = [&](const RecurrentSpec& spec, StateCaseRequests requests, PlanOptions options) {
    for (size_t r = 0; r < requests.size(); ++r) requests[r].id = int(r);
    options.limits = limits_of(requests);
    const RecurrentCaseInputs in = make_inputs({.name = "segments", .spec = spec, .requests = std::move(requests)});
    fake::state().launches.clear();
    run_case(*device_mirror(backend)->plan(spec, device, options), in, {});
    return launches_of("recurrent_segments");
  };
  const StateCaseRequests many(12, {20, 0});
  StateCaseRequests one_of_many = many;
  one_of_many.push_back({200});
  EXPECT_EQ(segments(variant.layer, {{200}}, {}), 1);
  EXPECT_EQ(segments(variant.layer, {{200}}, {.balanced = true}), 1);
  EXPECT_EQ(segments(variant.layer, {{128}, {100}}, {}), 0);
  EXPECT_EQ(segments(variant.layer, many, {}), 0);
  EXPECT_EQ(segments(variant.layer, one_of_many, {}), 1);
  EXPECT_EQ(segments(variant.layer, one_of_many, {.balanced = true}), 0);
  RecurrentSpec wide = variant.layer;
  wide.num_k_heads = 32, wide.num_v_heads = 64;
  EXPECT_EQ(segments(wide, {{200}}, {}), 0);
}

}  // namespace
}  // namespace imbrex::cuda
