// Decoders with recurrent layers, as trimmed config.json files.
// Marks: V read in a copy of the published file or in the vendor's code, T read in a trimmed copy, M from memory of the published file.
#include "model/presets.h"

namespace imbrex {

namespace {

constexpr ModelPreset kRecurrentPresets[] = {
    {"falcon-mamba-7b", "tiiuae/falcon-mamba-7b",  // V; expand 16 means nothing
     R"({"model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64, "intermediate_size": 8192, "expand": 16,
         "state_size": 16, "conv_kernel": 4, "torch_dtype": "bfloat16"})"},
    {"granite-4-h-small", "ibm-granite/granite-4.0-h-small",  // T, the epsilon of a conversion's metadata, the scale M
     R"({"model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 8, "attention_multiplier": 0.0078125, "rms_norm_eps": 1e-5, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state":
         128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "layer_types": ["mamba", "mamba", "mamba", "mamba",
         "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention",
         "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba",
         "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba"],
         "torch_dtype": "bfloat16"})"},
    {"jamba-v0.1", "ai21labs/Jamba-v0.1",  // V
     R"({"model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads":
         8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
         "torch_dtype": "bfloat16"})"},
    {"kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct",  // V; the lists count from 1; head_dim means nothing
     R"({"model_type": "kimi_linear", "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32,
         "num_key_value_heads": 32, "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "v_head_dim": 128, "head_dim": 72, "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size":
         4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19,
         21, 22, 23, 25, 26]}, "torch_dtype": "bfloat16"})"},
    {"minimax-01", "MiniMaxAI/MiniMax-Text-01",  // as M1
     R"({"model_type": "minimax_text_01", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16", "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0,
         0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0,
         0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]})"},
    {"minimax-m1", "MiniMaxAI/MiniMax-M1-80k",  // V
     R"({"model_type": "minimax_m1", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16", "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0,
         0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0,
         0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]})"},
    {"nemotron-3-nano-30b-a3b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",  // V
     R"({"model_type": "nemotron_h", "hidden_size": 2688, "num_hidden_layers": 52, "num_attention_heads": 32,
         "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
         "n_groups": 8, "conv_kernel": 4, "expand": 2, "time_step_min": 0.001, "time_step_limit": [0.0, Infinity],
         "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "torch_dtype": "bfloat16"})"},
    {"nemotron-h-8b", "nvidia/Nemotron-H-8B-Base-8K",  // V
     R"({"model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
         "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001, "hybrid_override_pattern":
         "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "torch_dtype": "bfloat16"})"},
    {"qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct",  // V
     R"({"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
         "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
         "torch_dtype": "bfloat16"})"},
    {"qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B",  // V
     R"({"model_type": "qwen3_5_moe", "torch_dtype": "bfloat16", "text_config": {"model_type": "qwen3_5_moe_text",
         "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256,
         "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 64}})"},
    {"ring-mini-linear-2.0", "inclusionAI/Ring-mini-linear-2.0",  // V
     R"({"model_type": "bailing_moe_linear", "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
         "num_key_value_heads": 4, "head_dim": 128, "layer_group_size": 5, "group_norm_size": 4, "rms_norm_eps": 1e-6,
         "torch_dtype": "bfloat16"})"},
    {"zamba2-7b", "Zyphra/Zamba2-7B",  // V, that of its layers T
     R"({"model_type": "zamba2", "hidden_size": 3584, "num_hidden_layers": 81, "num_attention_heads": 32,
         "num_key_value_heads": 32, "attention_head_dim": 224, "n_mamba_heads": 112, "mamba_d_state": 64, "mamba_ngroups": 2,
         "mamba_d_conv": 4, "mamba_expand": 2, "time_step_min": 0.001, "hybrid_layer_ids": [6, 11, 17, 23, 29, 35, 41, 47, 53,
         59, 65, 71, 77], "torch_dtype": "bfloat16"})"},
};

}  // namespace

std::span<const ModelPreset> recurrent_presets() { return kRecurrentPresets; }

}  // namespace imbrex
