// Laws of values that are a part of the keys: they are what a copy of them would be, and nothing else of a key is a value.
#include <gtest/gtest.h>

#include "attention/kv_codec.h"
#include "matrix.h"

namespace imbrex::test {
namespace {

std::vector<Target> latent_targets() {
  std::vector<Target> found;
  for (const Target& target : targets())
    if (target.kv_format == KvFormat::latent) found.push_back(target);
  return found;
}

class LatentLaws : public testing::TestWithParam<Target> {
 protected:
  RunResult run(const CaseInputs& in, const Case& c, KvFormat format) const {
    RunOptions options = default_options(c);
    options.kv_format = format;
    RunResult result = run_case(*GetParam().backend, GetParam().device, in, options);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
};

std::vector<Case> latent_cases() {
  std::vector<Case> found;
  for (const Case& c : cases())
    if (c.spec.kv_format == KvFormat::latent && c.seed % 3 == 0) found.push_back(c);
  return found;
}

// Kernels that multiply pairs of bf16 have one for latents, which keeps its weights as bf16 and takes keys in smaller steps: it rounds
// otherwise than that of strided keys, and both are judged against the reference by the table of cases.
bool have_own_kernel(const Case& c, const Target& target) {
  const bool pairs =
      target.backend->name() == "cpu_amx" || (target.backend->name() == "cpu_avx512" && target.device.isa >= CpuIsa::avx512_bf16);
  const bool wide = c.spec.q_dtype == DType::bf16 && (c.spec.kv_dtype == DType::bf16 || is_fp8(c.spec.kv_dtype));
  return pairs && wide && c.spec.head_dim_qk % 32 == 0 && c.spec.head_dim_v % 64 == 0;
}

TEST_P(LatentLaws, AreStridedOnesWithACopy) {
  int compared = 0;
  for (const Case& c : latent_cases()) {
    AttentionSpec stored = c.spec;
    stored.kv_format = KvFormat::strided;  // which may be for another backend: there is nothing to compare with then
    if (!runs(c, GetParam()) || !GetParam().backend->unsupported(stored, GetParam().device).empty()) continue;
    const CaseInputs& in = inputs_of(c);
    const RunResult latent = run(in, c, KvFormat::latent);
    if (!have_own_kernel(c, GetParam())) {
      const RunResult copied = run(in, c, KvFormat::strided);
      EXPECT_TRUE(bit_identical(latent.out, copied.out)) << c.name;
      EXPECT_TRUE(bit_identical(latent.lse, copied.lse)) << c.name;
      ++compared;
    }
    stored.kv_format = KvFormat::latent_rope;
    if (c.spec.head_dim_v == c.spec.head_dim_qk || c.seed % 2 != 0) continue;
    if (!GetParam().backend->unsupported(stored, GetParam().device).empty()) continue;
    const RunResult parts = run(in, c, KvFormat::latent_rope);
    ++compared;
    EXPECT_TRUE(bit_identical(latent.out, parts.out)) << c.name << " in parts";
    EXPECT_TRUE(bit_identical(latent.lse, parts.lse)) << c.name << " in parts";
  }
  EXPECT_GE(compared, 4);
}

// Queries that are zero there see nothing of what a key has behind its value, however large it is.
TEST_P(LatentLaws, TheRestOfAKeyIsNoValue) {
  int compared = 0;
  for (const Case& c : latent_cases()) {
    const int qk = c.spec.head_dim_qk, v = c.spec.head_dim_v;
    if (v == qk || c.values != ValuePattern::plain || !runs(c, GetParam())) continue;
    CaseInputs small = inputs_of(c);
    for (int64_t row = 0; row < small.q.sizes[0] * small.q.sizes[1]; ++row)
      for (int d = v; d < qk; ++d) small.q.set(row * qk + d, 0.0);
    CaseInputs large = small;
    for (int64_t row = 0; row < large.k.sizes[0] * large.k.sizes[1]; ++row)
      for (int d = v; d < qk; ++d) {
        small.k.set(row * qk + d, 0.0);
        large.k.set(row * qk + d, (row + d) % 2 == 0 ? 30000.0 : -30000.0);
      }
    const RunResult without = run(small, c, KvFormat::latent), with = run(large, c, KvFormat::latent);
    EXPECT_TRUE(bit_identical(without.out, with.out)) << c.name;
    EXPECT_TRUE(bit_identical(without.lse, with.lse)) << c.name;
    ++compared;
  }
  EXPECT_GE(compared, 6);
}

// A kernel may be chosen by the load: that for few tasks has the bits of that for many.
TEST_P(LatentLaws, AFewRequestsHaveTheBitsThatTheyHaveAmongMany) {
  constexpr int kMany = 40;
  Case c;
  c.name = "load";
  c.spec = {.num_q_heads = 128, .num_kv_heads = 1, .head_dim_qk = 576, .head_dim_v = 512};
  c.spec.kv_format = KvFormat::latent, c.spec.block_size = 16;
  c.seed = 7;
  if (!GetParam().on_gpu()) GTEST_SKIP() << "CPUs have one kernel, whatever the load is";
  ASSERT_TRUE(runs(c, GetParam())) << c.spec.str();
  for (int i = 0; i < kMany; ++i) c.requests.push_back({1, 5 + 9 * i, i});
  c.requests.push_back({1, 2500, kMany});
  for (const ValuePattern values : {ValuePattern::plain, ValuePattern::rising}) {
    c.values = values;
    const RunResult many = run(make_inputs(c), c, KvFormat::latent);
    for (const size_t r : {size_t(0), size_t(kMany / 2), size_t(kMany)}) {
      Case alone = c;
      alone.requests = {c.requests[r]};
      const RunResult few = run(make_inputs(alone), alone, KvFormat::latent);
      const auto rows = [&](const std::vector<float>& all, const std::vector<float>& one) {
        return std::vector<float>(all.begin() + long(r * one.size()), all.begin() + long((r + 1) * one.size()));
      };
      EXPECT_TRUE(bit_identical(few.out, rows(many.out, few.out))) << r;
      EXPECT_TRUE(bit_identical(few.lse, rows(many.lse, few.lse))) << r;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, LatentLaws, testing::ValuesIn(latent_targets()), [](const auto& info) { return info.param.name(); });

// Of latents in records, and in parts.
class RecordLaws : public testing::TestWithParam<Target> {};

TEST_P(RecordLaws, PagesChunksAndPoisonDoNotMatter) {
  Case c;
  c.name = "record_law";
  c.spec = {.num_q_heads = 4, .num_kv_heads = 1, .head_dim_qk = 576, .head_dim_v = 512, .kv_dtype = DType::fp8_e4m3};
  c.spec.kv_format = GetParam().kv_format;
  c.requests = {{1, 140, 0}, {30, 30, 1}, {5, 71, 2}, {0, 0, 3}};
  c.seed = 99;
  if (GetParam().kv_format == KvFormat::latent_rope) c.rope_factor = 0.6f;
  ASSERT_TRUE(runs(c, GetParam())) << c.spec.str();
  const CaseInputs in = make_inputs(c);
  RunOptions options = default_options(c);
  const auto run = [&] { return run_case(*GetParam().backend, GetParam().device, in, options); };
  const RunResult expected = run();
  // On a GPU queries of another number are those of another regime, whose bits are its own.
  const bool any_chunk = GetParam().device.device.type == DeviceType::cpu;
  struct Other {
    int block_size, chunk;
    const char* order;
    Poison poison;
  };
  for (const Other& other : {Other{1, 0, "blhtd", Poison::ones}, {64, 7, "lbthd", Poison::zero}, {7, 1, "lbhtd", Poison::nan}}) {
    options.block_size = other.block_size, options.chunk = any_chunk ? other.chunk : 0, options.order = other.order,
    options.poison = other.poison;
    options.page_seed += 1;
    const RunResult result = run();
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    EXPECT_TRUE(bit_identical(expected.out, result.out)) << other.block_size;
    EXPECT_TRUE(bit_identical(expected.lse, result.lse)) << other.block_size;
  }
}

std::vector<Target> record_targets() {
  std::vector<Target> found;
  for (const Target& target : targets())
    if (target.kv_format == KvFormat::fp8_ds_mla || target.kv_format == KvFormat::latent_rope) found.push_back(target);
  return found;
}

INSTANTIATE_TEST_SUITE_P(All, RecordLaws, testing::ValuesIn(record_targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test
