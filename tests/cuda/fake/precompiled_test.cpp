// Layers whose kernels were compiled ahead compile nothing when plans are made, with the user's expressions too. On the fake driver.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/precompile.h"
#include "gpu/kernel_cache.h"
#include "imbrex/expression.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

std::set<std::string> cached_files() {
  std::set<std::string> names;
  if (!std::filesystem::exists(gpu::kernel_cache_folder())) return names;
  for (const auto& file : std::filesystem::directory_iterator(gpu::kernel_cache_folder())) names.insert(file.path().filename());
  return names;
}

struct Layer {
  const char *score_mod, *mask_mod;
  DType q = DType::bf16, kv = DType::bf16;
  int head_dim = 128;
  bool causal = true;
};

AttentionSpec spec_of(const Layer& layer) {
  AttentionSpec spec{.num_q_heads = 24, .num_kv_heads = 8, .head_dim_qk = layer.head_dim, .head_dim_v = layer.head_dim};
  spec.q_dtype = layer.q, spec.kv_dtype = layer.kv, spec.mask.causal = layer.causal;
  if (*layer.score_mod != 0) spec.score_mod = parse_expression(layer.score_mod);
  if (*layer.mask_mod != 0) spec.mask_mod = parse_expression(layer.mask_mod);
  return spec;
}

// The kernel folder has what `imbrex compile` puts there, and nothing is added by plans for steps of any kind: of decode, verify and
// prompts, with prompts in common, and with lengths on the device.
TEST(Precompiled, PlansOfLayersWithExpressionsCompileNothing) {
  const DeviceInfo device = probe_cuda().at(0);
  constexpr Layer kLayers[] = {
      {"", "kv <= q & q - kv < 77", DType::bf16, DType::bf16, 128, false},
      {"", "kv <= q & q - kv < 77 & q_len > 0", DType::bf16, DType::bf16, 128, false},
      {"", "kv < 77 | head < 3", DType::bf16, DType::bf16, 128, true},
      {"float bias[,]; score + bias[head, kv] * 77", "", DType::bf16, DType::bf16, 64},
      {"77 * tanh(score / 77)", "", DType::bf16, DType::fp8_e4m3, 128},
      {"score - 77 * abs(q - kv)", "q // 77 == kv // 77", DType::f16, DType::f16, 256, false},
      {"where(kv == 77, score, 2 * score)", "", DType::f32, DType::f32, 80},
  };
  int plans = 0;
  for (const Layer& layer : kLayers) {
    const AttentionSpec spec = spec_of(layer);
    const LayerSpec layers[] = {spec};
    for (const ShippedKernel& kernel : shipped_kernels("sm_90a", layers)) fake::put_into_cache(kernel.key);
    const std::set<std::string> ahead = cached_files();
    const PlanLimits limits[] = {{.max_num_reqs = 16, .max_num_tokens = 4096, .max_seq_len = 8192},
                                 {.max_num_reqs = 16, .max_num_tokens = 16, .max_query_len = 1, .shared_prompts = true},
                                 {.max_num_reqs = 300, .max_num_tokens = 2400, .max_seq_len = 200000, .max_query_len = 8}};
    for (const char* name : {"cuda_sm80", "cuda_sm90"}) {
      if (!find_backend(name)->unsupported(spec, device).empty()) continue;
      for (const PlanLimits& limit : limits)
        for (const bool on_device : {false, true}) {
          SCOPED_TRACE(std::string(name) + ", " + spec.str());
          const PlanOptions options{.limits = limit, .threads = {}, .on_device = on_device && spec.mask_mod.empty()};
          EXPECT_NE(find_backend(name)->plan(spec, device, options), nullptr);
          EXPECT_EQ(cached_files(), ahead);
          ++plans;
        }
    }
  }
  EXPECT_EQ(plans, 13 * 6);
}

}  // namespace
}  // namespace imbrex::cuda
