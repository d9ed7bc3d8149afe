// Every preset that imbrex runs against the facts known of the model; the facts come from another source than the presets.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "expect_error.h"
#include "imbrex/model.h"
#include "recurrent/conv_plan.h"

namespace imbrex {
namespace {

struct Facts {
  const char* name;
  int hidden, layers, q_heads, kv_heads, qk_dim, v_dim;
  int full, local;         // layers whose cache grows without bound, layers with a window or chunks
  int window, chunk, cap;  // of the local layers; 0: none. The window counts the query itself
  bool sinks;
  double scale;                     // 0: 1 / sqrt(qk_dim)
  int64_t layer_bytes, full_bytes;  // KV bytes a token in bf16: of one layer, of all full layers
};

// Models with an encoder list their decoder; BERT has no cache and so no full layer.
constexpr Facts kFacts[] = {
    {"llama-2-7b", 4096, 32, 32, 32, 128, 128, 32, 0, 0, 0, 0, false, 0, 16384, 524288},
    {"llama-2-70b", 8192, 80, 64, 8, 128, 128, 80, 0, 0, 0, 0, false, 0, 4096, 327680},
    {"llama-3.1-8b", 4096, 32, 32, 8, 128, 128, 32, 0, 0, 0, 0, false, 0, 4096, 131072},
    {"llama-3.3-70b", 8192, 80, 64, 8, 128, 128, 80, 0, 0, 0, 0, false, 0, 4096, 327680},
    {"llama-3.1-405b", 16384, 126, 128, 8, 128, 128, 126, 0, 0, 0, 0, false, 0, 4096, 516096},
    {"llama-3.2-1b", 2048, 16, 32, 8, 64, 64, 16, 0, 0, 0, 0, false, 0, 2048, 32768},
    {"llama-3.2-3b", 3072, 28, 24, 8, 128, 128, 28, 0, 0, 0, 0, false, 0, 4096, 114688},
    {"llama-4-scout", 5120, 48, 40, 8, 128, 128, 12, 36, 0, 8192, 0, false, 0, 4096, 49152},
    {"mistral-7b-v0.1", 4096, 32, 32, 8, 128, 128, 0, 32, 4096, 0, 0, false, 0, 4096, 0},
    {"mixtral-8x7b", 4096, 32, 32, 8, 128, 128, 32, 0, 0, 0, 0, false, 0, 4096, 131072},
    {"mistral-nemo-12b", 5120, 40, 32, 8, 128, 128, 40, 0, 0, 0, 0, false, 0, 4096, 163840},
    {"ministral-3-3b", 3072, 26, 32, 8, 128, 128, 26, 0, 0, 0, 0, false, 0, 4096, 106496},
    {"qwen2-0.5b", 896, 24, 14, 2, 64, 64, 24, 0, 0, 0, 0, false, 0, 512, 12288},
    {"qwen2-7b", 3584, 28, 28, 4, 128, 128, 28, 0, 0, 0, 0, false, 0, 2048, 57344},
    {"qwen2.5-72b", 8192, 80, 64, 8, 128, 128, 80, 0, 0, 0, 0, false, 0, 4096, 327680},
    {"qwen3-0.6b", 1024, 28, 16, 8, 128, 128, 28, 0, 0, 0, 0, false, 0, 4096, 114688},
    {"qwen3-8b", 4096, 36, 32, 8, 128, 128, 36, 0, 0, 0, 0, false, 0, 4096, 147456},
    {"qwen3-32b", 5120, 64, 64, 8, 128, 128, 64, 0, 0, 0, 0, false, 0, 4096, 262144},
    {"qwen3-30b-a3b", 2048, 48, 32, 4, 128, 128, 48, 0, 0, 0, 0, false, 0, 2048, 98304},
    {"qwen3-235b-a22b", 4096, 94, 64, 4, 128, 128, 94, 0, 0, 0, 0, false, 0, 2048, 192512},
    {"gemma-2b", 2048, 18, 8, 1, 256, 256, 18, 0, 0, 0, 0, false, 0, 1024, 18432},
    {"gemma-2-2b", 2304, 26, 8, 4, 256, 256, 13, 13, 4096, 0, 50, false, 1 / 16.0, 4096, 53248},
    {"gemma-2-9b", 3584, 42, 16, 8, 256, 256, 21, 21, 4096, 0, 50, false, 1 / 16.0, 8192, 172032},
    {"gemma-2-27b", 4608, 46, 32, 16, 128, 128, 23, 23, 4096, 0, 50, false, 1 / 12.0, 8192, 188416},
    {"gemma-3-1b", 1152, 26, 4, 1, 256, 256, 4, 22, 512, 0, 0, false, 1 / 16.0, 1024, 4096},
    {"gemma-3-4b", 2560, 34, 8, 4, 256, 256, 5, 29, 1024, 0, 0, false, 1 / 16.0, 4096, 20480},
    {"gemma-3-12b", 3840, 48, 16, 8, 256, 256, 8, 40, 1024, 0, 0, false, 1 / 16.0, 8192, 65536},
    {"gemma-3-27b", 5376, 62, 32, 16, 128, 128, 10, 52, 1024, 0, 0, false, 1 / 12.9614814, 8192, 81920},
    {"gpt-oss-20b", 2880, 24, 64, 8, 64, 64, 12, 12, 128, 0, 0, true, 0, 2048, 24576},
    {"gpt-oss-120b", 2880, 36, 64, 8, 64, 64, 18, 18, 128, 0, 0, true, 0, 2048, 36864},
    {"glm-4.5", 5120, 92, 96, 8, 128, 128, 92, 0, 0, 0, 0, false, 0, 4096, 376832},
    {"glm-4.5-air", 4096, 46, 96, 8, 128, 128, 46, 0, 0, 0, 0, false, 0, 4096, 188416},
    {"minimax-m2", 3072, 62, 48, 8, 128, 128, 62, 0, 0, 0, 0, false, 0, 4096, 253952},
    {"phi-2", 2560, 32, 32, 32, 80, 80, 32, 0, 0, 0, 0, false, 0, 10240, 327680},
    {"phi-3.5-mini", 3072, 32, 32, 32, 96, 96, 32, 0, 0, 0, 0, false, 0, 12288, 393216},
    {"phi-4-mini", 3072, 32, 24, 8, 128, 128, 32, 0, 0, 0, 0, false, 0, 4096, 131072},
    {"falcon-7b", 4544, 32, 71, 1, 64, 64, 32, 0, 0, 0, 0, false, 0, 256, 8192},
    {"falcon-40b", 8192, 60, 128, 8, 64, 64, 60, 0, 0, 0, 0, false, 0, 2048, 122880},
    {"falcon-rw-1b", 2048, 24, 32, 32, 64, 64, 24, 0, 0, 0, 0, false, 0, 8192, 196608},
    {"bloom-7b1", 4096, 30, 32, 32, 128, 128, 30, 0, 0, 0, 0, false, 0, 16384, 491520},
    {"bloom", 14336, 70, 112, 112, 128, 128, 70, 0, 0, 0, 0, false, 0, 57344, 4014080},
    {"mpt-7b", 4096, 32, 32, 32, 128, 128, 32, 0, 0, 0, 0, false, 0, 16384, 524288},
    {"starcoder2-7b", 4608, 32, 36, 4, 128, 128, 0, 32, 4096, 0, 0, false, 0, 2048, 0},
    {"bert-base", 768, 12, 12, 12, 64, 64, 0, 0, 0, 0, 0, false, 0, 3072, 0},
    {"bert-large", 1024, 24, 16, 16, 64, 64, 0, 0, 0, 0, 0, false, 0, 4096, 0},
    {"t5-small", 512, 6, 8, 8, 64, 64, 6, 0, 0, 0, 0, false, 1.0, 2048, 12288},
    {"bart-large", 1024, 12, 16, 16, 64, 64, 12, 0, 0, 0, 0, false, 0, 4096, 49152},
    {"whisper-large-v3", 1280, 32, 20, 20, 64, 64, 32, 0, 0, 0, 0, false, 0, 5120, 163840},
    {"whisper-tiny", 384, 4, 6, 6, 64, 64, 4, 0, 0, 0, 0, false, 0, 1536, 6144},
    {"gpt-j-6b", 4096, 28, 16, 16, 256, 256, 28, 0, 0, 0, 0, false, 0, 16384, 458752},
};

// Layers that attend among short convolutions.
struct HybridFacts {
  const char* name;
  int hidden, layers, q_heads;  // 8 kv heads of 64, and convolutions over 3 tokens without bias, in all
  std::vector<int> attention;
  int64_t kv_bytes, state_bytes;  // of a token and of a request, in bf16
};
const HybridFacts kHybrids[] = {
    {"lfm2-350m", 1024, 16, 16, {2, 5, 8, 10, 12, 14}, 12288, 40960},
    {"lfm2-700m", 1536, 16, 24, {2, 5, 8, 10, 12, 14}, 12288, 61440},
    {"lfm2-1.2b", 2048, 16, 32, {2, 5, 8, 10, 12, 14}, 12288, 81920},
    {"lfm2-2.6b", 2048, 30, 32, {2, 5, 9, 13, 17, 21, 24, 27}, 16384, 180224},
    {"lfm2-8b-a1b", 2048, 24, 32, {2, 6, 10, 14, 18, 21}, 12288, 147456},
};

// Recurrent layers, alone or among others.
struct RecurrentFacts {
  const char* name;
  int hidden, layers;             // layers: with or without a cache
  std::vector<int> attention;     // the numbers of those that attend
  const char* recurrent;          // str() of those that are recurrent, in bf16
  int channels;                   // of the convolutions in front of these, over 4 tokens; 0: they have none
  bool bias;                      // of the convolutions
  int64_t kv_bytes, state_bytes;  // of a token, and of a request's recurrences in f32
  int convs = 0;                  // how many: as many as recurrences
};
std::vector<int> every(int interval, int count) {
  std::vector<int> layers;
  for (int i = 1; i <= count; ++i) layers.push_back(interval * i - 1);
  return layers;
}
const RecurrentFacts kRecurrentFacts[] = {
    {"qwen3-next-80b-a3b", 2048, 48, every(4, 12),
     "recurrent q16 v32 k128 v128 softplus delta sigmoid_beta qk_norm out_silu norm_before_gate conv_qkv bf16 state f32 v_first", 8192,
     false, 24576, int64_t(36) * 32 * 128 * 128 * 4, 36},
    {"qwen3.5-397b-a17b", 4096, 60, every(4, 15),
     "recurrent q16 v64 k128 v128 softplus delta sigmoid_beta qk_norm out_silu norm_before_gate conv_qkv bf16 state f32 v_first", 12288,
     false, 30720, int64_t(45) * 64 * 128 * 128 * 4, 45},
    {"kimi-linear-48b-a3b",
     2304,
     27,
     {3, 7, 11, 15, 19, 23, 26},
     "recurrent q32 v32 k128 v128 softplus channel_gate delta sigmoid_beta qk_norm out_sigmoid norm_before_gate norm_eps=1e-05 conv_qkv "
     "bf16 state f32 v_first",
     12288,
     false,
     8064,
     int64_t(20) * 32 * 128 * 128 * 4,
     20},
    {"minimax-01", 6144, 80, every(8, 10),
     "recurrent q64 v64 k128 v128 fixed scale=1 out_sigmoid norm_before_gate norm_groups=1 bf16 state f32 v_first", 0, false, 40960,
     int64_t(70) * 64 * 128 * 128 * 4},
    {"minimax-m1", 6144, 80, every(8, 10),
     "recurrent q64 v64 k128 v128 fixed scale=1 out_sigmoid norm_before_gate norm_groups=1 bf16 state f32 v_first", 0, false, 40960,
     int64_t(70) * 64 * 128 * 128 * 4},
    // Of 52 layers 23 are experts alone.
    {"nemotron-3-nano-30b-a3b",
     2688,
     52,
     {5, 12, 19, 26, 33, 42},
     "recurrent q8 v64 k128 v64 softplus gate_min=0.001 scaled_values skip scale=1 out_silu norm_after_gate norm_groups=8 norm_eps=1e-05 "
     "conv_vkq conv_bias bf16 state f32 v_first",
     6144,
     true,
     6144,
     int64_t(23) * 64 * 64 * 128 * 4,
     23},
    // Of 52 layers 24 are MLPs alone.
    {"nemotron-h-8b",
     4096,
     52,
     {7, 18, 29, 40},
     "recurrent q8 v128 k128 v64 softplus gate_min=0.001 scaled_values skip scale=1 out_silu norm_after_gate norm_groups=8 norm_eps=1e-05 "
     "conv_vkq conv_bias bf16 state f32 v_first",
     10240,
     true,
     16384,
     int64_t(24) * 128 * 64 * 128 * 4,
     24},
    {"granite-4-h-small",
     4096,
     40,
     {5, 15, 25, 35},
     "recurrent q1 v128 k128 v64 softplus scaled_values skip scale=1 out_silu norm_after_gate norm_groups=1 norm_eps=1e-05 conv_vkq "
     "conv_bias bf16 state f32 v_first",
     8448,
     true,
     16384,
     int64_t(36) * 128 * 64 * 128 * 4,
     36},
    {"falcon-mamba-7b",
     4096,
     64,
     {},
     "recurrent q1 v8192 k16 v1 softplus channel_rates scaled_values skip scale=1 out_silu bf16 state f32 v_first",
     8192,
     true,
     0,
     int64_t(64) * 8192 * 16 * 4,
     64},
    {"jamba-v0.1",
     4096,
     32,
     {4, 12, 20, 28},
     "recurrent q1 v8192 k16 v1 softplus channel_rates scaled_values skip scale=1 out_silu bf16 state f32 v_first",
     8192,
     true,
     16384,
     int64_t(28) * 8192 * 16 * 4,
     28},
    // 13 of 81 layers have both.
    {"zamba2-7b",
     3584,
     81,
     {6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77},
     "recurrent q2 v112 k64 v64 softplus gate_min=0.001 scaled_values skip scale=1 out_silu norm_after_gate norm_groups=2 norm_eps=1e-05 "
     "conv_vkq conv_bias bf16 state f32 v_first",
     7424,
     true,
     13 * 28672,
     int64_t(81) * 112 * 64 * 64 * 4,
     81},
    {"ring-mini-linear-2.0", 2048, 20, every(5, 4),
     "recurrent q16 v16 k128 v128 fixed out_sigmoid norm_before_gate norm_groups=4 bf16 state f32 v_first", 0, false, 4 * 4 * 256 * 2,
     int64_t(16) * 16 * 128 * 128 * 4},
};

// Layers of latent attention, all alike.
struct LatentFacts {
  const char* name;
  int hidden, layers, heads, nope, rope, v;  // latents of 512
  double scale;
  int64_t full_bytes;  // of a token in all layers, in bf16
};
constexpr LatentFacts kLatent[] = {
    {"deepseek-v2", 5120, 60, 128, 128, 64, 128, 0.1147213867929261, 69120},  // 1.2608 squared / sqrt(192)
    {"deepseek-v2-lite", 2048, 27, 16, 128, 64, 128, 0.1147213867929261, 31104},
    {"deepseek-v3", 7168, 61, 128, 128, 64, 128, 0.1352337788608801, 70272},  // 1.3689 squared / sqrt(192)
    {"deepseek-v3.2", 7168, 61, 128, 128, 64, 128, 0.1352337788608801, 70272},
    {"glm-4.7-flash", 2048, 47, 20, 192, 64, 256, 0.0625, 54144},
    {"glm-5", 6144, 78, 64, 192, 64, 256, 0.0625, 89856},
    {"kimi-k2", 7168, 61, 64, 128, 64, 128, 0.1308607, 70272},  // 1.3466 squared / sqrt(192)
    {"longcat-flash", 6144, 56, 64, 128, 64, 128, 0.0721687836, 64512},
};

void expect_facts(const Facts& facts) {
  SCOPED_TRACE(facts.name);
  const ModelSpec model = load_model(facts.name).with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
  EXPECT_EQ(model.name, facts.name);
  EXPECT_EQ(model.hidden_size, facts.hidden);
  const bool encoder_only = model.layers[0].attention().kind == AttentionKind::encoder_only;
  int layers = 0, full = 0, local = 0;
  int64_t full_bytes = 0;
  for (const ModelLayer& layer : model.layers) {
    const AttentionSpec& spec = layer.attention();
    EXPECT_EQ(spec.num_q_heads, facts.q_heads);
    EXPECT_EQ(spec.num_kv_heads, facts.kv_heads);
    EXPECT_EQ(spec.head_dim_qk, facts.qk_dim);
    EXPECT_EQ(spec.head_dim_v, facts.v_dim);
    EXPECT_EQ(spec.score.soft_cap, float(facts.cap));
    EXPECT_EQ(spec.score.sinks, facts.sinks);
    EXPECT_NEAR(spec.scale(), facts.scale != 0 ? facts.scale : 1 / std::sqrt(facts.qk_dim), 1e-6);
    EXPECT_EQ(spec.kv_bytes_per_token(), facts.layer_bytes);
    if (spec.kind != AttentionKind::decoder && !encoder_only) continue;
    ++layers;
    if (encoder_only) {
      EXPECT_FALSE(spec.mask.causal);
      EXPECT_EQ(layer.cache_group, -1);
      continue;
    }
    EXPECT_TRUE(spec.mask.causal);
    ASSERT_GE(layer.cache_group, 0);
    const bool bounded = spec.mask.window_left >= 0 || spec.mask.chunk > 0;
    bounded ? ++local : ++full;
    if (bounded) {
      EXPECT_EQ(spec.mask.window_left, facts.window - 1);
      EXPECT_EQ(spec.mask.chunk, facts.chunk);
    }
  }
  for (const CacheGroup& group : model.cache_groups)
    if (group.name == "full") full_bytes += group.bytes_per_token;
  EXPECT_EQ(layers, facts.layers);
  EXPECT_EQ(full, facts.full);
  EXPECT_EQ(local, facts.local);
  EXPECT_EQ(full_bytes, facts.full_bytes);
}

TEST(Presets, MatchTheFacts) {
  for (const Facts& facts : kFacts) expect_facts(facts);
}

TEST(Presets, HybridsMatchTheFacts) {
  for (const HybridFacts& facts : kHybrids) {
    SCOPED_TRACE(facts.name);
    const ModelSpec model = load_model(facts.name);
    ASSERT_EQ(int(model.layers.size()), facts.layers);
    EXPECT_EQ(model.hidden_size, facts.hidden);
    std::vector<int> attention;
    for (int i = 0; i < facts.layers; ++i) {
      const ModelLayer& layer = model.layers[size_t(i)];
      EXPECT_EQ(layer.name, "decoder." + std::to_string(i));
      if (const auto* conv = std::get_if<ShortConvSpec>(&layer.spec)) {
        EXPECT_EQ(*conv, (ShortConvSpec{.dim = facts.hidden, .width = 3, .bias = false, .dtype = DType::bf16}));
        continue;
      }
      attention.push_back(i);
      EXPECT_EQ(layer.attention().num_q_heads, facts.q_heads);
      EXPECT_EQ(layer.attention().num_kv_heads, 8);
      EXPECT_EQ(layer.attention().head_dim_qk, 64);
      EXPECT_EQ(layer.attention().head_dim_v, 64);
      EXPECT_NEAR(layer.attention().scale(), 0.125, 1e-7);
      EXPECT_TRUE(layer.attention().mask.causal);
    }
    EXPECT_EQ(attention, facts.attention);
    int64_t kv_bytes = 0, state_bytes = 0;
    for (const CacheGroup& group : model.cache_groups) kv_bytes += group.bytes_per_token, state_bytes += group.bytes_per_slot;
    EXPECT_EQ(model.cache_groups.size(), 2u);
    EXPECT_EQ(kv_bytes, facts.kv_bytes);
    EXPECT_EQ(state_bytes, facts.state_bytes);
  }
}

TEST(Presets, RecurrentOnesMatchTheFacts) {
  for (const RecurrentFacts& facts : kRecurrentFacts) {
    SCOPED_TRACE(facts.name);
    const ModelSpec model = load_model(facts.name).with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
    EXPECT_EQ(model.num_layers, facts.layers);
    EXPECT_EQ(model.hidden_size, facts.hidden);
    std::vector<int> attention, recurrent, convs;
    const auto see_conv = [&](const ShortConvSpec& conv, int number) {
      EXPECT_EQ(conv, (ShortConvSpec{.dim = facts.channels,
                                     .width = 4,
                                     .bias = facts.bias,
                                     .dtype = DType::bf16,
                                     .form = ShortConvForm::plain,
                                     .activation = ShortConvActivation::silu}));
      convs.push_back(number);
    };
    for (const ModelLayer& layer : model.layers) {
      if (const auto* const conv = std::get_if<ShortConvSpec>(&layer.spec)) {
        see_conv(*conv, layer.number);
      } else if (const auto* const spec = std::get_if<RecurrentSpec>(&layer.spec)) {
        EXPECT_EQ(spec->str(), facts.recurrent);
        if (spec->conv != RecurrentConv::none) see_conv(conv_of(*spec), layer.number);
        recurrent.push_back(layer.number);
      } else {
        attention.push_back(layer.number);
      }
    }
    EXPECT_EQ(attention, facts.attention);
    EXPECT_EQ(int(convs.size()), facts.convs);
    if (facts.convs > 0) {
      EXPECT_EQ(convs, recurrent);
    }
    int64_t kv_bytes = 0, state_bytes = 0;
    for (const CacheGroup& group : model.cache_groups) kv_bytes += group.bytes_per_token, state_bytes += group.bytes_per_slot;
    EXPECT_EQ(kv_bytes, facts.kv_bytes);
    EXPECT_EQ(state_bytes, facts.state_bytes + int64_t(facts.convs) * 3 * facts.channels * 2) << "and 3 rows of bf16 in front of each";
  }
  const auto attention_of = [](std::string_view name) {  // the first that a model has
    for (const ModelLayer& layer : load_model(name).layers)
      if (std::holds_alternative<AttentionSpec>(layer.spec)) return layer;
    return ModelLayer{};
  };
  EXPECT_NEAR(attention_of("zamba2-7b").attention().scale(), 1 / std::sqrt(112.), 1e-7) << "half of a head's dimension";
  EXPECT_EQ(attention_of("zamba2-7b").name, "decoder.6.attention");
  EXPECT_EQ(attention_of("granite-4-h-small").attention().scale(), 0.0078125f);
  EXPECT_EQ(attention_of("nemotron-3-nano-30b-a3b").name, "decoder.5") << "layers without a cache are counted, but not there";
}

TEST(Presets, LatentOnesMatchTheFacts) {
  for (const LatentFacts& facts : kLatent) {
    SCOPED_TRACE(facts.name);
    const ModelSpec model = load_model(facts.name).with_kv(DType::bf16, DType::bf16, KvFormat::strided, 64);
    ASSERT_EQ(int(model.layers.size()), facts.layers);
    EXPECT_EQ(model.hidden_size, facts.hidden);
    for (const ModelLayer& layer : model.layers) {
      const MlaSpec& spec = std::get<MlaSpec>(layer.spec);
      EXPECT_EQ(spec.num_heads, facts.heads);
      EXPECT_EQ(spec.kv_lora_rank, 512);
      EXPECT_EQ(spec.qk_nope_dim, facts.nope);
      EXPECT_EQ(spec.qk_rope_dim, facts.rope);
      EXPECT_EQ(spec.v_dim, facts.v);
      EXPECT_NEAR(spec.logit_scale(), facts.scale, 1e-6);
      EXPECT_EQ(spec.kv_format, KvFormat::latent) << "whatever the deployment has for other layers";
      EXPECT_EQ(spec.block_size, 64);
      EXPECT_TRUE(spec.mask == Mask{});
    }
    ASSERT_EQ(model.cache_groups.size(), 1u);
    EXPECT_EQ(model.cache_groups[0].name, "full");
    EXPECT_EQ(model.cache_groups[0].bytes_per_token, facts.full_bytes);
  }
}

TEST(Presets, EveryOneIsCheckedOrRefusedByName) {
  // Below: their layers differ in shape, or in family.
  std::set<std::string_view> checked{"gemma-4-class-default"};
  for (const HybridFacts& facts : kHybrids) checked.insert(facts.name);
  for (const RecurrentFacts& facts : kRecurrentFacts) checked.insert(facts.name);
  for (const LatentFacts& facts : kLatent) checked.insert(facts.name);
  for (const Facts& facts : kFacts) checked.insert(facts.name);
  size_t later = 0;
  for (const ModelPreset& preset : model_presets()) {
    SCOPED_TRACE(preset.name);
    const std::string code = test::error_code([&] { load_model(preset.name); });
    if (checked.count(preset.name)) {
      EXPECT_EQ(code, "nothing thrown");
    } else {
      EXPECT_EQ(code, "model.family.later");
      ++later;
    }
  }
  EXPECT_EQ(checked.size() + later, model_presets().size());
  EXPECT_EQ(model_presets().size(), 77u);
  EXPECT_EQ(later, 1u);
}

TEST(Presets, AreSortedAndNamedOnce) {
  const auto presets = model_presets();
  for (size_t i = 1; i < presets.size(); ++i) EXPECT_LT(presets[i - 1].name, presets[i].name);
  std::set<std::string_view> ids;
  for (const ModelPreset& preset : presets) EXPECT_TRUE(ids.insert(preset.hf_id).second) << preset.hf_id;
}

TEST(Presets, Gemma4HasTwoShapesOfLayers) {
  const ModelSpec model = load_model("gemma-4-class-default");
  ASSERT_EQ(model.layers.size(), 30u);
  ASSERT_EQ(model.cache_groups.size(), 2u);
  EXPECT_EQ(model.cache_groups[0].name, "window 512");
  EXPECT_EQ(model.cache_groups[0].layers.size(), 25u);
  EXPECT_EQ(model.cache_groups[1].name, "full");
  EXPECT_EQ(model.cache_groups[1].layers, (std::vector<int>{5, 11, 17, 23, 29}));
  EXPECT_EQ(model.layers[0].attention().head_dim_qk, 256);
  EXPECT_EQ(model.layers[5].attention().head_dim_qk, 512);
  EXPECT_EQ(model.layers[5].attention().scale(), 1.f);
  EXPECT_EQ(model.cache_groups[1].bytes_per_token, 5 * 4 * (512 + 512) * 2);
}

}  // namespace
}  // namespace imbrex
