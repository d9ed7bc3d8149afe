// The wgmma prefill kernel for bytes against cuda_sm80, which multiplies the same numbers exactly: long requests, which the reference
// would take minutes for, and the same bits in every run.
#include <cmath>
#include <cstring>
#include <random>

#include "core/float_types.h"
#include "gpu.h"
#include "imbrex/select.h"

namespace imbrex::cuda::test {
namespace {

struct Problem {
  const char* name;
  AttentionSpec spec;
  int reqs, q_len, seq_len;
};

AttentionSpec spec_of(int q_heads, int kv_heads, int dim, int page, Mask mask = {}, ScoreMod score = {}) {
  return {.num_q_heads = q_heads,
          .num_kv_heads = kv_heads,
          .head_dim_qk = dim,
          .head_dim_v = dim,
          .q_dtype = DType::fp8_e4m3,
          .kv_dtype = DType::fp8_e4m3,
          .block_size = page,
          .mask = mask,
          .score = score};
}

const Problem kProblems[] = {
    {"causal_page16", spec_of(8, 2, 128, 16), 3, 1900, 1900},
    {"full_page64", spec_of(4, 4, 128, 64, {.causal = false}), 2, 1500, 1500},
    {"full_page8", spec_of(4, 1, 128, 8, {.causal = false}), 1, 70, 130},
    {"chunked_page256", spec_of(8, 2, 128, 256), 2, 500, 5000},
    {"page24", spec_of(4, 2, 128, 24), 2, 700, 900},
    {"window_page128", spec_of(4, 1, 128, 128, {.window_left = 499}), 2, 1257, 2600},
    {"dim64", spec_of(4, 4, 64, 16), 2, 1500, 1500},
    {"dim256", spec_of(8, 2, 256, 16), 2, 1500, 1700},
    {"dim256_full_page8", spec_of(4, 4, 256, 8, {.causal = false}), 1, 600, 900},
    {"dim256_window_odd_heads", spec_of(6, 3, 256, 64, {.window_left = 299}), 2, 500, 1100},
    {"dim256_soft_cap", spec_of(8, 2, 256, 16, {}, {.soft_cap = 5.f}), 1, 900, 900},
    {"dim192", spec_of(8, 2, 192, 16), 1, 900, 1100},
    {"dim96", spec_of(8, 2, 96, 16), 1, 900, 1100},
    {"dim80", spec_of(8, 2, 80, 16), 2, 900, 1100},
    {"dim112_page3_window", spec_of(6, 3, 112, 3, {.window_left = 299}), 2, 500, 900},
    {"dim160_soft_cap", spec_of(8, 2, 160, 16, {}, {.soft_cap = 5.f}), 1, 900, 900},
    {"dim224_page1", spec_of(8, 2, 224, 1), 2, 1300, 1300},
    {"page1", spec_of(8, 2, 128, 1), 2, 900, 1100},
    {"page5_full_dim64", spec_of(4, 4, 64, 5, {.causal = false}), 1, 500, 900},
    {"page4_dim256_window", spec_of(4, 2, 256, 4, {.window_left = 299}), 2, 300, 700},
    {"page12_dim96_soft_cap", spec_of(7, 1, 96, 12, {}, {.soft_cap = 5.f}), 1, 300, 700},
    {"group64", spec_of(64, 1, 128, 16), 2, 240, 290},
    {"soft_cap", spec_of(8, 2, 128, 16, {}, {.soft_cap = 5.f}), 1, 900, 900},
    {"sinks", spec_of(8, 2, 64, 16, {.window_left = 127}, {.sinks = true}), 2, 900, 900},
    {"alibi", spec_of(8, 2, 128, 16, {}, {.alibi = true}), 1, 900, 900},
};

class DeviceAttentionSm90Fp8 : public Gpu, public testing::WithParamInterface<Problem> {
 protected:
  std::vector<uint8_t> random(size_t n) {
    std::vector<uint8_t> values(n);
    std::normal_distribution<float> normal;
    for (uint8_t& v : values) v = float_to_fp8_e4m3(normal(random_));
    return values;
  }
  std::mt19937 random_{5};
};

TEST_P(DeviceAttentionSm90Fp8, AgreesWithSm80) {
  if (device.sm != 90) GTEST_SKIP() << "needs sm_90, this is sm_" << device.sm;
  const AttentionSpec& spec = GetParam().spec;
  const int reqs = GetParam().reqs, q_len = GetParam().q_len, seq_len = GetParam().seq_len;
  const int pages = (seq_len + spec.block_size - 1) / spec.block_size, heads = spec.num_q_heads, dim = spec.head_dim_v;
  const int64_t tokens = int64_t(reqs) * q_len, count = int64_t(reqs) * pages,
                page_elements = int64_t(spec.block_size) * spec.num_kv_heads * dim;
  std::vector<int32_t> query_start{0}, seq_lens(size_t(reqs), seq_len), table(static_cast<size_t>(count));
  for (int r = 0; r < reqs; ++r) query_start.push_back(query_start.back() + q_len);
  for (int64_t b = 0; b < count; ++b) table[size_t(b)] = int32_t(count - 1 - b);  // backwards
  Batch batch{.query_start_loc = query_start, .seq_lens = seq_lens};
  batch.block_table = TensorView::contiguous(table.data(), DType::i32, {reqs, pages});

  std::vector<float> scales(size_t(spec.num_kv_heads)), per_head(static_cast<size_t>(heads));
  for (size_t h = 0; h < scales.size(); ++h) scales[h] = 0.8f + 0.3f * float(h);
  for (size_t h = 0; h < per_head.size(); ++h) per_head[h] = 0.05f * float(h + 1);
  const DeviceBuffer q = upload(random(size_t(tokens * heads * dim))), k = upload(random(size_t(count * page_elements))),
                     v = upload(random(size_t(count * page_elements))), scale = upload(scales), vectors = upload(per_head);
  const auto view = [](const DeviceBuffer& memory, DType type, std::initializer_list<int64_t> sizes) {
    return TensorView::contiguous(memory.as<char>(), type, sizes, {DeviceType::cuda, 0});
  };
  const auto head_vector = [&](bool wanted) { return wanted ? view(vectors, DType::f32, {heads}) : TensorView{}; };
  const auto pages_of = [&](const DeviceBuffer& side) {
    return view(side, spec.kv_dtype, {count, spec.block_size, spec.num_kv_heads, dim});
  };
  const TensorView scale_view = view(scale, DType::f32, {spec.num_kv_heads});
  const Inputs in{.q = view(q, spec.q_dtype, {tokens, heads, dim}),
                  .q_scale = scale_view,
                  .kv = {.k = pages_of(k), .v = pages_of(v), .k_scale = scale_view, .v_scale = scale_view},
                  .sinks = head_vector(spec.score.sinks),
                  .alibi_slopes = head_vector(spec.score.alibi)};
  struct Result {
    std::vector<float> out, lse;
  };
  const auto run = [&](const imbrex::Plan& plan) {
    const DeviceBuffer out = upload(std::vector<float>(size_t(tokens * heads * dim), NAN)),
                       lse = upload(std::vector<float>(size_t(tokens * heads), NAN));
    plan.run(in, {.out = view(out, DType::f32, {tokens, heads, dim}), .lse = view(lse, DType::f32, {tokens, heads})}, stream.get());
    return Result{download<float>(out), download<float>(lse)};
  };
  const auto plan_of = [&](const char* backend) {
    const PlanLimits limits{.max_num_reqs = reqs, .max_num_tokens = int(tokens), .max_seq_len = seq_len};
    auto plan = find_backend(backend)->plan(spec, device, {.limits = limits, .threads = {}, .load_on_demand = true});
    plan->update(batch, stream.get());
    return plan;
  };
  const auto plan = plan_of("cuda_sm90");
  const Result expected = run(*plan_of("cuda_sm80")), actual = run(*plan), again = run(*plan);

  double error = 0, size = 0, worst_lse = 0;
  for (size_t i = 0; i < expected.out.size(); ++i) {
    error += std::pow(double(actual.out[i]) - expected.out[i], 2);
    size += std::pow(double(expected.out[i]), 2);
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    const double difference = std::fabs(double(actual.lse[i]) - expected.lse[i]);
    worst_lse = std::isnan(difference) ? INFINITY : std::max(worst_lse, difference);
  }
  // A weight is off by up to 2^-4 and 2^-5.8 in the mean square; negated, so that a NaN fails.
  EXPECT_FALSE(!(std::sqrt(error / size) < 4e-2)) << std::sqrt(error / size);
  EXPECT_GT(std::sqrt(error / size), 1e-3) << "not the kernel that rounds weights to bytes";
  EXPECT_LT(worst_lse, 2e-2);
  EXPECT_EQ(std::memcmp(actual.out.data(), again.out.data(), actual.out.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(actual.lse.data(), again.lse.data(), actual.lse.size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(Problems, DeviceAttentionSm90Fp8, testing::ValuesIn(kProblems), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace imbrex::cuda::test
