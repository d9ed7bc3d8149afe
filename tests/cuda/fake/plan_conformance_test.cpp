// The whole host side of the CUDA backends against the reference: cuts, lists, tables, maps and partial results, with kernels that are
// host code. On the fake driver.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/attention/cases.h"
#include "conformance/attention/device_mirror.h"
#include "conformance/attention/judge.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_backend.h"
#include "cuda/params.h"
#include "expect_error.h"
#include "imbrex/select.h"
#include "sanitizers.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::kAddressSanitizer;

// What its kernels are given, and one of them that writes what it should not.
struct OnHost final : HostBackend {
  using HostBackend::HostBackend;
  mutable int shared_items = 0, in_verify = 0;  // that attention kernels were given, and those that take them as requests of many queries
  mutable std::string shared_in;                // the last of these
  int spoiled_byte = 0;                         // where an attention kernel writes beside what it should; behind the output when positive
  std::unique_ptr<imbrex::Plan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    fake::run_on_host(spec);
    const auto kernel = fake::state().on_launch;
    fake::state().on_launch = [this, kernel](const fake::Launch& launch) {
      kernel(launch);
      if (!launch.entry.starts_with("attention")) return;
      AttentionParams p;
      std::memcpy(&p, launch.all_params[0].data(), sizeof p);
      for (int i = 0; i < p.counts->num_work; ++i) {
        const bool shared = p.work[i].partial >= 0 && p.work[i].merge < 0;
        shared_items += shared;
        if (!shared || (launch.entry != "attention_sm90_verify" && !launch.entry.starts_with("attention_sm90_latent"))) continue;
        ++in_verify, shared_in = launch.entry;
      }
    };
    if (spoiled_byte != 0) {
      const auto kernel = fake::state().on_launch;
      fake::state().on_launch = [kernel, at = spoiled_byte](const fake::Launch& launch) {
        kernel(launch);
        if (!launch.entry.starts_with("attention")) return;
        AttentionParams p;
        std::memcpy(&p, launch.all_params[0].data(), sizeof p);
        p.out[at] = 0;
      };
    }
    return inner.plan(spec, device, options);
  }
};

class PlanConformance : public testing::TestWithParam<const char*> {
 protected:
  ~PlanConformance() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  OnHost backend{GetParam()};
  std::unique_ptr<Backend> mirror = device_mirror(backend);
  DeviceInfo device = probe_cuda().at(0);
};

TEST_P(PlanConformance, CasesMatchTheReference) {
  constexpr int kEach = kAddressSanitizer ? 4 : 2;  // of all cases; what its own code is at stake for comes many times
  int taken = 0, run = 0, merged = 0, mapped = 0, mapped_bytes = 0, unmapped = 0, flat = 0, positions = 0, expressions = 0, items = 0;
  for (const Case& c : cases()) {
    const bool paged = c.name.starts_with("page") || c.name.starts_with("mixed"),
               prefill = c.name.starts_with("prefill") || c.name.starts_with("dtype_e4m3") || c.name.starts_with("group_"),
               reread = c.name.starts_with("reread"), latent = c.name.starts_with("latent"), position = c.name.starts_with("position"),
               expression = c.name.starts_with("expression");
    if (!paged && !reread && c.seed % (prefill || latent || position || expression ? 2 : 6) != 0) continue;
    if (!mirror->unsupported(c.spec, device).empty() || taken++ % kEach != 0) continue;
    const CaseInputs inputs = make_inputs(c);
    fake::state().launches.clear();
    const RunResult result = run_case(*mirror, device, inputs, default_options(c));
    const Judgement judgement = judge(expect(inputs), result);
    EXPECT_TRUE(judgement.pass()) << c.name << ": " << judgement.failure;
    for (const fake::Launch& launch : fake::state().launches) {
      if (launch.entry.starts_with("attention")) {
        AttentionParams p;
        std::memcpy(&p, launch.all_params.at(0).data(), sizeof p);
        for (int i = 0; i < p.counts->num_work; ++i)
          merged += p.work[i].merge >= 0, items += p.work[i].piece < 0 && !c.spec.mask_mod.empty();
      }
      mapped += launch.entry == "attention_sm90";
      flat += launch.entry == "flatten_kv";
      positions += launch.module.find("kPositions true") != std::string::npos;
      mapped_bytes += launch.entry == "attention_sm90_fp8";
      unmapped += launch.entry == "attention_sm80" && launch.module.find("kTileRows 128") != std::string::npos;
    }
    ++run, expressions += expression;
  }
  EXPECT_GT(run, (backend.name() == "cuda_sm90" ? 60 : 200) / kEach);
  EXPECT_GT(merged, 3 / kEach);
  EXPECT_GT(expressions, 20 / kEach);
  EXPECT_GT(items, backend.name() == "cuda_sm80" ? 40 : 10);
  EXPECT_GT(unmapped, 3 / kEach);
  EXPECT_EQ(mapped > 25 / kEach, backend.name() == "cuda_sm90") << mapped;
  EXPECT_EQ(flat > 8 / kEach, backend.name() == "cuda_sm90") << flat;
  EXPECT_EQ(mapped_bytes > 3 / kEach, backend.name() == "cuda_sm90") << mapped_bytes;
  EXPECT_EQ(positions > 20 / kEach, backend.name() == "cuda_sm80") << positions;
}

TEST_P(PlanConformance, PoisonAndPagesChangeNothing) {
  int run = 0;
  for (const char* name :
       {"dtype_bf16_fp8_e4m3_mixed", "mask_custom_tree_verify", "score_relative_g1_chunked", "long_8193_q4_sinks", "page_b64_csr_lbhdt",
        "prefill_d128_window", "prefill_d64_sinks", "dtype_e4m3_mixed", "dtype_e4m3_prefill_d128_heads", "reread_page1_window",
        "reread_e4m3_page1_heads", "position_zigzag_window_verify", "expression_both_documents_mixed"}) {
    const Case* c = find_case(name);
    ASSERT_NE(c, nullptr) << name;
    if (!mirror->unsupported(c->spec, device).empty()) continue;
    ++run;
    const CaseInputs inputs = make_inputs(*c);
    RunOptions options = default_options(*c);
    options.check_cache = false;
    options.poison = Poison::zero;
    const RunResult clean = run_case(*mirror, device, inputs, options);
    for (const bool csr : {false, true})
      for (const Poison poison : {Poison::nan, Poison::ones}) {
        options.poison = poison;
        options.csr = csr;
        options.page_seed += 7;
        const RunResult result = run_case(*mirror, device, inputs, options);
        EXPECT_TRUE(result.violations.empty()) << name << ": " << result.violations.front();
        EXPECT_TRUE(bit_identical(result.out, clean.out) && bit_identical(result.lse, clean.lse)) << name;
      }
  }
  EXPECT_GE(run, 4);
}

// Requests with the same blocks: groups of heads that leave room for several query tokens in a tile, and one that does not; layers where
// what a query sees depends on its position.
TEST_P(PlanConformance, RequestsWithTheSameBlocksShareItems) {
  bool balanced = false;
  std::vector<CaseRequest> more;
  const auto run = [&](int group, int block_size, DType kv, const auto& change) {
    Case c;
    c.name = "shared", c.seed = 7;
    c.spec = {.num_q_heads = 2 * group, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64, .kv_dtype = kv, .block_size = block_size};
    change(c.spec);
    c.out_dtype = c.spec.out_dtypes().front();
    c.requests = {{1, 1500, 0}, {1, 1520, 0}, {2, 1510, 0}, {1, 700, 1}, {0, 0, 2},  {1, 1500, 0},
                  {1, 1466, 0}, {2, 705, 1},  {1, 1505, 0}, {1, 701, 1}, {1, 20, 2}, {2, 1511, 0}};  // the mirror puts arrays on the host
    c.requests.insert(c.requests.end(), more.begin(), more.end());
    if (!mirror->unsupported(c.spec, device).empty()) return -1;
    const CaseInputs inputs = make_inputs(c);
    RunOptions options = default_options(c);
    options.check_cache = false, options.share_blocks = true, options.balanced = balanced;
    backend.shared_items = backend.in_verify = 0, backend.shared_in.clear();
    const Judgement judgement = judge(expect(inputs), run_case(*mirror, device, inputs, options));
    EXPECT_TRUE(judgement.pass()) << c.spec.str() << ": " << judgement.failure;
    return balanced ? backend.in_verify : backend.shared_items;
  };
  const auto plain = [](AttentionSpec&) {};
  EXPECT_GT(run(1, 1, DType::bf16, plain), 1);
  EXPECT_GT(run(8, 64, DType::bf16, plain), 2);
  EXPECT_GT(run(4, 16, DType::fp8_e4m3, plain), 2);
  EXPECT_GT(run(3, 48, DType::f16, [](AttentionSpec& spec) { spec.q_dtype = DType::f16, spec.score.sinks = true; }), 2);
  EXPECT_GT(run(4, 16, DType::bf16, [](AttentionSpec& spec) { spec.mask.causal = false, spec.score.soft_cap = 20.f; }), 2);
  EXPECT_GT(run(12, 16, DType::bf16, plain), 0);
  EXPECT_GT(run(16, 16, DType::bf16, plain), 0);
  EXPECT_EQ(run(40, 16, DType::bf16, plain), 0);
  // Windows and chunks that hold a prompt and what comes behind it, for all requests, for some, or for none of them.
  EXPECT_GT(run(4, 16, DType::bf16, [](AttentionSpec& spec) { spec.mask.window_left = 2000; }), 2);
  EXPECT_GT(run(12, 16, DType::bf16, [](AttentionSpec& spec) { spec.mask.window_left = 1505; }), 0);
  EXPECT_GT(run(4, 16, DType::fp8_e4m3, [](AttentionSpec& spec) { spec.mask.chunk = 2048; }), 2);
  EXPECT_GT(run(4, 16, DType::bf16, [](AttentionSpec& spec) { spec.mask.chunk = 800, spec.mask.chunk_lookback = 1; }), 0);
  EXPECT_EQ(run(4, 16, DType::bf16, [](AttentionSpec& spec) { spec.mask.window_left = 100; }), 0);
  EXPECT_EQ(run(4, 16, DType::bf16, [](AttentionSpec& spec) { spec.score.alibi = true; }), 0);
  // Scores that depend on the key, the head and the score alone, and such that depend on the query or the request.
  const auto scored = [](const char* text) { return [text](AttentionSpec& spec) { spec.score_mod = parse_expression(text); }; };
  EXPECT_GT(run(4, 16, DType::bf16, scored("float bias[,]; 20 * tanh(score / 20) + 0.125 * bias[head, kv]")), 2);
  for (const char* text : {"score - 0.01 * q", "score * (1 + 0.125 * batch)", "score * (1 + 0.01 * q_len)", "score - 0.01 * kv_len"})
    EXPECT_EQ(run(4, 16, DType::bf16, scored(text)), 0) << text;
  // Neighbours in the kernel of verify, whose items lists that follow the load may be of; what that does not run, decode's shares.
  balanced = true;
  const bool of_neighbours = backend.name() == "cuda_sm90";
  for (const int group : {1, 3, 16}) EXPECT_EQ(run(group, 16, DType::bf16, plain) > 0, of_neighbours) << group;
  EXPECT_EQ(run(4, 16, DType::fp8_e4m3, plain) > 0, of_neighbours);
  EXPECT_EQ(run(4, 48, DType::bf16, [](AttentionSpec& spec) { spec.score.sinks = true, spec.score.soft_cap = 20.f; }) > 0, of_neighbours);
  EXPECT_EQ(run(4, 16, DType::bf16, [](AttentionSpec& spec) { spec.mask.window_left = 2000; }), 0);
  EXPECT_EQ(run(4, 16, DType::bf16, [](AttentionSpec& spec) { spec.score.alibi = true; }), 0);
  // Beside them drafts, which share too, and a prompt; and a request of two tiles, beside which none do.
  more = {{5, 1515, 0}, {7, 1510, 0}, {120, 300, 4}, {16, 1540, 0}, {9, 40, 5}};
  for (const int group : {3, 4}) EXPECT_EQ(run(group, 16, DType::bf16, plain) > 0, of_neighbours) << group;
  more = {{14, 100, 6}};
  EXPECT_EQ(run(8, 16, DType::bf16, plain), 0);
}

// Latents, in the kernel with the most rows that takes the layer, if these are rows of twice as many tokens as decode's: beside a prompt,
// and beside drafts.
TEST_P(PlanConformance, LatentsWithTheSameBlocksShareItems) {
  const bool may = backend.name() == "cuda_sm90";
  const auto run = [&](int group, int block_size, const char* entry, const auto& change, const std::vector<CaseRequest>& requests) {
    Case c;
    c.name = "shared", c.seed = 7;
    c.spec = {.num_q_heads = group, .num_kv_heads = 1, .head_dim_qk = 272, .head_dim_v = 256, .block_size = block_size};
    c.spec.kv_format = KvFormat::latent;
    change(c.spec);
    c.requests = requests;
    if (!mirror->unsupported(c.spec, device).empty()) return;
    const CaseInputs inputs = make_inputs(c);
    RunOptions options = default_options(c);
    options.check_cache = false, options.share_blocks = options.balanced = true;
    backend.in_verify = 0, backend.shared_in.clear();
    const Judgement judgement = judge(expect(inputs), run_case(*mirror, device, inputs, options));
    EXPECT_TRUE(judgement.pass()) << c.spec.str() << ": " << judgement.failure;
    EXPECT_EQ(backend.shared_in, may ? entry : "") << c.spec.str();
    EXPECT_EQ(backend.in_verify > 0, may && *entry != 0) << c.spec.str();
  };
  const auto plain = [](AttentionSpec&) {};
  const auto bytes = [](AttentionSpec& spec) { spec.kv_dtype = DType::fp8_e4m3; };
  const std::vector<CaseRequest> behind_two{
      {1, 1300, 0}, {1, 1320, 0}, {1, 1310, 0}, {1, 1305, 0}, {0, 0, 2}, {1, 1290, 1},
      {1, 1300, 1}, {2, 1320, 0}, {1, 1300, 0}, {1, 1300, 0}, {1, 9, 3}, {91, 150, 4}};  // the mirror puts arrays on the host
  const char *const pair = "attention_sm90_latent_pair", *const few = "attention_sm90_latent_decode", *const none = "";
  for (const int group : {4, 16, 32}) run(group, 16, pair, plain, behind_two);
  run(64, 16, none, plain, behind_two);
  if (!may) return;
  run(16, 1, "attention_sm90_latent", plain, behind_two);
  run(
      12, 16, "attention_sm90_latent", [](AttentionSpec& spec) { spec.score.soft_cap = 20.f, spec.score.sinks = true; }, behind_two);
  run(16, 16, few, bytes, behind_two);
  run(24, 16, none, bytes, behind_two);
  run(
      5, 64, few,
      [](AttentionSpec& spec) {
        spec.head_dim_qk = 576, spec.head_dim_v = 512, spec.kv_dtype = DType::fp8_e4m3, spec.kv_format = KvFormat::fp8_ds_mla;
      },
      behind_two);
  run(
      4, 16, none, [](AttentionSpec& spec) { spec.mask.window_left = 2000; }, behind_two);
  run(
      4, 16, none, [](AttentionSpec& spec) { spec.score.alibi = true; }, behind_two);
  // Drafts alone, of fewer tokens than half of a tile has rows for, and of more.
  const std::vector<CaseRequest> drafts{{3, 600, 0}, {3, 610, 0}, {2, 600, 0}, {4, 600, 0}};
  run(10, 16, pair, plain, drafts);
  run(16, 16, none, plain, drafts);
}

// The mirror puts guards around what it copies, so that a write beside a tensor is found, which no value of a result shows.
TEST_P(PlanConformance, AWriteBesideATensorIsFound) {
  const Case& c = *find_case("dtype_peaked_bf16_prefill");
  const CaseInputs inputs = make_inputs(c);
  const auto code = [&] { return imbrex::test::error_code([&] { run_case(*mirror, device, inputs, default_options(c)); }); };
  EXPECT_EQ(code(), "nothing thrown");
  backend.spoiled_byte = -1;
  EXPECT_EQ(code(), "mirror.guard");
  // The first byte behind the last element, in a tensor with gaps between heads and rows.
  const int rows = c.num_tokens() + c.padding_tokens, row = c.spec.num_q_heads * (c.spec.head_dim_v + 8) + 16;
  backend.spoiled_byte =
      int(((rows - 1) * row + (c.spec.num_q_heads - 1) * (c.spec.head_dim_v + 8) + c.spec.head_dim_v) * size_of(c.out_dtype));
  EXPECT_EQ(code(), "mirror.guard");
}

TEST_P(PlanConformance, SplitsByLoadToo) {
  Case c = *find_case("long_4097_q4_causal");
  const CaseInputs inputs = make_inputs(c);
  RunOptions options = default_options(c);
  options.balanced = true;
  const Judgement judgement = judge(expect(inputs), run_case(*mirror, device, inputs, options));
  EXPECT_TRUE(judgement.pass()) << judgement.failure;
}

INSTANTIATE_TEST_SUITE_P(Backends, PlanConformance, testing::Values("cuda_sm80", "cuda_sm90"), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace imbrex::cuda
