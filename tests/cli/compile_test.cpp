// `imbrex compile` of layers that are described by options, with the user's expressions.
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace imbrex::test {
namespace {

// What an expression makes of a layer's kernels is found in the folder again, and another expression is not.
TEST_F(Cli, CompileTakesALayersExpressions) {
  if (nlohmann::json::parse(run("info --json").out)["cuda"]["compiler"] == "") GTEST_SKIP() << "no NVRTC here";
  const std::string layer = "compile --arch sm_80 --heads 2/1 --head-dim 16 --q-dtype f32 --jobs 0 --json --out " + path("kernels"),
                    windowed = " --mask-mod 'q - kv < 77 | kv < 5'", none = "IMBREX_CUDA_NVRTC=" + path("no_such_library");
  const Ran ran = run(layer + " --strict" + windowed);
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto count = [](const Ran& r) {
    int with_mask = 0;
    for (const auto& kernel : nlohmann::json::parse(r.out))
      with_mask += kernel["constants"].get<std::string>().find("kMaskMod true") != std::string::npos;
    return with_mask;
  };
  EXPECT_GT(count(ran), 0);
  const Ran again = run(layer + windowed, none);
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(count(again), count(ran));
  EXPECT_EQ(run(layer + " --mask-mod 'q - kv < 78 | kv < 5'", none).code, 3);
}

// Options of a layer describe it as they do to select; a model's layers of attention have the expressions.
TEST_F(Cli, CompileAndSelectGiveAModelsLayersExpressions) {
  const std::string none = "IMBREX_CUDA_NVRTC=" + path("no_such_library");
  const Ran selected = run("select --model llama-3.1-8b --score-mod '30 * tanh(score / 30)'");
  EXPECT_TRUE(contains(selected.out, "tanh(score / 30")) << selected.out << selected.err;
  EXPECT_EQ(run("compile --model llama-3.1-8b --mask-mod 'score < 3'", none).code, 2);
  EXPECT_TRUE(contains(run("compile --model llama-3.1-8b --tree --mask-mod 'kv < 3'", none).err, "[spec.mask_mod.alone]"));
  EXPECT_TRUE(contains(run("compile --model deepseek-v2-lite --mask-mod 'kv < 3'", none).err, "[cli.family]"));
  EXPECT_TRUE(contains(run("compile --heads 3/2", none).err, "[spec.num_kv_heads.divides]"));
}

}  // namespace
}  // namespace imbrex::test
