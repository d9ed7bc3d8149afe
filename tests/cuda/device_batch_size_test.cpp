// A request has the same bits alone and in a batch of any size, on a real driver: alone its pieces are many thread blocks', which join
// them; beside many others they are runs, which one thread block folds in registers.
#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "cuda/gpu.h"
#include "imbrex/backend.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

struct Layer {
  const char* name;
  AttentionSpec spec;
  int q_len = 1;
  const char* backend = "cuda_sm90";
  int from_element = 0;  // where keys and values begin: TMA loads from multiples of 16 bytes
};

AttentionSpec few_heads(int q_heads, int kv_heads, int dim, DType kv = DType::bf16, DType q = DType::bf16, int page = 16) {
  return {.num_q_heads = q_heads,
          .num_kv_heads = kv_heads,
          .head_dim_qk = dim,
          .head_dim_v = dim,
          .q_dtype = q,
          .kv_dtype = kv,
          .block_size = page};
}

AttentionSpec capped(AttentionSpec spec) {
  spec.score.soft_cap = 30.f;
  return spec;
}

const Layer kLayers[] = {
    {"heads8_1", few_heads(8, 1, 128)},
    {"heads8_1_sm80", few_heads(8, 1, 128), 1, "cuda_sm80"},
    {"heads8_1_d256", few_heads(8, 1, 256)},
    {"heads8_1_e4m3", few_heads(8, 1, 128, DType::fp8_e4m3)},
    {"heads16_2_d64", few_heads(16, 2, 64)},
    {"heads28_4", few_heads(28, 4, 128)},
    {"heads8_1_verify", few_heads(8, 1, 128), 4},
    {"heads8_1_d256_verify", few_heads(8, 1, 256), 4},
    {"heads71_1_d64_sm80", few_heads(71, 1, 64), 1, "cuda_sm80"},
    {"heads8_1_extend", few_heads(8, 1, 128), 9},
    {"heads14_2_extend", few_heads(14, 2, 64), 40},
    {"heads4_4_extend", few_heads(4, 4, 128), 200},
    {"heads8_1_extend_e4m3", few_heads(8, 1, 128, DType::fp8_e4m3), 30},
    {"heads8_2_extend_e4m3_queries", few_heads(8, 2, 128, DType::fp8_e4m3, DType::fp8_e4m3), 30},
    {"heads8_2_extend_e4m3_queries_page1", few_heads(8, 2, 128, DType::fp8_e4m3, DType::fp8_e4m3, 1), 30},
    {"heads16_2_flat_e4m3_queries_page1", few_heads(16, 2, 128, DType::fp8_e4m3, DType::fp8_e4m3, 1), 110},
    {"heads4_2_d256_extend_e4m3_queries", few_heads(4, 2, 256, DType::fp8_e4m3, DType::fp8_e4m3), 40},
    {"heads4_1_d256_extend", few_heads(4, 1, 256), 40},
    {"heads4_2_d192_extend", few_heads(4, 2, 192), 40},
    {"heads4_2_d256_cap_extend", capped(few_heads(4, 2, 256)), 70},
    {"heads16_2_d64_flat_page1", few_heads(16, 2, 64, DType::bf16, DType::bf16, 1), 110},  // flat keys, as long as there is room
    {"heads8_1_flat_e4m3", few_heads(8, 1, 128, DType::fp8_e4m3), 90},
    {"heads8_2_flat_e4m3_page1", few_heads(8, 2, 128, DType::fp8_e4m3, DType::bf16, 1), 70},
    {"heads8_1_verify_page1", few_heads(8, 1, 128, DType::bf16, DType::bf16, 1), 8},
    {"heads16_1_verify", few_heads(16, 1, 128), 6},
    {"heads12_1_d64_verify", few_heads(12, 1, 64), 10},
    {"heads4_2_d256_cap_verify", capped(few_heads(4, 2, 256)), 20},
    {"heads8_1_verify_unaligned", few_heads(8, 1, 128), 7, "cuda_sm90", 1},
    {"heads8_1_verify_e4m3", few_heads(8, 1, 128, DType::fp8_e4m3), 8},
    {"heads8_1_verify_e4m3_page1", few_heads(8, 1, 128, DType::fp8_e4m3, DType::bf16, 1), 8},
    {"heads16_1_verify_e4m3", few_heads(16, 1, 128, DType::fp8_e4m3), 6},
    {"heads12_1_d64_verify_e4m3_page1", few_heads(12, 1, 64, DType::fp8_e4m3, DType::bf16, 1), 10},
    {"heads4_2_d256_cap_verify_e4m3", capped(few_heads(4, 2, 256, DType::fp8_e4m3)), 20},
    {"heads8_1_verify_e4m3_unaligned", few_heads(8, 1, 128, DType::fp8_e4m3), 7, "cuda_sm90", 1},
    {"heads71_1_d64_e4m3", few_heads(71, 1, 64, DType::fp8_e4m3)},
    {"heads71_1_d64", few_heads(71, 1, 64)},
    {"heads40_1", few_heads(40, 1, 128)},
    {"heads8_1_extend_unaligned", few_heads(8, 1, 128), 30, "cuda_sm90", 1},
};

class DeviceBatchSize : public test::Gpu, public testing::WithParamInterface<Layer> {};

TEST_P(DeviceBatchSize, DoesNotMatter) {
  const AttentionSpec& spec = GetParam().spec;
  const Backend& backend = *find_backend(GetParam().backend);
  if (const auto reasons = backend.unsupported(spec, device); !reasons.empty()) GTEST_SKIP() << reasons[0].str();
  constexpr int kMostReqs = 300, kMostKeys = 40000;
  const int q_len = GetParam().q_len, width = (kMostKeys + spec.block_size - 1) / spec.block_size;
  const auto plan = backend.plan(
      spec, device, {.limits = {.max_num_reqs = kMostReqs, .max_num_tokens = kMostReqs * q_len, .max_seq_len = kMostKeys}, .threads = {}});

  // All requests have the same queries and the same pages, of which they see more or fewer.
  std::mt19937 random(11);
  std::vector<int32_t> row(static_cast<size_t>(width)), table;
  std::iota(row.begin(), row.end(), 0);
  std::shuffle(row.begin(), row.end(), random);
  for (int r = 0; r < kMostReqs; ++r) table.insert(table.end(), row.begin(), row.end());
  const auto bytes = [&](int64_t elements, DType type) {
    std::vector<unsigned char> values(static_cast<size_t>(elements * size_of(type)));
    for (unsigned char& b : values) b = (unsigned char)((random() & 0x8f) | 0x30);  // small numbers in every type
    return values;
  };
  const int64_t row_values = int64_t(spec.num_q_heads) * spec.head_dim_v, tokens = int64_t(kMostReqs) * q_len;
  const std::vector<unsigned char> of_request = bytes(q_len * int64_t(spec.num_q_heads) * spec.head_dim_qk, spec.q_dtype);
  std::vector<unsigned char> queries;
  for (int r = 0; r < kMostReqs; ++r) queries.insert(queries.end(), of_request.begin(), of_request.end());
  const int64_t key_values = GetParam().from_element + int64_t(width) * spec.block_size * spec.num_kv_heads * spec.head_dim_qk;
  const DeviceBuffer q = upload(queries), k = upload(bytes(key_values, spec.kv_dtype)), v = upload(bytes(key_values, spec.kv_dtype)),
                     ids = upload(table), out(context, size_t(tokens * row_values) * 2),
                     lse(context, size_t(tokens * spec.num_q_heads) * 4);

  const Device gpu{DeviceType::cuda, 0};
  const auto pages = [&](const DeviceBuffer& side) {
    void* const data = side.as<unsigned char>() + GetParam().from_element * size_of(spec.kv_dtype);
    return TensorView::contiguous(data, spec.kv_dtype, {width, spec.block_size, spec.num_kv_heads, spec.head_dim_qk}, gpu);
  };
  struct Result {
    std::vector<uint16_t> out;
    std::vector<float> lse;
  };
  // Says for each request how many of its values differ from those that it has alone, and which is the first.
  const auto differences = [&](const std::vector<Result>& results, const std::function<const Result&(size_t)>& expected) {
    std::string text;
    for (size_t r = 0; r < results.size(); ++r) {
      const Result &got = results[r], &want = expected(r);
      size_t values = 0, first = got.out.size(), sums = 0;
      for (size_t i = 0; i < got.out.size(); ++i)
        if (got.out[i] != want.out[i]) first = std::min(first, i), ++values;
      for (size_t i = 0; i < got.lse.size(); ++i) sums += got.lse[i] != want.lse[i];
      if (values + sums == 0) continue;
      text += "\n  request " + std::to_string(r) + ": " + std::to_string(values) + " values, " + std::to_string(sums) + " LSE";
      if (values > 0)
        text += ", value " + std::to_string(first) + ": " + std::to_string(got.out[first]) + ", alone " + std::to_string(want.out[first]);
    }
    return text;
  };
  std::string made;
  // Runs one batch of these requests, and returns the results of each.
  const auto run = [&](const std::vector<int32_t>& lens) {
    const int reqs = int(lens.size());
    std::vector<int32_t> starts(lens.size() + 1);
    for (size_t r = 0; r < starts.size(); ++r) starts[r] = int32_t(r) * q_len;
    Batch batch;
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(ids.as(), DType::i32, {reqs, width}, gpu);
    plan->update(batch, stream.get());
    made = plan->str();
    fill_bytes(out.address(), 0xff, out.bytes(), stream.get());
    plan->run({.q = TensorView::contiguous(q.as(), spec.q_dtype, {reqs * q_len, spec.num_q_heads, spec.head_dim_qk}, gpu),
               .kv = {.k = pages(k), .v = pages(v), .k_scale = {}, .v_scale = {}}},
              {.out = TensorView::contiguous(out.as(), spec.out_dtypes()[0], {reqs * q_len, spec.num_q_heads, spec.head_dim_v}, gpu),
               .lse = TensorView::contiguous(lse.as(), DType::f32, {reqs * q_len, spec.num_q_heads}, gpu)},
              stream.get());
    const auto all = download<uint16_t>(out);
    const auto all_lse = download<float>(lse);
    std::vector<Result> results(lens.size());
    for (size_t r = 0; r < lens.size(); ++r) {
      const long at = long(r) * q_len;
      results[r].out.assign(all.begin() + at * row_values, all.begin() + (at + q_len) * row_values);
      results[r].lse.assign(all_lse.begin() + at * spec.num_q_heads, all_lse.begin() + (at + q_len) * spec.num_q_heads);
    }
    return results;
  };

  const std::vector<int32_t> lens{700, 2500, 4096, 5001, 9000, 16384, 40000};
  std::vector<Result> alone;
  int joined = 0, whole = 0;
  for (const int32_t len : lens) {
    alone.push_back(run({len})[0]);
    joined += made.find(" 0 merges") == std::string::npos;
    for (const int reqs : {2, 5, 20, 40, 130, 264, 300}) {
      const std::vector<Result> results = run(std::vector<int32_t>(size_t(reqs), len));
      whole += made.find(" 0 merges") != std::string::npos;
      const std::string different = differences(results, [&](size_t) -> const Result& { return alone.back(); });
      ASSERT_TRUE(different.empty()) << len << " keys, " << reqs << " requests: " << made << different;
    }
  }
  EXPECT_GE(joined, 4);
  EXPECT_GE(whole, 2);

  for (int trial = 0; trial < 20; ++trial) {  // batches of all lengths
    std::vector<size_t> which(1 + random() % unsigned(trial % 2 == 0 ? 20 : kMostReqs));
    std::vector<int32_t> mixed;
    for (size_t& w : which) mixed.push_back(lens[w = random() % lens.size()]);
    const std::vector<Result> results = run(mixed);
    const std::string different = differences(results, [&](size_t r) -> const Result& { return alone[which[r]]; });
    ASSERT_TRUE(different.empty()) << "a batch of all lengths: " << made << different;
  }
}

INSTANTIATE_TEST_SUITE_P(Layers, DeviceBatchSize, testing::ValuesIn(kLayers), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace imbrex::cuda
