// Models with recurrent layers: how their config.json is read, by which names, with which defaults, and what is refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "expect_error.h"
#include "imbrex/model.h"
#include "recurrent/conv_plan.h"

namespace imbrex {
namespace {

// A top-level config with the fields that nearly all have.
std::string recurrent_config(std::string_view type, std::string_view more, int layers = 4) {
  return R"({"torch_dtype": "bfloat16", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": )" +
         std::to_string(layers) + R"(, "model_type": ")" + std::string(type) + "\"" + (more.empty() ? "" : ", ") + std::string(more) + "}";
}
ModelSpec parse(std::string_view type, std::string_view more, int layers = 4) {
  return parse_model_config(recurrent_config(type, more, layers));
}
std::string recurrent_refusal(std::string_view type, std::string_view more, int layers = 4) {
  return test::error_code([&] { parse(type, more, layers); });
}

// "r" for a recurrent layer, "c" for a convolution in front of one that is a layer of its own, "a" for attention.
std::string pattern_of_all(const ModelSpec& model) {
  std::string text;
  for (const ModelLayer& layer : model.layers)
    text += std::holds_alternative<RecurrentSpec>(layer.spec) ? 'r' : std::holds_alternative<ShortConvSpec>(layer.spec) ? 'c' : 'a';
  return text;
}
// The same without the convolutions, each of which is in front of a recurrence with the same number.
std::string recurrent_pattern(const ModelSpec& model) {
  std::string text = pattern_of_all(model);
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != 'c') continue;
    EXPECT_EQ(text[i + 1], 'r') << text;
    EXPECT_EQ(model.layers[i].number, model.layers[i + 1].number);
    EXPECT_EQ(model.layers[i].name, "decoder." + std::to_string(model.layers[i].number) + ".conv");
  }
  std::erase(text, 'c');
  return text;
}
// A layer counted without convolutions.
const ModelLayer& mixer(const ModelSpec& model, size_t index) {
  for (const ModelLayer& layer : model.layers)
    if (!std::holds_alternative<ShortConvSpec>(layer.spec) && index-- == 0) return layer;
  throw std::out_of_range(model.name);
}
const RecurrentSpec& recurrent(const ModelSpec& model, size_t index = 0) { return std::get<RecurrentSpec>(mixer(model, index).spec); }
std::string conv(const ModelSpec& model) {  // str() of the first, a layer or a part of one
  for (const ModelLayer& layer : model.layers) {
    if (std::holds_alternative<ShortConvSpec>(layer.spec)) return to_string(layer.spec);
    const auto* const spec = std::get_if<RecurrentSpec>(&layer.spec);
    if (spec != nullptr && spec->conv != RecurrentConv::none) return conv_of(*spec).str();
  }
  return "none";
}
bool has_note(const ModelSpec& model, std::string_view text) {
  for (const std::string& note : model.notes)
    if (note.find(text) != std::string::npos) return true;
  return false;
}

TEST(RecurrentFamilies, Qwen3NextAndQwen35) {
  const ModelSpec model = parse("qwen3_next", R"("head_dim": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
      "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 3)",
                                9);
  EXPECT_EQ(recurrent_pattern(model), "rrrarrrar") << "every fourth attends, the class default";
  EXPECT_TRUE(has_note(model, "full_attention_interval absent: the class default 4"));
  EXPECT_EQ(
      recurrent(model).str(),
      "recurrent q2 v4 k32 v64 softplus delta sigmoid_beta qk_norm out_silu norm_before_gate conv_qkv conv_width=3 bf16 state f32 v_first");
  EXPECT_EQ(mixer(model, 3).attention().head_dim_qk, 64);
  EXPECT_EQ(pattern_of_all(model), "rrrarrrar");
  EXPECT_EQ(conv(model), "short_conv d384 w3 bf16 plain silu") << "q, k and v together";
  EXPECT_EQ(model.num_layers, 9);
  EXPECT_EQ(recurrent_pattern(parse("qwen3_next", R"("full_attention_interval": 2)")), "rara");
  EXPECT_EQ(recurrent_pattern(
                parse("qwen3_next", R"("layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"])")),
            "arra");
  const ModelSpec silent = parse("qwen3_next", "");
  EXPECT_EQ(recurrent(silent).num_v_heads, 32);
  EXPECT_EQ(mixer(silent, 3).attention().head_dim_qk, 256);
  EXPECT_TRUE(has_note(silent, "linear_num_value_heads absent: the class default 32"));

  const ModelSpec nested = parse_model_config(R"({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}})");
  EXPECT_EQ(nested.num_layers, 40);
  EXPECT_EQ(mixer(nested, 3).attention().num_kv_heads, 2);
  EXPECT_TRUE(has_note(nested, "vision encoder are left out"));
  const ModelSpec dense = parse_model_config(R"({"model_type": "qwen3_5", "text_config": {"mamba_ssm_dtype": "bfloat16"}})");
  EXPECT_EQ(dense.num_layers, 32);
  EXPECT_EQ(mixer(dense, 3).attention().num_kv_heads, 4);
  EXPECT_EQ(recurrent(dense).state_dtype, DType::bf16);
  EXPECT_EQ(recurrent_refusal("qwen3_next", R"("linear_num_key_heads": 3)"), "model.field.heads.indivisible");
  EXPECT_EQ(recurrent_refusal("qwen3_next", R"("linear_key_head_dim": 320)"), "recurrent.head_dim_k");
  EXPECT_EQ(recurrent_refusal("qwen3_next", R"("layer_types": ["full_attention"])"), "model.field.layer_types.length");
  EXPECT_EQ(recurrent_refusal("qwen3_next", R"("layer_types": ["full_attention", "conv", "conv", "conv"])"),
            "model.field.layer_types.unknown");
  EXPECT_EQ(recurrent_refusal("qwen3_next", R"("mamba_ssm_dtype": "float8")"), "model.field.dtype.unknown");
}

constexpr std::string_view kNemotron = R"("head_dim": 64, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2,
    "conv_kernel": 4, "expand": 2)";
std::string nemotron(std::string_view more) { return std::string(kNemotron) + ", " + std::string(more); }

TEST(RecurrentFamilies, NemotronHHasLayersWithoutACache) {
  const ModelSpec model = parse("nemotron_h", nemotron(R"("hybrid_override_pattern": "ME*-ME", "time_step_min": 0.01)"), 6);
  EXPECT_EQ(recurrent_pattern(model), "rar");
  EXPECT_EQ(mixer(model, 1).name, "decoder.2");
  EXPECT_EQ(mixer(model, 2).name, "decoder.4");
  EXPECT_EQ(mixer(model, 2).number, 4);
  EXPECT_EQ(model.num_layers, 6);
  EXPECT_TRUE(has_note(model, "3 of 6 layers have neither a cache nor a state"));
  EXPECT_EQ(recurrent(model).num_v_heads, 8);
  EXPECT_EQ(recurrent(model).head_dim_v, 32) << "not the hidden size times expand over heads";
  EXPECT_EQ(recurrent(model).num_k_heads, 2);
  EXPECT_EQ(recurrent(model).head_dim_k, 16);
  EXPECT_EQ(recurrent(model).gate_min, 0.01f);
  EXPECT_EQ(conv(model), "short_conv d320 w4 bf16 bias plain silu") << "x, B and C";
  EXPECT_EQ(conv(parse("nemotron_h", nemotron(R"("hybrid_override_pattern": "M", "use_conv_bias": false)"), 1)),
            "short_conv d320 w4 bf16 plain silu");
  EXPECT_EQ(recurrent_refusal("nemotron_h", nemotron(R"("hybrid_override_pattern": "M", "mamba_hidden_act": "gelu")"), 1),
            "model.field.activation");
  EXPECT_EQ(recurrent(parse("nemotron_h", nemotron(R"("hybrid_override_pattern": "MM", "mamba_ssm_cache_dtype": "float32")"), 2)).gate_min,
            0.001f)
      << "the class default";
  EXPECT_EQ(recurrent_pattern(parse("nemotron_h", nemotron(R"("layers_block_type": ["mamba", "moe", "attention", "mlp"])"))), "ra");
  EXPECT_EQ(
      recurrent_pattern(parse("nemotron_h", nemotron(R"("layers_block_type": ["linear_attention", "full_attention", "moe", "moe"])"))),
      "ra");
  EXPECT_EQ(recurrent_refusal("nemotron_h", nemotron(R"("hybrid_override_pattern": "ME*")")), "model.field.layer_types.length");
  EXPECT_EQ(recurrent_refusal("nemotron_h", nemotron(R"("hybrid_override_pattern": "MEx*")")), "model.field.layer_types.unknown");
  EXPECT_EQ(recurrent_refusal("nemotron_h", nemotron(R"("hybrid_override_pattern": "--E-")")), "model.field.attn_layers");
  EXPECT_EQ(recurrent_refusal("nemotron_h", kNemotron), "model.field.missing");
  EXPECT_EQ(recurrent_refusal("nemotron_h", R"("hybrid_override_pattern": "MMMM")"), "model.field.missing")
      << "class defaults are for nested configs";
}

constexpr std::string_view kMamba2 =
    R"("mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_expand": 2)";
std::string mamba2(std::string_view more) { return std::string(kMamba2) + ", " + std::string(more); }

TEST(RecurrentFamilies, GraniteHasAScaleOfItsOwn) {
  const ModelSpec model = parse("granitemoehybrid", mamba2(R"("attention_multiplier": 0.015625, "layer_types": ["mamba", "attention",
      "mamba", "mamba"])"));
  EXPECT_EQ(recurrent_pattern(model), "rarr");
  EXPECT_EQ(mixer(model, 1).attention().scale(), 0.015625f);
  EXPECT_EQ(recurrent(model).str(),
            "recurrent q2 v16 k32 v64 softplus scaled_values skip scale=1 out_silu norm_after_gate norm_groups=2 conv_vkq conv_bias bf16 "
            "state f32 v_first");
  EXPECT_EQ(parse("granitemoehybrid", mamba2(R"("layer_types": ["mamba", "attention", "mamba", "mamba"])")).layers[1].attention().scale(),
            1.f)
      << "the class default";
  EXPECT_TRUE(has_note(parse("granitemoehybrid", kMamba2), "layer_types absent: no layer attends, the class default"));
  EXPECT_EQ(recurrent_pattern(parse("granitemoehybrid", R"("layer_types": ["attention", "attention", "attention", "attention"])")), "aaaa");
  EXPECT_EQ(recurrent_refusal("granitemoehybrid", mamba2(R"("mamba_d_head": 32)")), "model.json.duplicate");
  EXPECT_EQ(recurrent_refusal("granitemoehybrid", R"("mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2,
      "mamba_d_conv": 4, "mamba_expand": 2)"),
            "model.field.conflict");
  EXPECT_EQ(recurrent_refusal("granitemoehybrid", R"("mamba_n_heads": 16, "mamba_d_state": 32, "mamba_n_groups": 3, "mamba_expand": 2)"),
            "model.field.heads.indivisible");
  EXPECT_EQ(recurrent_refusal("granitemoehybrid", R"("mamba_n_heads": 24, "mamba_d_head": "auto", "mamba_d_state": 32, "mamba_n_groups": 2,
      "mamba_expand": 2)"),
            "model.field.heads.indivisible");
}

TEST(RecurrentFamilies, LimitsOfSteps) {
  const auto limits = [](const char* range) {
    const ModelSpec model = parse("granitemoehybrid", mamba2(std::string(R"("time_step_limit": )") + range));
    return std::pair(recurrent(model).gate_min, recurrent(model).gate_max);
  };
  EXPECT_EQ(limits("[0.05, 1.5]"), std::pair(0.05f, 1.5f));
  EXPECT_EQ(limits("[0.0, Infinity]"), std::pair(0.f, 0.f)) << "as Python writes it";
  EXPECT_EQ(limits(R"([0.001, {"__float__": "Infinity"}])"), std::pair(0.001f, 0.f)) << "as transformers 5 writes it";
  EXPECT_EQ(limits("[0, null]"), std::pair(0.f, 0.f));
  EXPECT_EQ(limits("null"), std::pair(0.f, 0.f));
  const auto code = [](const char* range) {
    return recurrent_refusal("granitemoehybrid", mamba2(std::string(R"("time_step_limit": )") + range));
  };
  EXPECT_EQ(code("[0.5, 0.1]"), "model.field.range");
  EXPECT_EQ(code("[-1, 1]"), "model.field.range");
  EXPECT_EQ(code("[0, 0]"), "model.field.range");
  EXPECT_EQ(code("[0, 1, 2]"), "model.field.type");
  EXPECT_EQ(code("[-Infinity, 1]"), "model.field.type");
  EXPECT_EQ(code(R"([0, "inf"])"), "model.field.type");
  EXPECT_EQ(code(R"([0, {"__float__": 1}])"), "model.field.type");
  EXPECT_EQ(code("[0, xInfinity]"), "model.json.syntax");
  EXPECT_EQ(parse_model_config(recurrent_config("granitemoehybrid", mamba2(R"("a": "\" Infinity", "time_step_limit": [0, 2])"))).num_layers,
            4);
}

TEST(RecurrentFamilies, FalconH1HasBothInEachLayer) {
  const ModelSpec model = parse("falcon_h1", R"("mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_ssm": 256, "mamba_d_state": 256,
      "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "key_multiplier": 0.5)",
                                2);
  EXPECT_EQ(recurrent_pattern(model), "arar");
  EXPECT_EQ(pattern_of_all(model), "arar");
  EXPECT_EQ(mixer(model, 2).name, "decoder.1.attention");
  EXPECT_EQ(mixer(model, 3).name, "decoder.1.recurrent");
  EXPECT_EQ(conv(model), "short_conv d768 w4 bf16 bias plain silu");
  EXPECT_EQ(recurrent(model, 1).head_dim_v, 64) << "mamba_d_ssm, not the expanded hidden size, is the width";
  EXPECT_TRUE(has_note(model, "key_multiplier 0.5: the engine multiplies keys"));
  EXPECT_EQ(recurrent(parse("falcon_h1", R"("mamba_n_heads": 16, "mamba_d_ssm": null, "mamba_d_state": 64, "mamba_n_groups": 1,
      "mamba_expand": 2)"),
                      1)
                .head_dim_v,
            64);
}

TEST(RecurrentFamilies, BambaListsItsAttention) {
  EXPECT_EQ(recurrent_pattern(parse("bamba", mamba2(R"("attn_layer_indices": [1, 3])"))), "rara");
  EXPECT_EQ(recurrent_pattern(parse("bamba", kMamba2)), "rrrr");
  EXPECT_EQ(recurrent_refusal("bamba", mamba2(R"("attn_layer_indices": [4])")), "model.field.attn_layers");
  EXPECT_EQ(recurrent_refusal("bamba", mamba2(R"("attn_layer_indices": [1, 1])")), "model.field.attn_layers");
}

TEST(RecurrentFamilies, Zamba2AttendsOverTwiceTheHiddenSize) {
  const std::string mamba = R"("n_mamba_heads": 16, "mamba_d_state": 64, "mamba_ngroups": 2, "mamba_d_conv": 4, "mamba_expand": 2, )";
  const ModelSpec model = parse("zamba2", mamba + R"("layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"])");
  EXPECT_EQ(recurrent_pattern(model), "rarrar");
  EXPECT_EQ(mixer(model, 1).attention().head_dim_qk, 128);
  EXPECT_NEAR(mixer(model, 1).attention().scale(), 0.125, 1e-7);
  EXPECT_EQ(recurrent(model).gate_min, 0.001f);
  EXPECT_EQ(conv(model), "short_conv d1280 w4 bf16 bias plain silu");
  EXPECT_EQ(conv(parse("zamba2", mamba + R"("use_conv_bias": false, "hidden_act": "gelu", "hybrid_layer_ids": [2])")), conv(model))
      << "its code reads neither of the two";
  EXPECT_EQ(recurrent_pattern(parse("zamba2", mamba + R"("hybrid_layer_ids": [2])")), "rrarr");
  EXPECT_EQ(parse("zamba2", mamba + R"("attention_head_dim": 128)", 54).layers.size(), 54u + 9) << "the class default has 9 hybrid layers";
  EXPECT_EQ(recurrent_refusal("zamba2", mamba + R"("attention_head_dim": 64, "hybrid_layer_ids": [2])"), "model.field.conflict");
  EXPECT_EQ(recurrent_refusal("zamba2", mamba + R"("use_mem_rope": false)"), "model.field.missing");
}

TEST(RecurrentFamilies, Mamba1) {
  const ModelSpec jamba = parse("jamba", R"("attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_expand": 2,
      "mamba_d_conv": 4)",
                                5);
  EXPECT_EQ(recurrent_pattern(jamba), "rarra");
  EXPECT_EQ(recurrent(jamba).str(),
            "recurrent q1 v1024 k8 v1 softplus channel_rates scaled_values skip scale=1 out_silu bf16 state f32 v_first");
  EXPECT_EQ(pattern_of_all(jamba), "cracrcra");
  EXPECT_EQ(conv(jamba), "short_conv d1024 w4 bf16 bias plain silu") << "x alone";
  EXPECT_EQ(recurrent_refusal("jamba", R"("attn_layer_period": 3, "attn_layer_offset": 3, "mamba_d_state": 8, "mamba_expand": 2)"),
            "model.field.attn_layers");
  const ModelSpec falcon = parse("falcon_mamba", R"("state_size": 16, "expand": 16, "intermediate_size": 1024, "conv_kernel": 4)");
  EXPECT_EQ(recurrent_pattern(falcon), "rrrr");
  EXPECT_EQ(recurrent(falcon).num_v_heads, 1024);
  EXPECT_TRUE(has_note(falcon, "expand 16: intermediate_size 1024 is the width"));
  EXPECT_EQ(conv(parse("mamba", R"("state_size": 16, "expand": 2, "use_conv_bias": false)")), "short_conv d1024 w4 bf16 plain silu");
  EXPECT_EQ(recurrent(parse("mamba", R"("state_size": 16, "expand": 2)")).num_v_heads, 1024);
  EXPECT_EQ(recurrent_refusal("mamba", R"("state_size": 16, "expand": 64, "hidden_size": 65536)"), "model.json.duplicate");
  const ModelSpec second = parse("mamba2", R"("num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2,
      "time_step_limit": [0.0, Infinity])");
  EXPECT_EQ(recurrent(second).str(),
            "recurrent q8 v16 k128 v64 softplus scaled_values skip scale=1 out_silu norm_after_gate norm_groups=8 norm_eps=1e-05 conv_vkq "
            "conv_bias bf16 state f32 v_first");
  EXPECT_EQ(recurrent_refusal("mamba2", R"("num_heads": 16, "head_dim": 32, "state_size": 128, "n_groups": 8, "expand": 2)"),
            "model.field.conflict");
}

TEST(RecurrentFamilies, LightningAttention) {
  const ModelSpec model = parse("minimax_text_01", R"("head_dim": 32, "attn_type_list": [0, 0, 1, 0])");
  EXPECT_EQ(recurrent_pattern(model), "rrar");
  EXPECT_EQ(conv(model), "none");
  EXPECT_EQ(recurrent(model).str(),
            "recurrent q8 v8 k32 v32 fixed scale=1 out_sigmoid norm_before_gate norm_groups=1 bf16 state f32 v_first");
  EXPECT_TRUE(has_note(model, "the slopes depend on the head and on the layer's index"));
  EXPECT_EQ(
      recurrent_pattern(parse("minimax", R"("layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"])")),
      "rara");
  const ModelSpec toy = parse("minimax", "");
  EXPECT_EQ(recurrent_pattern(toy), "arar");
  EXPECT_TRUE(has_note(toy, "the class default, which is no published model"));
  EXPECT_EQ(recurrent_refusal("minimax_m1", ""), "model.field.missing");
  EXPECT_EQ(recurrent_refusal("minimax_m1", R"("attn_type_list": [0, 1])"), "model.field.attn_type_list.length");
  EXPECT_EQ(recurrent_refusal("minimax_m1", R"("attn_type_list": [0, 1, 2, 0])"), "model.field.attn_type.unknown");

  const ModelSpec ring = parse("bailing_moe_linear", R"("head_dim": 32, "layer_group_size": 2)", 5);
  EXPECT_EQ(recurrent_pattern(ring), "raraa") << "what is left over attends";
  EXPECT_EQ(recurrent(ring).query_scale(), 1 / std::sqrt(32.f));
  EXPECT_EQ(mixer(ring, 1).attention().num_kv_heads, 2);
  EXPECT_EQ(recurrent_refusal("bailing_moe_linear", R"("layer_group_size": 2, "num_kv_heads_for_linear_attn": 2)"), "model.family.later");
  EXPECT_EQ(recurrent_refusal("bailing_moe_linear", ""), "model.field.missing");
}

TEST(RecurrentFamilies, ConvolutionsThatAreNotRun) {
  const auto code = [](std::string_view more) { return recurrent_refusal("qwen3_next", more); };
  EXPECT_EQ(code(R"("linear_conv_kernel_dim": 9)"), "model.field.conv_width");
  EXPECT_EQ(code(R"("linear_conv_kernel_dim": 1)"), "model.field.conv_width");
  EXPECT_EQ(code(R"("hidden_act": "relu")"), "model.field.activation");
  EXPECT_EQ(conv(parse("qwen3_next", R"("hidden_act": "swish")")), "short_conv d8192 w4 bf16 plain silu");
  EXPECT_TRUE(has_note(parse("qwen3_next", ""), "linear_conv_kernel_dim absent: the class default 4"));
  EXPECT_EQ(recurrent_refusal("mamba", R"("state_size": 16, "expand": 2, "use_conv_bias": 1)"), "model.field.type");
}

TEST(RecurrentFamilies, StatesAreGroupsBesidePages) {
  const ModelSpec model = load_model("nemotron-3-nano-30b-a3b");
  ASSERT_EQ(model.cache_groups.size(), 2u);
  EXPECT_EQ(model.cache_groups[0].name, "recurrent");
  EXPECT_EQ(model.cache_groups[0].layers.size(), 23u);
  EXPECT_EQ(model.cache_groups[0].bytes_per_slot, 23 * (3 * 6144 * 2 + int64_t(64) * 64 * 128 * 4)) << "two states in a slot";
  EXPECT_EQ(model.cache_groups[1].name, "full");
  EXPECT_EQ(model.cache_groups[1].layers.size(), 6u);
  EXPECT_EQ(model.str().find("nemotron-3-nano-30b-a3b (nemotron_h): 52 layers (23 recurrent, 6 attention), hidden 2688, "
                             "KV 6144 B/token, states 49082368 B/request"),
            0u)
      << model.str();
}

// The norm of outputs, its groups and its epsilon, and the gate: what modules of transformers 5.24 have from configs of their classes, and
// those of SGLang 0.5.23 for bailing_moe_linear and lightning attention in bailing_hybrid.
TEST(RecurrentFamilies, NormsAndGatesOfOutputs) {
  const auto outputs = [](std::string_view type, const std::string& more) {
    const RecurrentSpec spec = recurrent(parse(type, more, type == "zamba2" ? 54 : 4), type == "falcon_h1" ? 1 : 0);
    return fmt::format("{} {} {} {:g}", to_string(spec.out_norm), to_string(spec.out_gate), spec.norm_groups, spec.norm_eps);
  };
  EXPECT_EQ(outputs("qwen3_next", ""), "before_gate silu 0 1e-06");
  EXPECT_EQ(outputs("qwen3_next", R"("rms_norm_eps": 1e-5)"), "before_gate silu 0 1e-05");
  EXPECT_EQ(outputs("nemotron_h", nemotron(R"("hybrid_override_pattern": "MMMM")")), "after_gate silu 2 1e-05");
  EXPECT_EQ(outputs("nemotron_h", nemotron(R"("hybrid_override_pattern": "MMMM", "layer_norm_epsilon": 1e-4)")),
            "after_gate silu 2 0.0001");
  EXPECT_EQ(outputs("granitemoehybrid", mamba2(R"("rms_norm_eps": 1e-4)")), "after_gate silu 2 0.0001");
  EXPECT_EQ(outputs("granitemoehybrid", std::string(kMamba2)), "after_gate silu 2 1e-06");
  EXPECT_EQ(outputs("bamba", std::string(kMamba2)), "after_gate silu 2 1e-05");
  EXPECT_EQ(outputs("zamba2", R"("n_mamba_heads": 16, "mamba_d_state": 64, "mamba_ngroups": 2, "mamba_expand": 2, "rms_norm_eps": 0.1)"),
            "after_gate silu 2 1e-05")
      << "its code has a number of its own";
  const auto falcon = [&](const char* more) {
    return outputs("falcon_h1", R"("mamba_n_heads": 4, "mamba_d_ssm": 256, "mamba_d_state": 64, "mamba_n_groups": 2)" + std::string(more));
  };
  EXPECT_EQ(falcon(""), "none silu 0 1e-06");
  EXPECT_EQ(falcon(R"(, "mamba_rms_norm": true)"), "before_gate silu 2 1e-05");
  EXPECT_EQ(falcon(R"(, "mamba_rms_norm": true, "mamba_norm_before_gate": false)"), "after_gate silu 2 1e-05");
  EXPECT_EQ(outputs("jamba", R"("mamba_d_state": 8, "mamba_expand": 2)"), "none silu 0 1e-06");
  EXPECT_EQ(outputs("falcon_mamba", R"("state_size": 16, "expand": 2)"), "none silu 0 1e-06");
  EXPECT_EQ(outputs("minimax_m1", R"("attn_type_list": [0, 0, 0, 0])"), "before_gate sigmoid 1 1e-06");
  EXPECT_TRUE(has_note(parse("minimax_m1", R"("attn_type_list": [0, 0, 0, 0])"), "the epsilon 1e-6, as in transformers"));
  EXPECT_EQ(outputs("bailing_moe_linear", R"("layer_group_size": 2, "group_norm_size": 4, "rms_norm_eps": 1e-5)"),
            "before_gate sigmoid 4 1e-05");
  EXPECT_EQ(outputs("bailing_moe_linear", R"("layer_group_size": 2)"), "before_gate sigmoid 1 1e-06");
  EXPECT_EQ(outputs("mamba2", R"("num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2, "rms_norm_eps": 1e-4)"),
            "after_gate silu 8 1e-05")
      << "its field is layer_norm_epsilon";
  const std::string latent = R"("kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, )";
  EXPECT_EQ(outputs("kimi_linear", latent + R"("mla_use_nope": true, "linear_attn_config": {"num_heads": 8, "head_dim": 64,
      "short_conv_kernel_size": 4, "full_attn_layers": [4], "kda_layers": [1, 2, 3]})"),
            "before_gate sigmoid 0 1e-05");
  EXPECT_EQ(outputs("bailing_hybrid", latent + R"("head_dim": 64, "layer_group_size": 2, "short_conv_kernel_size": 4)"),
            "before_gate sigmoid 0 1e-06")
      << "layers of KDA";
  EXPECT_EQ(outputs("bailing_hybrid", latent + R"("head_dim": 64, "layer_group_size": 2, "group_norm_size": 4)"),
            "before_gate sigmoid 4 1e-06")
      << "layers of lightning attention";
  EXPECT_EQ(recurrent_refusal("bailing_moe_linear", R"("layer_group_size": 2, "group_norm_size": 3)"), "model.field.heads.indivisible");
  EXPECT_EQ(recurrent_refusal("qwen3_next", R"("rms_norm_eps": 0)"), "model.field.zero");
  EXPECT_EQ(recurrent_refusal("falcon_h1", R"("mamba_n_heads": 4, "mamba_d_ssm": 256, "mamba_d_state": 64, "mamba_n_groups": 2,
      "mamba_rms_norm": 1)"),
            "model.field.type");
}

// Rows of a convolution's state have the type of the activations, those of a recurrence do not; and drafts need more of both.
TEST(RecurrentFamilies, StatesFollowTheDeployment) {
  ModelSpec model = load_model("qwen3-next-80b-a3b").with_kv(DType::f32, DType::f32, KvFormat::strided, 16);
  EXPECT_EQ(conv(model), "short_conv d8192 w4 f32 plain silu");
  EXPECT_EQ(model.cache_groups[0].bytes_per_slot, 36 * (3 * 8192 * 4 + int64_t(32) * 128 * 128 * 4));
  for (ModelLayer& layer : model.layers) {
    if (auto* const of_recurrence = std::get_if<RecurrentSpec>(&layer.spec)) of_recurrence->num_drafts = 2;
  }
  const ModelSpec drafting = model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
  EXPECT_EQ(drafting.cache_groups[0].bytes_per_slot, 36 * ((3 + 2) * 8192 * 2 + int64_t(1 + 2) * 32 * 128 * 128 * 4));
}

// What users see are the numbers of the model.
TEST(RecurrentFamilies, LayersAreCountedAsTheModelDoes) {
  const auto numbers = [](const ModelSpec& model, size_t kind) { return model.numbers_of(model.kinds()[kind].layers); };
  const ModelSpec nemotron_model = load_model("nemotron-3-nano-30b-a3b");
  EXPECT_EQ(nemotron_model.num_layers, 52) << "the last is an expert layer";
  EXPECT_EQ(numbers(nemotron_model, 1), (std::vector<int>{5, 12, 19, 26, 33, 42}));
  const ModelSpec jamba = load_model("jamba-v0.1");
  EXPECT_EQ(numbers(jamba, 0), numbers(jamba, 1)) << "convolutions and recurrences";
  const ModelSpec longcat = load_model("longcat-flash");
  EXPECT_EQ(longcat.num_layers, 28);
  EXPECT_EQ(numbers(longcat, 0).size(), 28u) << "two layers of attention are one of the model";
  const ModelSpec whisper = load_model("whisper-tiny");
  EXPECT_EQ(whisper.num_layers, 8);
  EXPECT_EQ(numbers(whisper, 2), (std::vector<int>{4, 5, 6, 7})) << "cross attention of the decoder, behind the encoder's 4";
}

}  // namespace
}  // namespace imbrex
