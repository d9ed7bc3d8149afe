// Generated texts of expressions are what NVRTC takes, without a warning, for each generation of GPUs.
#include <gtest/gtest.h>

#include "cuda/attention/attention_kernels.h"
#include "cuda/driver/jit.h"
#include "cuda/needs.h"
#include "expression/texts/expressions.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

TEST(ExpressionText, CompilesForGpus) {
  NEEDS_NVRTC();
  std::string functions, calls;
  int number = 0;
  for (const Expression& e : test::expressions_of_texts()) {
    const std::string name = "generated_" + std::to_string(number);
    functions += cuda_text(e, name) + cuda_text(e, "short_" + name, ExpressionFloats::approximate);
    calls += "  out[" + std::to_string(number++) + "] += float(" + name + "(in)) + float(short_" + name + "(in));\n";
  }
  const std::string text = "#include \"expression/operations.h\"\n#include \"expression/short_operations.h\"\n" + functions +
                           "extern \"C\" __global__ void evaluate(const imbrex::ExpressionInputs in, float* out) {\n" + calls + "}\n";
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const CompiledKernel kernel = compile_text({"expression.cu", arch, {}}, text);
    EXPECT_FALSE(kernel.binary.empty());
    EXPECT_EQ(kernel.log.find("warning"), std::string::npos) << kernel.log;
  }
}

AttentionSpec spec_with(const char* score_mod, const char* mask_mod) {
  AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 1, .head_dim_qk = 128, .head_dim_v = 128};
  if (*score_mod != 0) spec.score_mod = parse_expression(score_mod);
  if (*mask_mod != 0) spec.mask_mod = parse_expression(mask_mod);
  return spec;
}

// Each expression is a kernel of its own, under a name of its own in the cache; no other kernel of the plan differs.
TEST(ExpressionKernels, AreNamedByTheirExpressions) {
  const auto keys = [](const AttentionSpec& spec) { return plan_kernels(kernels_sm80, "sm_80", spec, Extent::usual); };
  const auto a = keys(spec_with("2.0 * score", "")), b = keys(spec_with("3.0 * score", ""));
  ASSERT_EQ(a.size(), b.size());
  int differ = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool attention = a[i].path == "attention_sm80.cu";
    EXPECT_EQ(a[i].functions.empty(), !attention) << a[i].str();
    EXPECT_EQ(cache_name(a[i]) != cache_name(b[i]), attention) << a[i].str();
    differ += cache_name(a[i]) != cache_name(b[i]);
  }
  EXPECT_GE(differ, 2);
}

TEST(ExpressionKernels, CompileWithoutSpills) {
  NEEDS_NVRTC();
  for (const AttentionSpec& spec : {spec_with("float slope[]; score + slope[head] * (kv - q)", ""), spec_with("", "kv <= q & q - kv < 128"),
                                    spec_with("20 * tanh(score / 20)", "int doc[,]; doc[batch, q] == doc[batch, kv]")})
    for (const char* arch : {"sm_80", "sm_90a", "sm_100a"})
      for (const KernelKey& key : plan_kernels(kernels_sm80, arch, spec, Extent::usual)) {
        if (key.functions.empty()) continue;
        const CompiledKernel kernel = compile(key);
        EXPECT_EQ(kernel.log.find("warning"), std::string::npos) << kernel.log;
        EXPECT_NE(kernel.log.find(" 0 bytes spill stores"), std::string::npos) << kernel.log;
      }
}

// Those with wgmma run one product after the other where ptxas warns of it.
TEST(ExpressionKernels, OfHopperCompileWithoutWarnings) {
  NEEDS_NVRTC();
  for (const AttentionSpec& spec : {spec_with("float slope[]; score + slope[head] * (kv - q)", ""),
                                    spec_with("20 * tanh(score / 20) + float(kv % 7)", "int doc[,]; doc[batch, q] == doc[batch, kv]")})
    for (const KernelKey& key : plan_kernels(kernels_sm90, "sm_90a", spec, Extent::usual))
      EXPECT_TRUE(key.functions.empty() || compile(key).log.find("warning") == std::string::npos) << key.str();
}

// What is computed of a key or a row a tile ahead stays in registers.
TEST(ExpressionKernels, OfHopperWithPartsCompileWithoutSpills) {
  NEEDS_NVRTC();
  for (const AttentionSpec& spec : {spec_with("float bias[,]; score + bias[head, kv]", ""),
                                    spec_with("int doc[,]; where(doc[batch, q] == doc[batch, kv], score, -inf)", "kv <= q & q - kv < 99")})
    for (const KernelKey& key : plan_kernels(kernels_sm90, "sm_90a", spec, Extent::usual)) {
      if (key.path != "attention_sm90.cu" && key.path != "attention_sm90_verify.cu") continue;
      const CompiledKernel kernel = compile(key);
      EXPECT_EQ(kernel.log.find("warning"), std::string::npos) << kernel.log;
      EXPECT_NE(kernel.log.find(" 0 bytes spill stores"), std::string::npos) << kernel.log;
    }
}

TEST(ExpressionKernels, RefuseByName) {
  const DeviceInfo device{.device = {DeviceType::cuda, 0}, .name = "H200", .sm = 90, .num_workers = 132, .max_smem_bytes = 227 << 10};
  const auto reasons = [&](const char* backend, const AttentionSpec& spec) {
    std::string codes;
    for (const Reason& reason : find_backend(backend)->unsupported(spec, device)) codes += reason.code + " ";
    return codes;
  };
  EXPECT_EQ(reasons("cuda_sm80", spec_with("2.0 * score", "kv <= q")), "");
  EXPECT_EQ(reasons("cuda_sm90", spec_with("2.0 * score", "kv <= q")), "");
  const char* const five = "float a[]; float b[]; float c[]; float d[]; float e[]; score + a[q] + b[q] + c[q] + d[q] + e[q]";
  EXPECT_EQ(reasons("cuda_sm80", spec_with(five, "")), "spec.score_mod ");
  EXPECT_EQ(reasons("cuda_sm90", spec_with(five, "")), "spec.score_mod ");
}

}  // namespace
}  // namespace imbrex::cuda
