// Laws that hold for every backend: what must not change a result does not change a bit of it, and split results join to the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>

#include "attention/kv_codec.h"
#include "imbrex/merge.h"
#include "matrix.h"

namespace imbrex::test {
namespace {

// A law runs a case many times, and to make its inputs takes as long as to run it once.
const CaseInputs& inputs_of_last(const Case& c) {
  static std::optional<std::pair<Case, CaseInputs>> last;
  if (!last || last->first != c) last.emplace(c, make_inputs(c));
  return last->second;
}

class Laws : public testing::TestWithParam<Target> {
 protected:
  // The case in heads, dimensions and types that the target runs; nothing is left to skip, since every target runs one of them.
  Case fit(const Case& wanted) const {
    Case c = wanted;
    c.out_dtype = DType::f32;
    if (values_in_keys()) c.spec.kv_format = GetParam().kv_format;
    for (bool even : {false, true})
      for (DType kv : {wanted.spec.kv_dtype, DType::bf16, DType::fp8_e4m3})
        for (DType q : {wanted.spec.q_dtype, DType::bf16}) {
          c.spec.q_dtype = q;
          c.spec.kv_dtype = kv;
          c.spec.num_q_heads = even ? 4 * c.spec.num_kv_heads : wanted.spec.num_q_heads;
          c.spec.head_dim_v = even ? c.spec.head_dim_qk : wanted.spec.head_dim_v;
          if (runs(c, GetParam())) return c;
        }
    ADD_FAILURE() << GetParam().name() << " runs no version of " << wanted.spec.str();
    return c;
  }
  RunOptions options(const Case& c) const {
    RunOptions o;
    EXPECT_TRUE(options_for(c, GetParam(), o));
    o.check_cache = false;
    return o;
  }
  RunResult run(const Case& c, const RunOptions& o) const {
    RunResult result = run_case(*GetParam().backend, GetParam().device, inputs_of_last(c), o);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
  const KvCodec& codec() const { return codec_of(GetParam().kv_format); }
  bool values_in_keys() const { return codec().values_in_keys; }
};

Case base_case(DType q, DType kv, std::vector<CaseRequest> requests) {
  Case c;
  c.name = "law";
  c.spec.num_q_heads = 6;
  c.spec.num_kv_heads = 2;
  c.spec.head_dim_qk = c.spec.head_dim_v = 64;
  c.spec.q_dtype = q;
  c.spec.kv_dtype = kv;
  c.requests = std::move(requests);
  for (int r = 0; r < int(c.requests.size()); ++r) c.requests[r].id = r;
  c.seed = 99;
  return c;
}

std::vector<Case> law_cases() {
  std::vector<Case> cases;
  const std::vector<CaseRequest> mixed{{1, 100}, {0, 0}, {150, 150}, {0, 25}, {6, 271}, {1, 1}, {33, 65}};
  cases.push_back(base_case(DType::bf16, DType::bf16, mixed));
  cases.push_back(base_case(DType::f32, DType::f32, mixed));
  cases.push_back(base_case(DType::bf16, DType::fp8_e4m3, mixed));
  cases.push_back(base_case(DType::f16, DType::f16, mixed));
  cases.push_back(base_case(DType::bf16, DType::bf16, mixed));
  cases.back().spec.mask.window_left = 40;
  cases.back().spec.score.sinks = true;
  cases.push_back(base_case(DType::bf16, DType::bf16, mixed));
  cases.back().spec.mask.chunk = 48;
  cases.back().spec.score.soft_cap = 20.f;
  cases.back().spec.head_dim_v = 40;
  return cases;
}

TEST_P(Laws, PagesDoNotMatter) {
  for (const Case& wanted : law_cases()) {
    const Case c = fit(wanted);
    const RunOptions first = options(c);
    const RunResult expected = run(c, first);
    // Where TMA loads, pages of an fp8 cache that are no multiple of 8 tokens take another kernel, and so do orders whose dims are not
    // neighbours.
    const bool tma = GetParam().backend->name() == "cuda_sm90";
    int sizes = 0;
    std::optional<RunResult> small_fp8_pages;
    for (int block_size : {0, 1, 3, 16, 32, 48, 64, 128, 544}) {
      if (block_size == 0 ? !codec().ragged : block_size % codec().block_unit != 0) continue;
      Case other = c;
      other.spec.block_size = block_size;
      if (!runs(other, GetParam())) continue;
      ++sizes;
      RunOptions o = first;
      o.block_size = block_size;
      o.csr = block_size % 32 == 0;
      o.page_seed = 1000 + uint64_t(block_size);
      const RunResult result = run(c, o);
      const bool another = tma && is_fp8(c.spec.kv_dtype) && block_size % 8 != 0;
      if (another && !small_fp8_pages) small_fp8_pages = result;
      expect_same(result, another ? *small_fp8_pages : expected, c.spec.str() + " block_size " + std::to_string(block_size));
    }
    EXPECT_GE(sizes, 5) << c.spec.str();
    std::optional<RunResult> without_tma;
    for (const std::string order : {"lbthd", "blhtd", "hlbtd", "dbtlh", "dlbht"}) {
      RunOptions o = first;
      o.order = order;
      const RunResult result = run(c, o);
      if (tma && !order.ends_with('d') && !without_tma) without_tma = result;
      expect_same(result, tma && !order.ends_with('d') ? *without_tma : expected, c.spec.str() + " order " + order);
    }
  }
}

// out and lse of request r as a result of its own.
RunResult rows_of(const RunResult& all, const Case& c, size_t r) {
  size_t token = 0;
  for (size_t i = 0; i < r; ++i) token += size_t(c.requests[i].q_len);
  const size_t heads = size_t(c.spec.num_q_heads), width = heads * size_t(c.spec.head_dim_v), count = size_t(c.requests[r].q_len);
  const auto cut = [](const std::vector<float>& v, size_t begin, size_t size) {
    return std::vector<float>(v.begin() + long(begin), v.begin() + long(begin + size));
  };
  return {.out = cut(all.out, token * width, count * width), .lse = cut(all.lse, token * heads, count * heads), .violations = {}};
}

TEST_P(Laws, NeighboursAndOrderDoNotMatter) {
  for (const Case& wanted : law_cases()) {
    const Case c = fit(wanted);
    const RunResult together = run(c, options(c));
    for (size_t r = 0; r < c.requests.size(); ++r) {
      Case alone = c;
      alone.requests = {c.requests[r]};
      expect_same(run(alone, options(alone)), rows_of(together, c, r), c.spec.str() + " being alone, request " + std::to_string(r));
    }
    std::mt19937_64 random(5);
    for (int trial = 0; trial < 3; ++trial) {
      std::vector<size_t> order(c.requests.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
      Case permuted = c;
      for (size_t i = 0; i < order.size(); ++i) permuted.requests[i] = c.requests[order[i]];
      const RunResult result = run(permuted, options(permuted));
      for (size_t i = 0; i < order.size(); ++i)
        expect_same(rows_of(result, permuted, i), rows_of(together, c, order[i]), c.spec.str() + " a permutation");
    }
  }
}

// Requests that begin with the same blocks may be read together; each has the bits that it has with copies of them. Those of request id 0
// have more or less in common: 600 keys, 1000, 1500 or 2048.
TEST_P(Laws, BlocksInCommonDoNotMatter) {
  const std::vector<CaseRequest> behind_prompts{{1, 2100, 0}, {1, 2110, 0}, {2, 2105, 0}, {1, 700, 1}, {0, 0, 2},   {1, 2100, 0},
                                                {1, 2130, 0}, {2, 705, 1},  {1, 2048, 0}, {1, 701, 1}, {40, 90, 3}, {31, 90, 3},
                                                {1, 1500, 0}, {1, 1000, 0}, {2, 1502, 0}, {1, 600, 0}};
  struct Shape {
    DType q, kv;
    int group, block_size;
    PositionPattern positions = PositionPattern::none;
    Mask mask{};
    const char* score_mod = "";
  };
  for (const Shape& shape : {Shape{DType::bf16, DType::bf16, 4, 16},
                             {DType::bf16, DType::fp8_e4m3, 8, 64},
                             {DType::f16, DType::f16, 1, 1},
                             {DType::bf16, DType::bf16, 12, 16},
                             {DType::bf16, DType::fp8_e4m3, 16, 32},
                             {DType::bf16, DType::bf16, 4, 16, PositionPattern::zigzag},
                             {DType::bf16, DType::bf16, 12, 16, PositionPattern::spans},
                             {DType::bf16, DType::bf16, 4, 16, {}, {.window_left = 2108}},
                             {DType::bf16, DType::bf16, 12, 16, {}, {.window_left = 1400}},
                             {DType::bf16, DType::bf16, 4, 16, {}, {.chunk = 1055, .chunk_lookback = 1}},
                             {DType::f16, DType::f16, 2, 16, {}, {}, "float bias[,]; 20 * tanh(score / 20) + 0.125 * bias[head, kv]"}}) {
    if (shape.group != 4 && GetParam().device.device.type == DeviceType::cpu) continue;  // one kernel for all of them
    std::vector<CaseRequest> requests = behind_prompts;
    if (shape.group == 4) requests.insert(requests.end(), {{1, 4200, 4}, {1, 4230, 4}});  // CPUs cut keys at multiples of 4096
    Case wanted = base_case(shape.q, shape.kv, requests);
    wanted.spec.num_q_heads = 2 * shape.group, wanted.spec.block_size = shape.block_size;
    wanted.positions = shape.positions, wanted.spec.mask = shape.mask,
    wanted.spec.mask.positions = shape.positions != PositionPattern::none;
    if (*shape.score_mod != 0) wanted.spec.score_mod = parse_expression(shape.score_mod);
    if (wanted.spec.mask.positions && GetParam().on_gpu() && !runs(wanted, GetParam())) continue;
    const Case c = fit(wanted);
    RunOptions apart = options(c);
    if (apart.block_size == 0) apart.block_size = 16;
    RunOptions together = apart;
    together.share_blocks = true;
    expect_same(run(c, together), run(c, apart), c.spec.str() + " blocks in common");
  }
}

TEST_P(Laws, ChunksOfAPromptDoNotMatter) {
  std::vector<Case> cases = law_cases();
  for (Case& c : cases) c.requests = {{300, 300, 0}, {70, 170, 1}, {1, 40, 2}};
  cases.push_back(base_case(DType::bf16, DType::bf16, {{14, 4100}}));  // crosses a split
  cases.back().spec.num_q_heads = 2;
  cases.back().spec.num_kv_heads = 1;
  for (const Case& wanted : cases) {
    const Case c = fit(wanted);
    const RunResult expected = run(c, options(c));
    for (int chunk : {1, 7, 64, 129}) {
      RunOptions o = options(c);
      o.chunk = chunk;
      const RunResult chunked = run(c, o);
      const std::string what = c.spec.str() + " chunk " + std::to_string(chunk);
      if (!GetParam().on_gpu()) {
        expect_same(chunked, expected, what);
        continue;
      }
      // There the number of queries decides which kernel runs a request.
      const Judgement judgement = judge(expect(make_inputs(c)), chunked);
      EXPECT_TRUE(judgement.pass()) << what << ": " << judgement.failure;
    }
  }
}

TEST_P(Laws, ThreadsDoNotMatter) {
  std::vector<Case> cases = law_cases();
  cases.push_back(base_case(DType::bf16, DType::bf16, {{1, 9000}, {1, 100}, {3, 5000}}));  // merges
  cases.back().spec.num_q_heads = 2;
  cases.back().spec.num_kv_heads = 1;
  for (const Case& wanted : cases) {
    const Case c = fit(wanted);
    const RunResult expected = run(c, options(c));
    expect_same(run(c, options(c)), expected, c.spec.str() + " a second run");
    for (int count : {2, 3, 5}) {
      ThreadPool pool(count);
      RunOptions o = options(c);
      o.threads = pool.parallel_for();
      expect_same(run(c, o), expected, c.spec.str() + " " + std::to_string(count) + " threads");
    }
  }
}

TEST_P(Laws, SplitsByLoadAreWithinTheBounds) {
  std::vector<Case> cases;
  for (ValuePattern values : {ValuePattern::plain, ValuePattern::rising, ValuePattern::spike}) {
    cases.push_back(base_case(DType::bf16, DType::bf16, {{1, 3000}, {0, 0}, {1, 90}, {3, 1700}, {20, 20}}));
    cases.back().spec.num_q_heads = 4;
    cases.back().spec.num_kv_heads = 1;
    cases.back().values = values;
    cases.push_back(cases.back());
    cases.back().spec.mask.window_left = 899;
    cases.push_back(cases.back());
    cases.back().spec.mask = {.chunk = 1000};
    cases.back().spec.score.sinks = true;
  }
  for (const Case& wanted : cases) {
    const Case c = fit(wanted);
    const CaseInputs inputs = make_inputs(c);
    const Expected expected = expect(inputs);
    for (int count : {1, 3, 7}) {
      ThreadPool pool(count);
      RunOptions o = options(c);
      o.threads = pool.parallel_for();
      o.balanced = true;
      const Judgement judgement = judge(expected, run_case(*GetParam().backend, GetParam().device, inputs, o));
      EXPECT_TRUE(judgement.pass()) << c.spec.str() << ", " << count << " threads: " << judgement.failure;
    }
  }
}

TensorView view(std::vector<float>& v, std::initializer_list<int64_t> sizes) { return TensorView::contiguous(v.data(), DType::f32, sizes); }

RunResult merge(std::vector<RunResult>& parts, const AttentionSpec& spec, int64_t tokens) {
  const int64_t heads = spec.num_q_heads, dim = spec.head_dim_v;
  RunResult merged = parts[0];
  std::vector<PartialResult> partial;
  for (RunResult& r : parts) partial.push_back({view(r.out, {tokens, heads, dim}), view(r.lse, {tokens, heads})});
  merge_partial_results(partial, view(merged.out, {tokens, heads, dim}), view(merged.lse, {tokens, heads}));
  return merged;
}

// Two at a time, in an order of its own: a merge is again a part.
RunResult merge_in_a_chain(std::vector<RunResult> parts, const AttentionSpec& spec, int64_t tokens, std::mt19937_64& random) {
  while (parts.size() > 1) {
    std::swap(parts[random() % parts.size()], parts.back());
    std::vector<RunResult> pair{std::move(parts.back())};
    parts.pop_back();
    const size_t other = random() % parts.size();
    pair.push_back(std::move(parts[other]));
    parts[other] = merge(pair, spec, tokens);
  }
  return std::move(parts[0]);
}

// Which part has each key of each query: cut at random points, each the same for all queries, or scattered. A part may have none.
std::vector<size_t> deal_out(const CaseInputs& in, size_t parts, bool scattered, std::mt19937_64& random) {
  std::vector<size_t> owners;
  for (const CaseRequest& r : in.requests) {
    std::vector<size_t> cuts(parts - 1);
    for (size_t& cut : cuts) cut = random() % size_t(r.seq_len + 1);
    const size_t spared = random() % parts;  // mostly has nothing when scattered
    for (int i = 0; i < r.q_len; ++i)
      for (int j = 0; j < r.seq_len; ++j) {
        size_t owner = size_t(std::count_if(cuts.begin(), cuts.end(), [&](size_t cut) { return cut <= size_t(j); }));
        if (scattered) owner = random() % parts;
        if (scattered && owner == spared) owner = (owner + (random() % 64 > 0)) % parts;
        owners.push_back(owner);
      }
  }
  return owners;
}

std::vector<Case> split_cases() {
  std::vector<Case> cases = law_cases();
  for (ValuePattern values :
       {ValuePattern::rising, ValuePattern::falling, ValuePattern::spike, ValuePattern::large, ValuePattern::constant})
    for (DType dtype : {DType::bf16, DType::f32}) {
      cases.push_back(base_case(dtype, dtype, {}));
      cases.back().values = values;
      cases.back().spec.score.sinks = values == ValuePattern::spike;
    }
  for (Case& c : cases) {
    c.requests = {{1, 61, 0}, {0, 0, 1}, {4, 135, 2}, {2, 2, 3}, {0, 9, 4}};
    c.spec.num_q_heads = 3;
    c.spec.num_kv_heads = 1;
    c.spec.head_dim_v = 24;
  }
  cases.push_back(law_cases()[0]);  // one large batch, prefills too
  return cases;
}

// Parts are made by a custom mask for each; a sink is one more part, whose output is 0.
TEST_P(Laws, SplitAnywhereAndMergeIsTheWhole) {
  std::mt19937_64 random(17);
  int splits = 0, empty_rows = 0;
  for (const Case& wanted : split_cases()) {
    Case c = fit(wanted);
    c.spec.mask.custom = true;
    if (!runs(c, GetParam())) GTEST_SKIP() << GetParam().name() << " has no custom masks";
    c.custom = CustomPattern::random;
    const CaseInputs whole = make_inputs(c);
    const Expected expected = expect(whole);
    for (int trial = 0; trial < (c.num_tokens() > 100 ? 4 : 32); ++trial, ++splits) {
      const size_t parts = 1 + random() % 6;
      std::vector<CaseInputs> inputs(parts, whole);
      const std::vector<size_t> owners = deal_out(whole, parts, trial % 2 == 1, random);
      for (size_t i = 0; i < owners.size(); ++i)
        for (size_t p = 0; p < parts; ++p)
          if (p != owners[i]) inputs[p].custom_mask.bytes[i] = 0;
      std::vector<RunResult> results;
      for (CaseInputs& part : inputs) {
        part.spec.score.sinks = false;
        part.sinks = {};
        results.push_back(run_case(*GetParam().backend, GetParam().device, part, options(c)));
        empty_rows += int(std::count(results.back().lse.begin(), results.back().lse.end(), -std::numeric_limits<float>::infinity()));
      }
      if (c.spec.score.sinks) {
        RunResult sink = results[0];
        std::fill(sink.out.begin(), sink.out.end(), 0.f);
        for (size_t i = 0; i < sink.lse.size(); ++i) sink.lse[i] = float(whole.sinks.get(int64_t(i) % c.spec.num_q_heads));
        results.push_back(std::move(sink));
      }
      const Judgement chained = judge(expected, merge_in_a_chain(results, c.spec, whole.num_tokens(), random));
      EXPECT_TRUE(chained.pass()) << c.spec.str() << ", " << parts << " parts, two at a time: " << chained.failure;
      const Judgement at_once = judge(expected, merge(results, c.spec, whole.num_tokens()));
      EXPECT_TRUE(at_once.pass()) << c.spec.str() << ", " << parts << " parts: " << at_once.failure;
    }
  }
  EXPECT_GE(splits, 500);
  EXPECT_GT(empty_rows, 1000);
}

// A key that is not a number: the rows that see it say so, in the output and in the LSE; no other row changes a bit.
TEST_P(Laws, ANanAmongTheKeysReachesTheRowsThatSeeIt) {
  constexpr int kKey = 20;
  for (float soft_cap : {0.f, 20.f})
    for (int context : {0, 130}) {  // prefill, and verify after a block of keys
      const int q_len = context ? 6 : 40;
      Case c = base_case(DType::bf16, DType::bf16, {{q_len, context + q_len}, {3, 50}});
      c.spec.score.soft_cap = soft_cap;
      c = fit(c);
      const RunOptions o = options(c);
      const RunResult clean = run(c, o);
      CaseInputs in = make_inputs(c);
      const int heads = c.spec.num_q_heads, dim = c.spec.head_dim_v, group = heads / c.spec.num_kv_heads;
      in.k.set(int64_t(kKey) * c.spec.num_kv_heads * c.spec.head_dim_qk, std::numeric_limits<double>::quiet_NaN());  // head 0, dim 0
      const RunResult result = run_case(*GetParam().backend, GetParam().device, in, o);
      for (int t = 0; t < c.num_tokens(); ++t)
        for (int h = 0; h < heads; ++h) {
          const size_t row = size_t(t) * heads + h;
          const bool sees = t < q_len && context + t >= kKey && h < group;
          ASSERT_EQ(std::isnan(result.lse[row]), sees) << c.spec.str() << " token " << t << " head " << h;
          for (int d = 0; d < dim; ++d) {
            const float x = result.out[row * dim + d];
            const bool is_value = values_in_keys() && GetParam().on_gpu() && d == 0;  // where nothing is computed again for other rows
            if (is_value && !sees && t < q_len && h < group && std::isnan(x)) continue;
            ASSERT_TRUE(sees ? std::isnan(x) : x == clean.out[row * dim + d]) << c.spec.str() << " token " << t << " head " << h;
          }
        }
    }
}

// A value that is not finite: the rows that see it have it in its dim. Every other number is the same bits as without it.
TEST_P(Laws, ANonFiniteValueReachesTheRowsThatSeeItAndNoOther) {
  if (values_in_keys()) GTEST_SKIP() << "such a value is such a key";
  constexpr int kKey = 150, kDim = 3;
  for (double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
    for (int context : {0, 145})  // prefill, and verify
      for (int window : {-1, 30}) {
        const int q_len = context ? 10 : 300;
        Case c = base_case(DType::bf16, DType::bf16, {{q_len, context + q_len}, {3, 200}});
        c.spec.mask.window_left = window;
        c = fit(c);
        if (size_of(c.spec.kv_dtype) == 1) value = std::numeric_limits<double>::quiet_NaN();  // e4m3 has no infinity
        const RunOptions o = options(c);
        const RunResult clean = run(c, o);
        CaseInputs in = make_inputs(c);
        const int heads = c.spec.num_q_heads, dim = c.spec.head_dim_v, group = heads / c.spec.num_kv_heads;
        in.v.set(int64_t(kKey) * c.spec.num_kv_heads * dim + kDim, value);  // head 0
        const RunResult result = run_case(*GetParam().backend, GetParam().device, in, o);
        EXPECT_EQ(result.lse, clean.lse) << c.spec.str();
        for (int t = 0; t < c.num_tokens(); ++t)
          for (int h = 0; h < heads; ++h) {
            const int position = context + t;
            const bool sees = t < q_len && position >= kKey && (window < 0 || position - window <= kKey) && h < group;
            for (int d = 0; d < dim; ++d) {
              const size_t at = (size_t(t) * heads + h) * dim + d;
              const bool beside = GetParam().on_gpu() && t < q_len && h < group && d == kDim;  // nothing is computed again there
              if (beside && !sees && std::isnan(result.out[at])) continue;
              ASSERT_TRUE(sees && d == kDim ? !std::isfinite(result.out[at]) : result.out[at] == clean.out[at])
                  << c.spec.str() << " token " << t << " head " << h << " dim " << d << ": " << result.out[at];
            }
          }
      }
}

// Records of latents and their parts have laws of their own (latent_laws_test.cpp).
std::vector<Target> law_targets() {
  std::vector<Target> found;
  for (const Target& target : targets())
    if (target.kv_format != KvFormat::fp8_ds_mla && target.kv_format != KvFormat::latent_rope) found.push_back(target);
  return found;
}

INSTANTIATE_TEST_SUITE_P(All, Laws, testing::ValuesIn(law_targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test
