// The replay on a GPU of a model with gated delta nets, convolutions in front of them, norms behind them, and attention between: chunks and
// tokens, graphs of decode steps, and states that prompts which begin alike begin from. On the fake driver, with the texts of all kernels
// with states.
#include <gtest/gtest.h>

#include <stdexcept>

#include "cuda/fake/recurrent_texts.h"
#include "cuda/lanes/short_conv_variants.h"
#include "recurrent/conv_plan.h"
#include "serve/replay.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

namespace fake = cuda::fake;

template <class Variant>
Variant variant_named(const std::vector<Variant>& variants, const char* Variant::*member, std::string_view name) {
  for (const Variant& variant : variants)
    if (variant.*member == name) return variant;
  throw std::out_of_range(std::string(name));
}

// Launches of layers with these states run their texts, and those of attention plain loops.
void use_texts(const test::RecurrentVariant& gdn, const test::ShortConvVariant& conv, const AttentionSpec& attention) {
  fake::use_recurrent_text(gdn);
  const auto sizes = fake::state().param_sizes;
  [[maybe_unused]] const auto of_recurrence = fake::state().on_launch;
  fake::put_into_cache(conv.key());
  fake::run_on_host(attention);
  fake::state().param_sizes.insert(sizes.begin(), sizes.end());
  fake::state().param_sizes["short_conv_aligned"] = fake::state().param_sizes["short_conv_unaligned"] = {sizeof(cuda::ShortConvParams)};
#ifdef IMBREX_LANES
  fake::state().on_launch = [others = fake::state().on_launch, of_recurrence, name = std::string(conv.name)](const fake::Launch& launch) {
    if (launch.entry.starts_with("short_conv")) return fake::run_text(launch.entry + "_" + name, launch, launch.grid_x);
    if (launch.entry.starts_with("recurrent") || launch.entry == "plan_state_batch") return of_recurrence(launch);
    others(launch);
  };
#endif
}

TEST(GpuRecurrentReplay, OutputsAndStatesAreWithinTheirBounds) {
  if (!fake::has_texts()) GTEST_SKIP() << "builds with sanitizers have no libraries of kernels for the host";
  const test::RecurrentVariant gdn = variant_named(test::recurrent_variants(), &test::RecurrentVariant::outputs, "outputs_gdn");
  const test::ShortConvVariant conv = variant_named(test::short_conv_variants(), &test::ShortConvVariant::name, "conv_silu");
  const ModelSpec model = parse_model_config(R"({"model_type": "qwen3_next", "dtype": "bfloat16", "hidden_size": 64,
      "num_hidden_layers": 3, "full_attention_interval": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
      "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64})");
  ASSERT_EQ(model.layers.size(), 3u);
  EXPECT_TRUE(conv.is_of(conv_of(std::get<RecurrentSpec>(model.layers[0].spec))));
  EXPECT_TRUE(gdn.runs(std::get<RecurrentSpec>(model.layers[0].spec)));
  const ModelSpec deployed = model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
  use_texts(gdn, conv, deployed.layers[2].attention());
  ReplayOptions options = small_options();
  options.device = "cuda:0";
  options.max_num_batched_tokens = 160;
  options.pacing = Pacing::arrival, options.fixed_step_s = 1;
  Trace trace;  // the second and the third begin with the first 128 tokens of the first, which runs beside them
  trace.prefix_block = 64;
  trace.requests = {{.arrival_s = 0, .input_length = 150, .output_length = 8, .prefix_ids = {1, 2, 3}},
                    {.arrival_s = 3, .input_length = 140, .output_length = 4, .prefix_ids = {1, 2, 4}},
                    {.arrival_s = 4, .input_length = 40, .output_length = 4, .prefix_ids = {5}},
                    {.arrival_s = 4, .input_length = 129, .output_length = 3, .prefix_ids = {1, 2, 6}}};
  const ReplayResult r = replay(model, trace, options);
  fake::forget_texts();
  EXPECT_TRUE(r.complete);
  EXPECT_GT(r.decode_steps.steps, 0);
  EXPECT_EQ(r.prefix_hit_tokens, 2 * 128);
  EXPECT_EQ(r.kept_states, 1) << "at whole chunks of 64 tokens";
  ASSERT_EQ(r.kinds.size(), 2u);
  EXPECT_EQ(r.kinds[0].backend, "cuda_sm80");
  EXPECT_EQ(r.kinds[0].family, "recurrent");
  EXPECT_EQ(r.kinds[0].layers, (std::vector<int>{0, 1}));
  EXPECT_TRUE(r.kinds[0].bits_follow_steps) << "but for steps of whole chunks";
  EXPECT_GT(r.verified_states, 0);
  EXPECT_LE(r.verify_max_ratio, 1);
}

}  // namespace
}  // namespace imbrex::serve
