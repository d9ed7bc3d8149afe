// Tests of the composite plan: any mix of phases gives the bits of one plan, whatever lies between the tokens of a phase.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "attention/fake_backend.h"
#include "attention/reference.h"
#include "expect_error.h"
#include "imbrex/error.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

struct Problem {
  AttentionSpec spec;
  std::vector<int32_t> query_start_loc, seq_lens, table, indptr, indices, start_loc;
  std::vector<int64_t> slots;
  std::vector<uint8_t> mask;
  std::vector<float> q, k, v;
  Batch batch;
  int num_tokens = 0, num_blocks = 0;
};

enum class Keys { table, csr, ragged };

// Requests of the given (query, key) lengths, blocks in random order.
Problem make_problem(const std::vector<std::pair<int, int>>& requests, Keys keys, bool custom) {
  Problem p;
  p.spec.num_q_heads = 4;
  p.spec.num_kv_heads = 2;
  p.spec.head_dim_qk = 16;
  p.spec.head_dim_v = 8;
  p.spec.q_dtype = p.spec.kv_dtype = DType::f32;
  p.spec.block_size = keys == Keys::ragged ? 0 : 4;
  p.spec.mask.custom = custom;
  std::mt19937 random(7);
  const int block = 4, num_reqs = int(requests.size());
  int max_blocks = 1;
  for (const auto& [q, s] : requests) {
    p.num_blocks += (s + block - 1) / block;
    max_blocks = std::max(max_blocks, (s + block - 1) / block);
  }
  std::vector<int32_t> ids(size_t(p.num_blocks));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  p.query_start_loc = {0};
  p.indptr = {0};
  p.start_loc = {0};
  p.table.assign(size_t(num_reqs) * max_blocks, -7);
  size_t next = 0;
  for (int r = 0; r < num_reqs; ++r) {
    const auto [q, s] = requests[r];
    p.query_start_loc.push_back(p.query_start_loc.back() + q);
    p.seq_lens.push_back(s);
    p.start_loc.push_back(p.start_loc.back() + s);
    const int blocks = (s + block - 1) / block;
    for (int b = 0; b < blocks; ++b) p.indices.push_back(p.table[r * max_blocks + b] = ids[next++]);
    p.indptr.push_back(p.indptr.back() + blocks);
    for (int t = s - q; t < s; ++t) p.slots.push_back(int64_t(p.table[r * max_blocks + t / block]) * block + t % block);
    for (int i = 0; i < q * s; ++i) p.mask.push_back(random() % 3 != 0);
  }
  p.num_tokens = p.query_start_loc.back();
  const auto fill = [&](std::vector<float>& x, size_t size) {
    std::normal_distribution<float> normal;
    x.resize(size);
    for (float& value : x) value = normal(random);
  };
  fill(p.q, size_t(p.num_tokens) * 4 * 16);
  const size_t rows = keys == Keys::ragged ? size_t(p.start_loc.back()) : size_t(p.num_blocks) * block;
  fill(p.k, rows * 2 * 16);
  fill(p.v, rows * 2 * 8);
  p.batch.query_start_loc = p.query_start_loc;
  p.batch.seq_lens = p.seq_lens;
  if (keys == Keys::table) p.batch.block_table = TensorView::contiguous(p.table.data(), DType::i32, {num_reqs, max_blocks});
  if (keys == Keys::csr) {
    p.batch.kv_indptr = TensorView::contiguous(p.indptr.data(), DType::i32, {num_reqs + 1});
    p.batch.kv_indices = TensorView::contiguous(p.indices.data(), DType::i32, {int64_t(p.indices.size())});
  }
  if (keys == Keys::ragged) p.batch.kv_start_loc = TensorView::contiguous(p.start_loc.data(), DType::i32, {num_reqs + 1});
  if (keys != Keys::ragged) p.batch.slot_mapping = TensorView::contiguous(p.slots.data(), DType::i64, {p.num_tokens});
  if (custom) p.batch.custom_mask = TensorView::contiguous(p.mask.data(), DType::u8, {int64_t(p.mask.size())});
  return p;
}

KvCache cache_of(Problem& p) {
  if (p.spec.block_size == 0) {
    return {TensorView::contiguous(p.k.data(), DType::f32, {p.start_loc.back(), 2, 16}),
            TensorView::contiguous(p.v.data(), DType::f32, {p.start_loc.back(), 2, 8}),
            {},
            {}};
  }
  return {TensorView::contiguous(p.k.data(), DType::f32, {p.num_blocks, 4, 2, 16}),
          TensorView::contiguous(p.v.data(), DType::f32, {p.num_blocks, 4, 2, 8}),
          {},
          {}};
}

struct Result {
  std::vector<float> out, lse, k, v;
};

// Writes this step's keys (where there is a cache), then runs.
Result run(Plan& plan, Problem p, bool with_lse = true) {
  p.batch.query_start_loc = p.query_start_loc;
  p.batch.seq_lens = p.seq_lens;
  plan.update(p.batch);
  KvCache cache = cache_of(p);
  const bool latent = p.spec.kv_format == KvFormat::latent;
  if (latent) cache.v = {};
  if (p.spec.block_size > 0) {
    std::vector<float> k(size_t(p.num_tokens) * 2 * 16), v(size_t(p.num_tokens) * 2 * 8);
    for (size_t i = 0; i < k.size(); ++i) k[i] = float(i % 97) * 0.01f;
    for (size_t i = 0; i < v.size(); ++i) v[i] = float(i % 89) * 0.02f;
    plan.write_kv(cache, TensorView::contiguous(k.data(), DType::f32, {p.num_tokens, 2, 16}),
                  latent ? TensorView{} : TensorView::contiguous(v.data(), DType::f32, {p.num_tokens, 2, 8}));
  }
  Result result;
  result.out.assign(size_t(p.num_tokens) * 4 * 8, NAN);
  result.lse.assign(size_t(p.num_tokens) * 4, NAN);
  Outputs outputs{TensorView::contiguous(result.out.data(), DType::f32, {p.num_tokens, 4, 8}),
                  TensorView::contiguous(result.lse.data(), DType::f32, {p.num_tokens, 4})};
  if (!with_lse) outputs.lse = {};
  Inputs inputs;
  inputs.q = TensorView::contiguous(p.q.data(), DType::f32, {p.num_tokens, 4, 16});
  inputs.kv = cache;
  plan.run(inputs, outputs);
  result.k = p.k;
  result.v = p.v;
  return result;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

using Requests = std::vector<std::pair<int, int>>;
const Requests kOrdered{{1, 9}, {1, 4}, {0, 5}, {1, 1}, {5, 5}, {0, 0}, {3, 11}};
const Requests kInterleaved{{1, 9}, {5, 5}, {1, 4}, {0, 7}, {1, 1}, {3, 11}, {1, 13}, {0, 0}, {2, 2}};

class PhasePlanTest : public testing::TestWithParam<std::tuple<Keys, bool, int>> {};

TEST_P(PhasePlanTest, SameBitsAsOnePlan) {
  const auto [keys, custom, decode_max_q] = GetParam();
  const Backend& reference = reference_backend();
  for (const KvFormat format : {KvFormat::strided, KvFormat::latent})
    for (const Requests& requests : {kOrdered, kInterleaved, Requests{{4, 8}}, Requests{{1, 8}}, Requests{{0, 3}}}) {
      Problem p = make_problem(requests, keys, custom);
      p.spec.kv_format = format;
      PlanOptions options;
      options.limits = {.max_num_reqs = 16, .max_num_tokens = 64, .max_seq_len = 64};
      const auto whole = reference.plan(p.spec, describe_device("cpu"), options);
      const auto composite = plan_by_phase(reference, reference, p.spec, describe_device("cpu"), options, decode_max_q);
      const Result a = run(*whole, p), b = run(*composite, p);
      EXPECT_TRUE(same_bits(a.out, b.out)) << composite->str();
      EXPECT_TRUE(same_bits(a.lse, b.lse)) << composite->str();
      EXPECT_TRUE(same_bits(a.k, b.k) && same_bits(a.v, b.v)) << composite->str();
      EXPECT_TRUE(same_bits(run(*composite, p, false).out, a.out));
    }
}

INSTANTIATE_TEST_SUITE_P(Mixes, PhasePlanTest,
                         testing::Combine(testing::Values(Keys::table, Keys::csr, Keys::ragged), testing::Bool(), testing::Values(1, 3)));

TEST(PhasePlan, EachPhaseGoesToItsBackend) {
  // A plan that marks its tokens with the number it was made with.
  struct Marker final : Plan {
    explicit Marker(float mark) : mark(mark) {}
    void update(const Batch& batch, Stream) override { tokens = batch.num_tokens(); }
    void write_kv(const KvCache&, const TensorView&, const TensorView&, Stream) const override {}
    void run(const Inputs&, const Outputs& outputs, Stream) const override {
      for (int t = 0; t < tokens; ++t) {
        for (int i = 0; i < 4 * 8; ++i) outputs.out.as<float>()[t * outputs.out.stride(0) + i] = mark;
      }
    }
    std::string str() const override { return "marker"; }
    float mark;
    int tokens = 0;
  };
  struct MarkerBackend final : FakeBackend {
    explicit MarkerBackend(float mark) : FakeBackend("marker", {}), mark(mark) {}
    std::unique_ptr<Plan> plan(const AttentionSpec&, const DeviceInfo&, const PlanOptions&) const override {
      return std::make_unique<Marker>(mark);
    }
    float mark;
  };
  const MarkerBackend prefill(1), decode(2);
  const Problem p = make_problem(kInterleaved, Keys::table, false);
  const auto plan = plan_by_phase(prefill, decode, p.spec, describe_device("cpu"), {}, 1);
  const Result result = run(*plan, p, false);
  for (size_t r = 0; r < kInterleaved.size(); ++r) {
    for (int t = p.query_start_loc[r]; t < p.query_start_loc[r + 1]; ++t) {
      EXPECT_EQ(result.out[size_t(t) * 32], kInterleaved[r].first == 1 ? 2.f : 1.f) << "request " << r;
    }
  }
  EXPECT_NE(plan->str().find("gathered"), std::string::npos) << plan->str();
}

TEST(PhasePlan, RefusesBadInput) {
  const Backend& reference = reference_backend();
  const AttentionSpec spec = make_problem(kOrdered, Keys::table, false).spec;
  EXPECT_EQ(test::error_code([&] { plan_by_phase(reference, reference, spec, describe_device("cpu"), {}, 0); }), "phase_plan.decode_max_q");
  const auto plan = plan_by_phase(reference, reference, spec, describe_device("cpu"), {}, 1);
  Problem bad = make_problem(kOrdered, Keys::table, false);
  bad.seq_lens[0] = -1;
  bad.batch.query_start_loc = bad.query_start_loc;
  bad.batch.seq_lens = bad.seq_lens;
  EXPECT_TRUE(test::error_code([&] { plan->update(bad.batch); }).starts_with("batch."));
  Problem p = make_problem(kInterleaved, Keys::table, false);
  p.batch.query_start_loc = p.query_start_loc;
  p.batch.seq_lens = p.seq_lens;
  plan->update(p.batch);
  std::vector<float> out(size_t(p.num_tokens) * 4 * 8), lse(size_t(p.num_tokens));
  Inputs inputs;
  inputs.kv = cache_of(p);
  inputs.q = TensorView::contiguous(p.q.data(), DType::f32, {p.num_tokens - 1, 4, 16});
  Outputs outputs{TensorView::contiguous(out.data(), DType::f32, {p.num_tokens, 4, 8}), {}};
  EXPECT_EQ(test::error_code([&] { plan->run(inputs, outputs); }), "run.q");
  inputs.q = TensorView::contiguous(p.q.data(), DType::f32, {p.num_tokens, 4, 16});
  outputs.lse = TensorView::contiguous(lse.data(), DType::f32, {p.num_tokens, 1});
  EXPECT_EQ(test::error_code([&] { plan->run(inputs, outputs); }), "run.lse");
  outputs.lse = {};
  EXPECT_EQ(test::error_code([&] { plan->write_kv(inputs.kv, inputs.q, inputs.q); }), "write_kv.k");
}

// A device other than the host has no gather: such a batch has to come ordered by phase.
TEST(PhasePlan, InterleavedBatchIsRefusedOnOtherDevices) {
  struct Idle final : Plan {
    void update(const Batch&, Stream) override {}
    void write_kv(const KvCache&, const TensorView&, const TensorView&, Stream) const override {}
    void run(const Inputs&, const Outputs&, Stream) const override {}
    std::string str() const override { return "idle"; }
  };
  struct IdleBackend final : FakeBackend {
    IdleBackend() : FakeBackend("idle", {}) {}
    std::unique_ptr<Plan> plan(const AttentionSpec&, const DeviceInfo&, const PlanOptions&) const override {
      return std::make_unique<Idle>();
    }
  };
  const IdleBackend idle;
  const Problem ordered = make_problem(kOrdered, Keys::table, false), mixed = make_problem(kInterleaved, Keys::table, false);
  PlanOptions options;
  options.validate = false;
  const auto plan = plan_by_phase(idle, idle, ordered.spec, describe_device("h200"), options, 1);
  EXPECT_NO_THROW(plan->update(ordered.batch));
  try {
    plan->update(mixed.batch);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), "phase_plan.interleaved");
  }
}

}  // namespace
}  // namespace imbrex
