// Generated texts of expressions are what NVRTC takes, without a warning, for each generation of GPUs.
#include <gtest/gtest.h>

#include "cuda/driver/jit.h"
#include "cuda/needs.h"
#include "expression/texts/expressions.h"

namespace imbrex::cuda {
namespace {

TEST(ExpressionText, CompilesForGpus) {
  NEEDS_NVRTC();
  std::string functions, calls;
  int number = 0;
  for (const Expression& e : test::expressions_of_texts()) {
    const std::string name = "generated_" + std::to_string(number);
    functions += cuda_text(e, name);
    calls += "  out[" + std::to_string(number++) + "] += float(" + name + "(in));\n";
  }
  const std::string text = "#include \"expression/operations.h\"\n" + functions +
                           "extern \"C\" __global__ void evaluate(const imbrex::ExpressionInputs in, float* out) {\n" + calls + "}\n";
  for (const char* arch : {"sm_80", "sm_90a"}) {
    const CompiledKernel kernel = compile_text({"expression.cu", arch, {}}, text);
    EXPECT_FALSE(kernel.binary.empty());
    EXPECT_EQ(kernel.log.find("warning"), std::string::npos) << kernel.log;
  }
}

}  // namespace
}  // namespace imbrex::cuda
