// The replay of models with recurrent layers: states of every kind beside pages, same bits however it is batched, and mistakes noticed.
#include <gtest/gtest.h>

#include <cmath>

#include "conformance/recurrent/cases.h"
#include "expect_error.h"
#include "model/groups.h"
#include "serve/mistaken_states.h"
#include "serve/replay.h"
#include "serve/report.h"
#include "serve/tiny_model.h"
#include "serve/verify.h"

namespace imbrex::serve {
namespace {

// Layers by their names in recurrent_layer(), or "attention", or "short_conv".
ModelSpec tiny_recurrent_model(const std::vector<std::string>& names, const std::function<void(RecurrentSpec&)>& change = {}) {
  ModelSpec model = tiny_hybrid_model("", 16);
  model.name = model.family = "tiny recurrent";
  for (const std::string& name : names) {
    ModelLayer& layer = model.layers.emplace_back();
    layer.name = "decoder." + std::to_string(model.layers.size() - 1);
    layer.number = model.num_layers++;
    if (name == "attention" || name == "short_conv") {
      layer.spec = tiny_hybrid_model(name == "attention" ? "a" : "c", 16).layers[0].spec;
      continue;
    }
    RecurrentSpec spec = recurrent_layer(name);
    if (spec.head_dim_v > 1) spec.head_dim_k = 32, spec.head_dim_v = 24;  // small enough for every output to be checked
    if (change) change(spec);
    layer.spec = spec;
  }
  return model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
}

const RecurrentSpec& recurrent(const ModelSpec& model, int layer) { return std::get<RecurrentSpec>(model.layers[size_t(layer)].spec); }

TEST(RecurrentReplay, RunsATraceToItsEndAndChecksEveryOutput) {
  const Trace trace = tree_trace(12, 16, 60, 12, 1);
  const ModelSpec model =
      tiny_recurrent_model({"gdn", "kda", "attention", "kda_bounded", "lightning", "mamba2", "mamba1", "short_conv", "gdn"});
  ReplayOptions options = small_options();
  options.max_num_batched_tokens = 20;  // so that prompts are cut
  const ReplayResult r = replay(model, trace, options);
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.finished_requests, 12);
  EXPECT_LE(r.verify_max_ratio, 1);
  EXPECT_GT(r.verify_max_ratio, 0.01);
  ASSERT_EQ(r.kinds.size(), 8u);
  EXPECT_EQ(r.kinds[0].family, "recurrent");
  EXPECT_EQ(r.kinds[0].spec, recurrent(model, 0).str());
  EXPECT_EQ(r.kinds[0].layers, (std::vector<int>{0, 8}));
  EXPECT_EQ(r.kinds[0].kv_write_s, 0);
  EXPECT_GT(r.kinds[0].run_s, 0);
  EXPECT_GT(r.times.state_s, 0);
  const int64_t tokens = r.prefill_tokens + r.decode_tokens;
  EXPECT_GT(r.verified_outputs, tokens * 9);  // of value heads that have few numbers, several are one output
  EXPECT_EQ(r.state_layers.tokens, tokens);
  EXPECT_NE(report_text(r, {}).find("16 state slots"), std::string::npos);
}

// Layers whose states have the same shape and type share a group, whatever else they do.
TEST(RecurrentReplay, GroupsOfStates) {
  ModelSpec model = tiny_recurrent_model({"gdn", "gdn", "lightning", "attention"});
  RecurrentSpec& other = std::get<RecurrentSpec>(model.layers[1].spec);
  other.beta_scale = 2;
  group_layers(model);
  ASSERT_EQ(model.kinds().size(), 4u);
  EXPECT_EQ(model.layers[0].cache_group, model.layers[1].cache_group);
  const CacheGroup& group = model.cache_groups[size_t(model.layers[0].cache_group)];
  EXPECT_TRUE(group.holds_states());
  EXPECT_EQ(group.bytes_per_slot, 2 * recurrent(model, 0).state_bytes());
  other.num_drafts = 2;
  group_layers(model);
  EXPECT_NE(model.layers[0].cache_group, model.layers[1].cache_group);
  EXPECT_EQ(model.cache_groups[size_t(model.layers[1].cache_group)].bytes_per_slot, 3 * recurrent(model, 0).state_bytes());
  EXPECT_NE(model.cache_groups[0].name, model.cache_groups[1].name);
  EXPECT_NE(model.str().find("states"), std::string::npos) << model.str();
  const ModelSpec deployed = model.with_kv(DType::f16, DType::fp8_e4m3, KvFormat::strided, 16);
  EXPECT_EQ(recurrent(deployed, 0).dtype, DType::f16);
  EXPECT_EQ(recurrent(deployed, 0).state_dtype, DType::f32) << "the state keeps its type";
  EXPECT_EQ(recurrent(model.with_kv(DType::fp8_e4m3, DType::fp8_e4m3, KvFormat::strided, 16), 0).dtype, DType::bf16);
}

TEST(RecurrentReplay, SameBitsHoweverItIsBatched) {
  const Trace trace = tree_trace(14, 16, 90, 40, 2, 0.5);
  // Values of so few dimensions do not come in chunks.
  const ModelSpec model = tiny_recurrent_model({"gdn", "attention", "kda", "mamba2", "mamba1"}, [](RecurrentSpec& spec) {
    if (spec.head_dim_v > 1) spec.head_dim_v = 8;
  });
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  const ReplayResult first = replay(model, trace, options);
  const auto same = [&](auto change) { return expect_same_digests(model, trace, options, first, change); };
  same([](auto& o) { o.max_num_batched_tokens = 1; });
  same([](auto& o) { o.max_num_batched_tokens = 17; });
  same([](auto& o) { o.max_num_batched_tokens = 512; });
  same([](auto& o) { o.max_num_seqs = 1; });
  same([](auto& o) { o.num_threads = 3; });
  const ReplayResult storm = same([](auto& o) { o.num_blocks = 10, o.verify_fraction = 1; });
  EXPECT_GT(storm.preemptions, 0);
  options.seed = 2;
  EXPECT_NE(replay(model, trace, options).digest, first.digest);
}

// Layers whose prompts come in chunks have the same bits where prompts are cut at the same tokens: here nowhere.
TEST(RecurrentReplay, SameBitsWherePromptsAreWhole) {
  const Trace trace = tree_trace(14, 16, 90, 40, 2, 0.5);
  const ModelSpec model = tiny_recurrent_model({"gdn", "attention", "kda", "mamba2"});
  ReplayOptions options = small_options();
  options.verify_fraction = 0, options.max_num_batched_tokens = 4096;
  const ReplayResult first = replay(model, trace, options);
  const auto same = [&](auto change) { return expect_same_digests(model, trace, options, first, change); };
  same([](auto& o) { o.max_num_seqs = 1; });
  same([](auto& o) { o.max_num_batched_tokens = 8192; });
  same([](auto& o) { o.num_threads = 3; });
  // Requests that begin again have their own tokens in the prompt, so bits change; what is verified does not.
  options.num_blocks = 10, options.verify_fraction = 1;
  const ReplayResult storm = replay(model, trace, options);
  EXPECT_TRUE(storm.complete);
  EXPECT_GT(storm.preemptions, 0);
}

TEST(RecurrentReplay, VerificationNoticesWrongStates) {
  const auto backend = std::make_shared<MistakenStates<RecurrentFamily, RecurrentInputs, RecurrentOutputs>>();
  register_backend<RecurrentFamily>(backend);
  const Trace trace = tree_trace(12, 16, 60, 12, 1);
  ReplayOptions options = small_options();
  options.select.forced = "mistaken";
  const auto code = [&](const char* layer, StateMistake mistake) {
    backend->mistake = mistake;
    return test::error_code([&] { replay(tiny_recurrent_model({layer, "attention"}), trace, options); });
  };
  for (const char* layer : {"gdn", "kda", "lightning", "mamba2", "mamba1"}) {
    EXPECT_EQ(code(layer, StateMistake::none), "nothing thrown") << layer;
    EXPECT_EQ(code(layer, StateMistake::forgets), "replay.verify") << layer;
    EXPECT_EQ(code(layer, StateMistake::shares), "replay.verify") << layer;
    EXPECT_EQ(code(layer, StateMistake::stale), "replay.verify") << layer;
  }
  unregister_backend<RecurrentFamily>("mistaken");
}

// Prompts that make one token each: nobody reads their states again.
TEST(RecurrentReplay, VerificationNoticesWrongFinalStates) {
  const auto backend = std::make_shared<MistakenStates<RecurrentFamily, RecurrentInputs, RecurrentOutputs>>();
  register_backend<RecurrentFamily>(backend);
  const Trace trace = tree_trace(6, 16, 60, 1, 1);
  ReplayOptions options = small_options();
  options.max_num_batched_tokens = 512;  // a prompt is not cut, nor for a state of its prefix
  options.prefix_sharing = false;
  options.select.forced = "mistaken";
  for (const char* layer : {"gdn", "mamba2", "mamba1"}) {
    const ModelSpec model = tiny_recurrent_model({layer});
    backend->mistake = StateMistake::none;
    const ReplayResult r = replay(model, trace, options);
    EXPECT_EQ(r.verified_states, 6 * RecurrentTarget::heads_of(recurrent(model, 0))) << layer;
    EXPECT_NE(report_text(r, {}).find(" states recomputed"), std::string::npos);
    backend->mistake = StateMistake::spoils;
    try {
      replay(model, trace, options);
      ADD_FAILURE() << layer << ": nothing thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "replay.verify");
      EXPECT_NE(std::string(error.what()).find("number of the state"), std::string::npos) << error.what();
    }
  }
  unregister_backend<RecurrentFamily>("mistaken");
}

// Of few outputs, those behind which nothing follows.
TEST(RecurrentReplay, FinalStatesAreVerifiedAlone) {
  const Trace trace = tree_trace(9, 16, 60, 8, 1);
  const ModelSpec model = tiny_recurrent_model({"gdn", "attention"});
  ReplayOptions options = small_options();
  options.verify_fraction = 0, options.verify_last = 1;
  const ReplayResult r = replay(model, trace, options);
  const int heads = RecurrentTarget::heads_of(recurrent(model, 0));
  EXPECT_EQ(r.verified_states, 9 * heads);
  EXPECT_EQ(r.verified_outputs, 9 * (heads + std::get<AttentionSpec>(model.layers[1].spec).group_size()));
  options.verify_last = 2;
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "replay.verify_fraction");
}

// States of fewer bits are rounded behind each step, which the bound has room for.
TEST(RecurrentReplay, StatesOfFewerBits) {
  const auto half = [](RecurrentSpec& spec) { spec.state_dtype = DType::bf16; };
  const ModelSpec model = tiny_recurrent_model({"gdn", "mamba2"}, half);
  const ReplayResult r = replay(model, tree_trace(6, 16, 60, 12, 1), small_options());
  EXPECT_TRUE(r.complete);
  EXPECT_LE(r.verify_max_ratio, 1);
  EXPECT_EQ(r.kv_bytes, 2 * 6 * (recurrent(model, 0).state_bytes() + recurrent(model, 1).state_bytes()));
}

TEST(RecurrentReplay, UsefulWorkIsCounted) {
  Trace trace;
  trace.requests = {{.arrival_s = 0, .input_length = 10, .output_length = 3, .prefix_ids = {}}};
  const ModelSpec model = tiny_recurrent_model({"mamba2"});
  const RecurrentSpec& spec = recurrent(model, 0);
  const ReplayResult r = replay(model, trace, small_options());
  const double state = double(spec.num_v_heads) * spec.head_dim_k * spec.head_dim_v;
  EXPECT_DOUBLE_EQ(r.state_layers.flops, 12 * 5 * state);
  const double token = 2 * (2 * spec.num_k_heads * spec.head_dim_k + 2 * spec.num_v_heads * spec.head_dim_v + spec.num_v_heads);
  EXPECT_DOUBLE_EQ(r.state_layers.bytes, 12 * token + (1 + 2 + 2) * 4 * state);  // the first step reads none
}

TEST(RecurrentReplay, RefusesLayersWhoseStatesGrow) {
  const auto code = [](const char* layer, const std::function<void(RecurrentSpec&)>& change) {
    return test::error_code([&] { replay(tiny_recurrent_model({layer}, change), tree_trace(2, 16, 30, 4, 1), small_options()); });
  };
  EXPECT_EQ(code("gdn", [](RecurrentSpec& s) { s.qk_norm = false; }), "replay.recurrent.growth");
  EXPECT_EQ(code("gdn", [](RecurrentSpec& s) { s.sigmoid_beta = false; }), "replay.recurrent.growth");
  EXPECT_EQ(code("gdn", [](RecurrentSpec& s) { s.gate = RecurrentGate::log; }), "replay.recurrent.growth");
}

// Small models as their config.json says: convolutions in front of their recurrences, norms and gates behind them.
struct SmallConfig {
  const char* name;
  const char* text;
  int layers, recurrences;  // as the model counts them
  const char* front;        // how the report names the convolution
};
constexpr SmallConfig kSmallConfigs[] = {
    {"qwen3_next", R"({"model_type": "qwen3_next", "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 24})",
     4, 3, "conv_qkv"},
    {"kimi_linear", R"({"model_type": "kimi_linear", "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
         "v_head_dim": 16, "linear_attn_config": {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2],
         "full_attn_layers": [3]}})",
     3, 2, "conv_qkv"},
    {"nemotron_h", R"({"model_type": "nemotron_h", "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16,
         "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4, "hybrid_override_pattern": "ME*M-E"})",
     6, 2, "conv_vkq"},
    {"jamba", R"({"model_type": "jamba", "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 4,
         "mamba_expand": 2})",
     3, 2, " plain silu"},
    {"falcon_h1", R"({"model_type": "falcon_h1", "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64,
         "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2})",
     2, 2, "conv_vkq"}};

TEST(RecurrentReplay, ModelsHaveConvolutionsInFrontOfTheirRecurrences) {
  const Trace trace = tree_trace(10, 16, 60, 12, 1);
  ReplayOptions options = small_options();
  options.max_num_batched_tokens = 20;
  for (const SmallConfig& config : kSmallConfigs) {
    SCOPED_TRACE(config.name);
    const ModelSpec model = parse_model_config(config.text);
    const ReplayResult r = replay(model, trace, options);
    EXPECT_TRUE(r.complete);
    EXPECT_EQ(r.num_layers, config.layers);
    EXPECT_EQ(r.model_layers, config.layers);
    EXPECT_LE(r.verify_max_ratio, 1);
    ASSERT_EQ(r.groups.size(), config.name == std::string_view("jamba") ? 3u : 2u);
    int64_t states = 0, outputs = 0, conv_bytes = 0, recurrent_bytes = 0;  // of a request, and of a token
    for (const ModelLayer& layer : model.layers) {
      if (const auto* const conv = std::get_if<ShortConvSpec>(&layer.spec)) {
        conv_bytes += conv->state_bytes(), ++states, ++outputs;
      } else if (const auto* const spec = std::get_if<RecurrentSpec>(&layer.spec)) {
        recurrent_bytes += spec->state_bytes(), states += RecurrentTarget::heads_of(*spec), outputs += RecurrentTarget::heads_of(*spec);
        if (spec->conv != RecurrentConv::none) recurrent_bytes += spec->conv_state_rows() * spec->conv_channels() * 2;
      } else if (const auto* const spec = std::get_if<AttentionSpec>(&layer.spec)) {
        outputs += spec->group_size();
      } else {
        ++outputs;  // a head of latent attention
      }
    }
    int64_t steps_of_requests = 0;  // each leaves a state
    for (const ReplayPoint& point : r.series) steps_of_requests += std::llround(point.running * double(point.steps));
    EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * outputs);
    EXPECT_GT(r.verified_states, (r.prefill_tokens + r.decode_tokens) / 20 * states);
    EXPECT_LE(r.verified_states, steps_of_requests * states);
    for (const ReplayGroup& group : r.groups) {
      if (group.name == "short_conv") {
        EXPECT_EQ(group.bytes, group.num_slots * conv_bytes);
      }
      if (group.name == "recurrent") {
        EXPECT_EQ(group.bytes, group.num_slots * recurrent_bytes);
      }
      if (group.name == "short_conv" || group.name == "recurrent") {
        EXPECT_EQ(group.num_layers, config.recurrences);
        EXPECT_EQ(group.num_slots, 16);
      }
    }
    const std::string text = report_text(r, {});
    EXPECT_NE(text.find(config.front), std::string::npos) << text;
  }
}

// The first layers as the model counts them, with all that they have.
TEST(RecurrentReplay, TheFirstLayersOfAModel) {
  const Trace trace = tree_trace(3, 16, 30, 4, 1);
  const ModelSpec model = parse_model_config(kSmallConfigs[2].text);
  ReplayOptions options = small_options();
  options.num_layers = 3;
  const ReplayResult r = replay(model, trace, options);
  EXPECT_EQ(r.num_layers, 3);
  EXPECT_EQ(r.model_layers, 6);
  ASSERT_EQ(r.kinds.size(), 2u);
  EXPECT_EQ(r.kinds[0].layers, (std::vector<int>{0}));
  EXPECT_EQ(r.kinds[1].layers, (std::vector<int>{2}));
  options.num_layers = 0, options.layers_of_kind = 1;
  const ReplayResult first = replay(model, trace, options);
  EXPECT_EQ(first.num_layers, 2);
  ASSERT_EQ(first.kinds.size(), 2u);
  EXPECT_EQ(first.kinds[0].layers, (std::vector<int>{0}));
  EXPECT_EQ(first.kinds[1].layers, (std::vector<int>{2}));
  options.layers_of_kind = 9;
  EXPECT_EQ(replay(model, trace, options).num_layers, 3) << "those that have a cache or a state";
  options.layers_of_kind = -1;
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "replay.num_layers");
  options.num_layers = 7, options.layers_of_kind = 0;
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "replay.num_layers.model");
  ModelSpec late = model;
  std::erase_if(late.layers, [](const ModelLayer& layer) { return layer.number == 0; });
  options.num_layers = 2;
  EXPECT_EQ(test::error_code([&] { replay(late, trace, options); }), "replay.num_layers.model") << "none of the two has a cache";
}

}  // namespace
}  // namespace imbrex::serve
