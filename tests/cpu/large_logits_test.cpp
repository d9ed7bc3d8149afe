// Logits far beyond what models have: the largest one takes all of the weight, or shares it with its equals, and nothing overflows.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

constexpr int kLogitDim = 64, kLogitKeys = 600;

// Dim 0 of key j is what its logit is, up to the scale; its value is j in dim 0 and 1 elsewhere. The first query looks at the last key, and
// so on.
std::vector<float> run_logits(const Backend& backend, const DeviceInfo& device, float scale, const std::vector<float>& logits,
                              int queries) {
  const AttentionSpec spec{.num_q_heads = 2,
                           .num_kv_heads = 1,
                           .head_dim_qk = kLogitDim,
                           .head_dim_v = kLogitDim,
                           .q_dtype = DType::bf16,
                           .kv_dtype = DType::bf16,
                           .block_size = 0,
                           .mask = {.causal = false},
                           .score = {.scale = scale}};
  EXPECT_TRUE(backend.unsupported(spec, device).empty());
  const auto bits = [](float x) { return uint16_t(std::bit_cast<uint32_t>(x) >> 16); };
  std::vector<uint16_t> q(size_t(queries) * 2 * kLogitDim, 0), k(size_t(kLogitKeys) * kLogitDim, 0),
      v(size_t(kLogitKeys) * kLogitDim, bits(1.f));
  for (int i = 0; i < 2 * queries; ++i) q[size_t(i) * kLogitDim] = bits(1.f);
  for (int j = 0; j < kLogitKeys; ++j) k[size_t(j) * kLogitDim] = bits(logits[size_t(j)]), v[size_t(j) * kLogitDim] = bits(float(j % 128));
  const std::vector<int32_t> starts{0, queries}, lens{kLogitKeys};
  std::vector<int32_t> key_starts{0, kLogitKeys};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  batch.kv_start_loc = TensorView::contiguous(key_starts.data(), DType::i32, {2});
  const auto plan = backend.plan(spec, device, {});
  plan->update(batch);
  std::vector<float> out(size_t(queries) * 2 * kLogitDim);
  Inputs in{.q = TensorView::contiguous(q.data(), DType::bf16, {queries, 2, kLogitDim}), .kv = {}};
  in.kv.k = TensorView::contiguous(k.data(), DType::bf16, {kLogitKeys, 1, kLogitDim});
  in.kv.v = TensorView::contiguous(v.data(), DType::bf16, {kLogitKeys, 1, kLogitDim});
  plan->run(in, {.out = TensorView::contiguous(out.data(), DType::f32, {queries, 2, kLogitDim})});
  return out;
}

TEST(LargeLogits, TheLargestTakesAll) {
  const DeviceInfo probed = probe_cpu();
  struct Target {
    const char* backend;
    CpuIsa isa;
    bool tiles;  // weights of bf16; equals of another block may have other ones
  };
  for (const auto& [name, isa, tiles] : {Target{"cpu_generic", CpuIsa::generic, false},
                                         {"cpu_generic", CpuIsa::avx2, false},
                                         {"cpu_avx512", CpuIsa::avx512, false},
                                         {"cpu_avx512", CpuIsa::avx512_bf16, false},
                                         {"cpu_amx", CpuIsa::amx_emulated, true},
                                         {"cpu_amx", CpuIsa::amx, true}}) {
    DeviceInfo device = probed;
    device.isa = isa;
    if (isa > probed.isa && isa != CpuIsa::amx_emulated) continue;
    if (isa == CpuIsa::amx_emulated && probed.isa < CpuIsa::avx512_bf16) continue;
    const Backend& backend = *find_backend(name);
    for (const float sign : {1.f, -1.f}) {
      for (int exponent = 18; exponent <= 90; exponent += exponent < 40 ? 1 : 10) {
        const float scale = std::ldexp(1.0937f, exponent - 7);  // times 100 to 127
        std::vector<float> logits(kLogitKeys);
        for (int j = 0; j < kLogitKeys; ++j) logits[size_t(j)] = sign < 0 ? -127.f + float(j % 20) : float(j % 100);
        std::vector<int> winners{413};
        if (!tiles) winners.push_back(37);
        for (int j : winners) logits[size_t(j)] = sign < 0 ? -64.f : 123.f;
        double expected = 0;
        for (int j : winners) expected += double(j % 128) / double(winners.size());
        for (const int queries : {1, 40}) {
          const auto out = run_logits(backend, device, scale, logits, queries);
          for (int i = 0; i < 2 * queries; ++i) {
            ASSERT_NEAR(out[size_t(i) * kLogitDim], expected, tiles ? 0.15 : 1e-4)
                << name << " " << to_string(isa) << ", 2^" << exponent << ", row " << i;
            ASSERT_NEAR(out[size_t(i) * kLogitDim + 1], 1, tiles ? 5e-3 : 1e-5)
                << name << " " << to_string(isa) << ", 2^" << exponent << ", row " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace imbrex
