// Prefill over flat keys against prefill over the cache itself, which is what a plan made on the device runs: the same bits. And against
// cuda_sm80, so that both are not wrong alike.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>

#include "cuda/graph.h"
#include "gpu.h"
#include "imbrex/select.h"

namespace imbrex::cuda::test {
namespace {

struct FlatProblem {
  const char* name;
  AttentionSpec spec;
  std::vector<int32_t> q_lens, seq_lens;
  const char* flat;  // how many heads at a time
};

void PrintTo(const FlatProblem& problem, std::ostream* to) { *to << problem.name; }

AttentionSpec spec_of(int q_heads, int kv_heads, int dim, DType kv, int page, Mask mask = {}, ScoreMod score = {}) {
  return {.num_q_heads = q_heads,
          .num_kv_heads = kv_heads,
          .head_dim_qk = dim,
          .head_dim_v = dim,
          .q_dtype = DType::bf16,
          .kv_dtype = kv,
          .block_size = page,
          .mask = mask,
          .score = score};
}

AttentionSpec of_byte_queries(AttentionSpec spec) {
  spec.q_dtype = DType::fp8_e4m3;
  return spec;
}

constexpr DType kWords = DType::bf16, kBytes = DType::fp8_e4m3;
const std::vector<int32_t> kMixed{700, 1, 300, 1500, 20}, kMixedKeys{1900, 777, 300, 1517, 4000};

const FlatProblem kFlatProblems[] = {
    {"page1", spec_of(8, 2, 128, kWords, 1), kMixed, kMixedKeys, " 2 kv heads"},
    {"page12_odd_heads", spec_of(15, 5, 64, kWords, 12), kMixed, kMixedKeys, " 5 kv heads"},
    {"page4_dim80", spec_of(14, 2, 80, kWords, 4), kMixed, kMixedKeys, " 2 kv heads"},
    {"page1_dim256", spec_of(8, 2, 256, kWords, 1), kMixed, kMixedKeys, " 2 kv heads"},
    {"page1_window", spec_of(8, 2, 128, kWords, 1, {.window_left = 499}), kMixed, kMixedKeys, " 2 kv heads"},
    {"page1_full", spec_of(8, 4, 64, kWords, 1, {.causal = false}), kMixed, kMixedKeys, " 4 kv heads"},
    {"page1_soft_cap_sinks", spec_of(8, 4, 128, kWords, 1, {}, {.soft_cap = 5.f, .sinks = true}), kMixed, kMixedKeys, " 4 kv heads"},
    {"e4m3_page16", spec_of(8, 2, 128, kBytes, 16), kMixed, kMixedKeys, " 2 kv heads"},
    {"e4m3_page16_one_head", spec_of(7, 1, 128, kBytes, 16), kMixed, kMixedKeys, " 1 kv heads"},
    {"e4m3_page64_dim64", spec_of(16, 4, 64, kBytes, 64), kMixed, kMixedKeys, " 4 kv heads"},
    {"e4m3_page16_dim256", spec_of(8, 2, 256, kBytes, 16), kMixed, kMixedKeys, " 2 kv heads"},
    {"e4m3_page1", spec_of(8, 2, 128, kBytes, 1), kMixed, kMixedKeys, " 2 kv heads"},
    {"e4m3_page1_dim64_short", spec_of(8, 2, 64, kBytes, 1), {250, 9, 290}, {250, 2000, 512}, " 2 kv heads"},
    {"e4m3_page5_window", spec_of(8, 2, 128, kBytes, 5, {.window_left = 300}), kMixed, kMixedKeys, " 2 kv heads"},
    {"e4m3_rounds", spec_of(32, 8, 128, kBytes, 16), {600, 400}, {30000, 5000}, " 2 kv heads"},
    {"page1_rounds", spec_of(32, 8, 128, kWords, 1), {600, 400}, {16000, 5000}, " 4 kv heads"},
    {"queries_e4m3_page1", of_byte_queries(spec_of(8, 2, 128, kBytes, 1)), kMixed, kMixedKeys, " 2 kv heads"},
    {"queries_e4m3_page3_dim64", of_byte_queries(spec_of(16, 4, 64, kBytes, 3)), kMixed, kMixedKeys, " 4 kv heads"},
    {"queries_e4m3_page1_dim256", of_byte_queries(spec_of(8, 2, 256, kBytes, 1)), kMixed, kMixedKeys, " 2 kv heads"},
    {"queries_e4m3_page1_odd_heads", of_byte_queries(spec_of(15, 5, 96, kBytes, 1)), kMixed, kMixedKeys, " 5 kv heads"},
    {"queries_e4m3_page1_full", of_byte_queries(spec_of(8, 4, 128, kBytes, 1, {.causal = false})), kMixed, kMixedKeys, " 4 kv heads"},
    {"queries_e4m3_page12_window_cap",
     of_byte_queries(spec_of(8, 2, 128, kBytes, 12, {.window_left = 499}, {.soft_cap = 5.f, .sinks = true})), kMixed, kMixedKeys,
     " 2 kv heads"},
    {"queries_e4m3_rounds", of_byte_queries(spec_of(32, 8, 128, kBytes, 1)), {600, 400}, {30000, 5000}, " 4 kv heads"},
    {"no_room", spec_of(4, 2, 128, kBytes, 16), {600, 400}, {60000, 10000}, ""},
};

class DeviceFlatKv : public Gpu, public testing::WithParamInterface<FlatProblem> {};

TEST_P(DeviceFlatKv, ChangesNoBit) {
  if (device.sm != 90) GTEST_SKIP() << "needs sm_90, this is sm_" << device.sm;
  const AttentionSpec& spec = GetParam().spec;
  const std::vector<int32_t>&q_lens = GetParam().q_lens, &seq_lens = GetParam().seq_lens;
  const int reqs = int(q_lens.size()), most = *std::ranges::max_element(seq_lens), width = (most + spec.block_size - 1) / spec.block_size;
  std::vector<int32_t> starts{0};
  for (const int32_t q_len : q_lens) starts.push_back(starts.back() + q_len);
  const int64_t tokens = starts.back(), heads = spec.num_q_heads, kv_heads = spec.num_kv_heads, dim = spec.head_dim_v;
  std::mt19937 random(7);
  int64_t pages = 0;
  for (const int32_t seq_len : seq_lens) pages += (seq_len + spec.block_size - 1) / spec.block_size;
  std::vector<int32_t> order(static_cast<size_t>(pages)), table(size_t(reqs) * size_t(width), -1);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (size_t r = 0, next = 0; r < q_lens.size(); ++r)
    for (int b = 0; b * spec.block_size < seq_lens[r]; ++b) table[r * size_t(width) + size_t(b)] = order[next++];

  // Bytes of which all types make small numbers, with every mantissa, and now and then an infinity or NaN, where nothing reads.
  const auto bytes = [&](int64_t elements, DType type) {
    std::vector<unsigned char> values(static_cast<size_t>(elements * size_of(type)));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = (unsigned char)(size_of(type) == 1 || i % 2 == 1 ? (random() & 0x8f) | 0x30 : random());
    return values;
  };
  const int64_t side = pages * spec.block_size * kv_heads * dim;
  const DeviceBuffer q = upload(bytes(tokens * heads * dim, spec.q_dtype)), k = upload(bytes(side, spec.kv_dtype)),
                     v = upload(bytes(side, spec.kv_dtype)), ids = upload(table), starts_there = upload(starts),
                     lens_there = upload(seq_lens);
  std::vector<float> scales(static_cast<size_t>(kv_heads)), sinks(static_cast<size_t>(heads), 0.5f);
  for (size_t h = 0; h < scales.size(); ++h) scales[h] = 0.8f + 0.3f * float(h);
  const DeviceBuffer scale = upload(scales), sinks_there = upload(sinks);
  const auto view = [](const DeviceBuffer& memory, DType type, std::initializer_list<int64_t> sizes) {
    return TensorView::contiguous(memory.as<char>(), type, sizes, {DeviceType::cuda, 0});
  };
  const auto pages_of = [&](const DeviceBuffer& memory) { return view(memory, spec.kv_dtype, {pages, spec.block_size, kv_heads, dim}); };
  const TensorView scale_view = is_fp8(spec.kv_dtype) ? view(scale, DType::f32, {kv_heads}) : TensorView{};
  const Inputs in{.q = view(q, spec.q_dtype, {tokens, heads, dim}),
                  .q_scale = {},
                  .kv = {.k = pages_of(k), .v = pages_of(v), .k_scale = scale_view, .v_scale = scale_view},
                  .sinks = spec.score.sinks ? view(sinks_there, DType::f32, {heads}) : TensorView{}};
  struct Result {
    std::vector<float> out, lse;
  };
  const auto result_of = [&](const auto& launch) {
    const DeviceBuffer out = upload(std::vector<float>(size_t(tokens * heads * dim), NAN)),
                       lse = upload(std::vector<float>(size_t(tokens * heads), NAN));
    launch(Outputs{.out = view(out, DType::f32, {tokens, heads, dim}), .lse = view(lse, DType::f32, {tokens, heads})});
    return Result{download<float>(out), download<float>(lse)};
  };
  const auto run = [&](const imbrex::Plan& plan) {
    return result_of([&](const Outputs& outputs) { plan.run(in, outputs, stream.get()); });
  };
  const auto replay = [&](const imbrex::Plan& plan) {
    return result_of([&](const Outputs& outputs) {
      test::Graph(stream.get(), [&] { plan.run(in, outputs, stream.get()); }).replay();
      stream.synchronize();
    });
  };
  Batch batch{.query_start_loc = starts, .seq_lens = seq_lens};
  batch.block_table = TensorView::contiguous(table.data(), DType::i32, {reqs, width});
  const PlanOptions options{.limits = {.max_num_reqs = reqs + 3, .max_num_tokens = int(tokens) + 100, .max_seq_len = most},
                            .threads = {},
                            .on_device = true,
                            .out_dtype = DType::f32};
  const auto plan = find_backend("cuda_sm90")->plan(spec, device, options), sm80 = find_backend("cuda_sm80")->plan(spec, device, options);
  plan->update(batch, stream.get());
  const std::string made = plan->str();
  if (*GetParam().flat == '\0') {
    EXPECT_EQ(made.find("flat"), std::string::npos) << made;
  } else {
    EXPECT_NE(made.find(std::string("made flat") + GetParam().flat + " at a time"), std::string::npos) << made;
  }
  const Result flat = run(*plan), again = run(*plan);
  plan->update_on_device({.query_start_loc = view(starts_there, DType::i32, {reqs + 1}),
                          .seq_lens = view(lens_there, DType::i32, {reqs}),
                          .block_table = view(ids, DType::i32, {reqs, width}),
                          .max_num_tokens = int(tokens)},
                         stream.get());
  const Result paged = run(*plan);
  EXPECT_TRUE(plan->device_problems(stream.get()).empty());
  plan->update(batch, stream.get());
  const Result in_graph = replay(*plan);
  sm80->update(batch, stream.get());
  const Result expected = run(*sm80);

  for (const Result* other : {&again, &paged, &in_graph}) {
    size_t values = 0, sums = 0;
    for (size_t i = 0; i < flat.out.size(); ++i) values += std::bit_cast<uint32_t>(flat.out[i]) != std::bit_cast<uint32_t>(other->out[i]);
    for (size_t i = 0; i < flat.lse.size(); ++i) sums += std::bit_cast<uint32_t>(flat.lse[i]) != std::bit_cast<uint32_t>(other->lse[i]);
    EXPECT_EQ(values + sums, 0u) << values << " values, " << sums << " LSE "
                                 << (other == &again   ? "in a second run"
                                     : other == &paged ? "over the cache"
                                                       : "in a graph")
                                 << ": " << made;
  }
  double worst = 0, worst_lse = 0, error = 0, size = 0;
  for (size_t i = 0; i < expected.out.size(); ++i) {
    const double difference = std::fabs(double(flat.out[i]) - expected.out[i]);
    const double relative = difference / (0.05 + std::fabs(double(expected.out[i])));
    worst = std::isnan(relative) ? INFINITY : std::max(worst, relative);
    error += difference * difference, size += double(expected.out[i]) * expected.out[i];
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    const double difference = std::fabs(double(flat.lse[i]) - expected.lse[i]);
    worst_lse = std::isnan(difference) ? INFINITY : std::max(worst_lse, difference);
  }
  if (spec.q_dtype == DType::fp8_e4m3) {  // rounds weights to bytes: see device_attention_sm90_fp8_test.cpp
    EXPECT_LT(worst, INFINITY);
    EXPECT_LT(std::sqrt(error / size), 4e-2);
    EXPECT_LT(worst_lse, 2e-2);
    return;
  }
  EXPECT_LT(worst, 0.1);
  EXPECT_LT(worst_lse, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Problems, DeviceFlatKv, testing::ValuesIn(kFlatProblems), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace imbrex::cuda::test
