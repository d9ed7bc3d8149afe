// Decoders that imbrex runs, as trimmed config.json files: the fields that attention depends on.
// Marks: V read in a copy of the published file or in the vendor's code, T read in a trimmed copy, D class default of transformers,
// M from memory of the published file.
#include "model/presets.h"

namespace imbrex {

namespace {

constexpr ModelPreset kDecoders[] = {
    {"bloom", "bigscience/bloom",  // M
     R"({"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112, "torch_dtype": "bfloat16"})"},
    {"bloom-7b1", "bigscience/bloom-7b1",  // M
     R"({"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32, "torch_dtype": "float16"})"},
    {"falcon-40b", "tiiuae/falcon-40b",  // V
     R"({"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
         "new_decoder_architecture": true, "alibi": false, "torch_dtype": "bfloat16"})"},
    {"falcon-7b", "tiiuae/falcon-7b",  // V
     R"({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": 71,
         "multi_query": true, "new_decoder_architecture": false, "alibi": false, "torch_dtype": "bfloat16"})"},
    {"falcon-rw-1b", "tiiuae/falcon-rw-1b",  // M
     R"({"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "multi_query": false,
         "new_decoder_architecture": false, "alibi": true, "torch_dtype": "bfloat16"})"},
    {"gemma-2-27b", "google/gemma-2-27b",  // V
     R"({"model_type": "gemma2", "hidden_size": 4608, "num_hidden_layers": 46, "num_attention_heads": 32,
         "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window": 4096,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192,
         "torch_dtype": "bfloat16"})"},
    {"gemma-2-2b", "google/gemma-2-2b",  // V
     R"({"model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192,
         "torch_dtype": "bfloat16"})"},
    {"gemma-2-9b", "google/gemma-2-9b",  // V
     R"({"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192,
         "torch_dtype": "bfloat16"})"},
    {"gemma-2b", "google/gemma-2b",  // V
     R"({"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8,
         "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"})"},
    {"gemma-3-12b", "google/gemma-3-12b-pt",  // V
     R"({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {"model_type": "gemma3_text", "hidden_size": 3840,
         "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "sliding_window": 1024}})"},
    {"gemma-3-1b", "google/gemma-3-1b-pt",  // V
     R"({"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
         "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
         "sliding_window_pattern": 6, "attn_logit_softcapping": null, "max_position_embeddings": 32768,
         "torch_dtype": "bfloat16"})"},
    {"gemma-3-27b", "google/gemma-3-27b-pt",  // V; scale 168^-0.5 in the published file, 128^-0.5 in gemma.cpp
     R"({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {"model_type": "gemma3_text", "hidden_size": 5376,
         "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
         "query_pre_attn_scalar": 168, "sliding_window": 1024}})"},
    {"gemma-3-4b", "google/gemma-3-4b-pt",  // V; the published file leaves its heads to the class defaults
     R"({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
         "num_hidden_layers": 34, "sliding_window": 1024}})"},
    {"gemma-4-class-default",
     "google/gemma-4-e2b-it",  // D; class defaults of transformers, not the checkpoint, whose last layers share caches
     R"({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "num_kv_shared_layers": 0}})"},
    {"glm-4.5", "zai-org/GLM-4.5",  // V
     R"({"model_type": "glm4_moe", "hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96,
         "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
         "torch_dtype": "bfloat16"})"},
    {"glm-4.5-air", "zai-org/GLM-4.5-Air",  // M
     R"({"model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
         "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
         "torch_dtype": "bfloat16"})"},
    {"gpt-j-6b", "EleutherAI/gpt-j-6b",  // V
     R"({"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64, "torch_dtype": "float32"})"},
    {"gpt-oss-120b", "openai/gpt-oss-120b",  // V
     R"({"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072,
         "torch_dtype": "bfloat16"})"},
    {"gpt-oss-20b", "openai/gpt-oss-20b",  // V
     R"({"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072,
         "torch_dtype": "bfloat16"})"},
    {"lfm2-1.2b", "LiquidAI/LFM2-1.2B",  // V
     R"({"model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048,
         "max_position_embeddings": 128000, "torch_dtype": "bfloat16"})"},
    {"lfm2-2.6b", "LiquidAI/LFM2-2.6B",  // V
     R"({"model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 30, "num_attention_heads": 32,
         "num_key_value_heads": 8, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "max_position_embeddings": 128000,
         "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv",
         "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention",
         "conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"],
         "torch_dtype": "bfloat16"})"},
    {"lfm2-350m", "LiquidAI/LFM2-350M",  // V
     R"({"model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
         "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": false, "conv_dim": 1024,
         "max_position_embeddings": 128000, "torch_dtype": "bfloat16"})"},
    {"lfm2-700m", "LiquidAI/LFM2-700M",  // V
     R"({"model_type": "lfm2", "hidden_size": 1536, "num_hidden_layers": 16, "num_attention_heads": 24,
         "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": false, "conv_dim": 1536,
         "max_position_embeddings": 128000, "torch_dtype": "bfloat16"})"},
    {"lfm2-8b-a1b", "LiquidAI/LFM2-8B-A1B",  // V
     R"({"model_type": "lfm2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
         "num_key_value_heads": 8, "conv_L_cache": 3, "conv_bias": false, "max_position_embeddings": 128000,
         "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention",
         "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "full_attention",
         "conv", "conv"],
         "torch_dtype": "bfloat16"})"},
    {"llama-2-70b", "meta-llama/Llama-2-70b-hf",  // V
     R"({"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "torch_dtype": "float16"})"},
    {"llama-2-7b", "meta-llama/Llama-2-7b-hf",  // V
     R"({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "torch_dtype": "float16"})"},
    {"llama-3.1-405b", "meta-llama/Llama-3.1-405B",  // M
     R"({"model_type": "llama", "hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128,
         "num_key_value_heads": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"llama-3.1-8b", "meta-llama/Llama-3.1-8B",  // V
     R"({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"llama-3.2-1b", "meta-llama/Llama-3.2-1B",  // V
     R"({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"llama-3.2-3b", "meta-llama/Llama-3.2-3B",  // V
     R"({"model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
         "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct",  // V
     R"({"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E",  // V
     R"({"model_type": "llama4", "torch_dtype": "bfloat16", "text_config": {"model_type": "llama4_text", "hidden_size": 5120,
         "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
         "attention_chunk_size": 8192, "no_rope_layers": [], "attn_temperature_tuning": true, "floor_scale": 8192,
         "attn_scale": 0.1, "use_qk_norm": true}})"},
    {"minimax-m2", "MiniMaxAI/MiniMax-M2",  // V
     R"({"model_type": "minimax_m2", "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48,
         "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "max_position_embeddings": 196608,
         "torch_dtype": "bfloat16"})"},
    {"ministral-3-3b", "mistralai/Ministral-3-3B-Base-2512",  // V
     R"({"model_type": "mistral3", "torch_dtype": "bfloat16", "text_config": {"model_type": "ministral3", "hidden_size": 3072,
         "num_hidden_layers": 26, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": null,
         "max_position_embeddings": 262144, "rope_parameters": {"llama_4_scaling_beta": 0.1}}})"},
    {"mistral-7b-v0.1", "mistralai/Mistral-7B-v0.1",  // V
     R"({"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"})"},
    {"mistral-nemo-12b", "mistralai/Mistral-Nemo-Base-2407",  // M
     R"({"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "sliding_window": null, "max_position_embeddings": 131072,
         "torch_dtype": "bfloat16"})"},
    {"mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1",  // V
     R"({"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "sliding_window": null, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"})"},
    {"mpt-7b", "mosaicml/mpt-7b",  // V
     R"({"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "max_seq_len": 2048, "torch_dtype": "bfloat16",
         "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_type": "multihead_attention", "prefix_lm": false,
         "softmax_scale": null}})"},
    {"phi-2", "microsoft/phi-2",  // V
     R"({"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": null, "max_position_embeddings": 2048, "torch_dtype": "float16"})"},
    {"phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct",  // V
     R"({"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "sliding_window": 262144, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"phi-4-mini", "microsoft/Phi-4-mini-instruct",  // V
     R"({"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24,
         "num_key_value_heads": 8, "sliding_window": 262144, "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"qwen2-0.5b", "Qwen/Qwen2-0.5B",  // V
     R"({"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
         "num_key_value_heads": 2, "sliding_window": 32768, "use_sliding_window": false, "max_window_layers": 24,
         "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"qwen2-7b", "Qwen/Qwen2-7B",  // V
     R"({"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
         "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": false, "max_window_layers": 28,
         "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"qwen2.5-72b", "Qwen/Qwen2.5-72B",  // M
     R"({"model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "sliding_window": 131072, "use_sliding_window": false, "max_window_layers": 80,
         "max_position_embeddings": 131072, "torch_dtype": "bfloat16"})"},
    {"qwen3-0.6b", "Qwen/Qwen3-0.6B",  // V
     R"({"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "sliding_window": null, "use_sliding_window": false,
         "max_window_layers": 28, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"})"},
    {"qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B",  // M
     R"({"model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
         "num_key_value_heads": 4, "head_dim": 128, "sliding_window": null, "use_sliding_window": false,
         "max_position_embeddings": 40960, "torch_dtype": "bfloat16"})"},
    {"qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B",  // M
     R"({"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "sliding_window": null, "use_sliding_window": false,
         "max_position_embeddings": 40960, "torch_dtype": "bfloat16"})"},
    {"qwen3-32b", "Qwen/Qwen3-32B",  // M
     R"({"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "sliding_window": null, "use_sliding_window": false,
         "max_window_layers": 64, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"})"},
    {"qwen3-8b", "Qwen/Qwen3-8B",  // M
     R"({"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "sliding_window": null, "use_sliding_window": false,
         "max_window_layers": 36, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"})"},
    {"starcoder2-7b", "bigcode/starcoder2-7b",  // V
     R"({"model_type": "starcoder2", "hidden_size": 4608, "num_hidden_layers": 32, "num_attention_heads": 36,
         "num_key_value_heads": 4, "sliding_window": 4096, "max_position_embeddings": 16384, "torch_dtype": "bfloat16"})"},
};

}  // namespace

std::span<const ModelPreset> decoder_presets() { return kDecoders; }

}  // namespace imbrex
