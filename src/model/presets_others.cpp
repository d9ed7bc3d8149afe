// Encoders and decoders with latent attention, which imbrex runs, and a model of a family that it only knows by name, as trimmed
// config.json files.
// Marks: V read in a copy of the published file or in the vendor's code, T read in a trimmed copy, D class default of transformers,
// M from memory of the published file.
#include "model/presets.h"

namespace imbrex {

namespace {

constexpr ModelPreset kOthers[] = {
    {"bart-large", "facebook/bart-large",  // M
     R"({"model_type": "bart", "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
         "decoder_attention_heads": 16, "torch_dtype": "float32"})"},
    {"bert-base", "google-bert/bert-base-uncased",  // V
     R"({"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "torch_dtype": "float32"})"},
    {"bert-large", "google-bert/bert-large-uncased",  // M
     R"({"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "torch_dtype": "float32"})"},
    {"deepseek-v2", "deepseek-ai/DeepSeek-V2",  // T but for rope_scaling, M
     R"({"model_type": "deepseek_v2", "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128,
         "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
         "v_head_dim": 128, "torch_dtype": "bfloat16"})"},
    {"deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite",  // V
     R"({"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
         "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
         "v_head_dim": 128, "torch_dtype": "bfloat16"})"},
    {"deepseek-v3", "deepseek-ai/DeepSeek-V3",  // V
     R"({"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
         "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
         "v_head_dim": 128, "torch_dtype": "bfloat16"})"},
    {"deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2-Exp",  // V
     R"({"model_type": "deepseek_v32", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
         "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
         "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "torch_dtype": "bfloat16"})"},
    {"deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash",  // D; class defaults of transformers, not a checkpoint
     R"({"model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
         "num_key_value_heads": 1, "head_dim": 512, "sliding_window": 128, "torch_dtype": "bfloat16"})"},
    {"glm-4.7-flash", "zai-org/GLM-4.7-Flash",  // T; head_dim is the rotary part
     R"({"model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
         "num_key_value_heads": 20, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
         "v_head_dim": 256, "head_dim": 64, "torch_dtype": "bfloat16"})"},
    {"glm-5", "zai-org/GLM-5",  // T, index_topk D; head_dim is the rotary part
     R"({"model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64,
         "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
         "v_head_dim": 256, "head_dim": 64, "index_topk": 2048, "torch_dtype": "bfloat16"})"},
    {"kimi-k2", "moonshotai/Kimi-K2-Instruct",  // T
     R"({"model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
         "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "rope_scaling": {"type": "yarn", "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0},
         "v_head_dim": 128, "torch_dtype": "bfloat16"})"},
    {"longcat-flash", "meituan-longcat/LongCat-Flash-Chat",  // D, whose dimensions are the checkpoint's
     R"({"model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64, "q_lora_rank": 1536,
         "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_method": "MLA",
         "torch_dtype": "bfloat16"})"},
    {"t5-small", "google-t5/t5-small",  // M
     R"({"model_type": "t5", "d_model": 512, "d_kv": 64, "num_heads": 8, "num_layers": 6, "num_decoder_layers": 6,
         "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "torch_dtype": "float32"})"},
    {"whisper-large-v3", "openai/whisper-large-v3",  // M
     R"({"model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
         "decoder_attention_heads": 20, "max_source_positions": 1500, "max_target_positions": 448, "torch_dtype": "float16"})"},
    {"whisper-tiny", "openai/whisper-tiny",  // M
     R"({"model_type": "whisper", "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
         "decoder_attention_heads": 6, "max_source_positions": 1500, "max_target_positions": 448, "torch_dtype": "float32"})"},
};

}  // namespace

std::span<const ModelPreset> other_presets() { return kOthers; }

}  // namespace imbrex
