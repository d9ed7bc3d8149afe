"""The models of transformers_zoo.py: a class, what its config differs in, what goes in, and whether imbrex has to refuse it."""
from typing import Any, Dict, NamedTuple, Tuple


class Variant(NamedTuple):
    group: str
    name: str
    model: str
    options: Dict[str, Any]
    kind: str = "decoder"  # decoder, encoder, seq2seq: token ids; tensors: those of `shapes`
    shapes: Dict[str, Tuple[int, ...]] = {}
    generates: bool = False
    static: bool = False  # takes a static cache
    refused: bool = False

    def config(self):
        return dict(self.options)


TOKENS = dict(vocab_size=128, bos_token_id=None, eos_token_id=None, pad_token_id=0)
WIDTH = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=256)
DECODER = dict(TOKENS, **WIDTH, num_key_value_heads=2)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
LATENT = dict(
    num_key_value_heads=4, moe_intermediate_size=32, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=32,
    kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=24, first_k_dense_replace=1,
)  # fmt: skip
GPT = dict(TOKENS, n_embd=64, n_layer=3, n_head=4, n_positions=256)
SPEECH = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 8),
    num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
)  # fmt: skip
IMAGE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8)
PIXELS = dict(pixel_values=(2, 3, 32, 32))
SEQ2SEQ = dict(
    vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
    decoder_ffn_dim=96, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2,
    forced_eos_token_id=None,
)  # fmt: skip
T5 = dict(
    vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=3, num_decoder_layers=3, num_heads=4, decoder_start_token_id=0, pad_token_id=0,
    eos_token_id=None,
)  # fmt: skip


def _decoders():
    plain = (
        "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi", "Phi3", "Starcoder2", "StableLm", "Olmo", "Olmo2", "Granite", "Cohere", "SmolLM3",
        "Glm", "Glm4", "GPTNeoX", "Nemotron", "Persimmon", "Helium", "Arcee", "Ernie4_5", "SeedOss", "Apertus", "BitNet", "HunYuanDenseV1",
        "Exaone4", "Ministral", "Cwm", "Olmo3",
    )  # fmt: skip
    for name in plain:
        options = dict(DECODER)
        if name == "Cwm":
            options.update(bos_token_id=1, eos_token_id=[2])
        if name in ("Gemma", "Glm", "Glm4", "Qwen3", "Helium", "SeedOss", "HunYuanDenseV1", "Ministral", "Cwm"):
            options.update(head_dim=16)
        yield "decoders", name.lower(), name + "ForCausalLM", options
    for name, heads in (("mha", 4), ("mqa", 1)):
        yield "decoders", f"llama-{name}", "LlamaForCausalLM", dict(DECODER, num_key_value_heads=heads)
    yield "decoders", "llama-head128", "LlamaForCausalLM", dict(DECODER, head_dim=128)
    yield "decoders", "llama-head24", "LlamaForCausalLM", dict(DECODER, head_dim=24)
    yield "decoders", "qwen3-mqa", "Qwen3ForCausalLM", dict(DECODER, head_dim=32, num_key_value_heads=1)
    yield "decoders", "gpt2", "GPT2LMHeadModel", GPT
    yield "decoders", "gpt2-scaled-by-layer", "GPT2LMHeadModel", dict(GPT, scale_attn_by_inverse_layer_idx=True)
    yield "decoders", "gpt_bigcode-mqa", "GPTBigCodeForCausalLM", dict(GPT, multi_query=True)
    yield "decoders", "gpt_bigcode-mha", "GPTBigCodeForCausalLM", dict(GPT, multi_query=False)
    yield "decoders", "opt", "OPTForCausalLM", dict(DECODER, ffn_dim=96, word_embed_proj_dim=64)
    yield "decoders", "biogpt", "BioGptForCausalLM", DECODER
    yield "decoders", "bert-decoder", "BertLMHeadModel", dict(DECODER, is_decoder=True)


def _windows():
    for window in (2, 6, 64):
        yield "windows, sinks, soft caps", f"mistral-window{window}", "MistralForCausalLM", dict(DECODER, sliding_window=window)
    yield "windows, sinks, soft caps", "qwen2-window", "Qwen2ForCausalLM", dict(
        DECODER, use_sliding_window=True, sliding_window=5, max_window_layers=1
    )
    yield "windows, sinks, soft caps", "starcoder2-window", "Starcoder2ForCausalLM", dict(DECODER, sliding_window=7)
    yield "windows, sinks, soft caps", "phi3-window", "Phi3ForCausalLM", dict(DECODER, sliding_window=7)
    for cap in (2.0, 50.0):
        options = dict(DECODER, head_dim=32, sliding_window=6, query_pre_attn_scalar=16, attn_logit_softcapping=cap)
        yield "windows, sinks, soft caps", f"gemma2-cap{cap:.0f}", "Gemma2ForCausalLM", options
    yield "windows, sinks, soft caps", "gemma2-no-cap", "Gemma2ForCausalLM", dict(DECODER, head_dim=32, sliding_window=6, attn_logit_softcapping=None)
    yield "windows, sinks, soft caps", "gemma3", "Gemma3ForCausalLM", dict(DECODER, head_dim=32, sliding_window=6, layer_types=LAYERS)
    yield "windows, sinks, soft caps", "cohere2", "Cohere2ForCausalLM", dict(DECODER, sliding_window=6, layer_types=LAYERS)
    yield "windows, sinks, soft caps", "olmo3-window", "Olmo3ForCausalLM", dict(DECODER, sliding_window=6, layer_types=LAYERS)
    yield "windows, sinks, soft caps", "exaone4-window", "Exaone4ForCausalLM", dict(DECODER, sliding_window=6, layer_types=LAYERS)
    yield "windows, sinks, soft caps", "vaultgemma", "VaultGemmaForCausalLM", dict(DECODER, head_dim=16, sliding_window=6, layer_types=LAYERS)
    for window in (2, 6):
        options = dict(DECODER, **EXPERTS, head_dim=32, sliding_window=window, layer_types=LAYERS)
        yield "windows, sinks, soft caps", f"gpt_oss-window{window}", "GptOssForCausalLM", options


def _experts():
    for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GraniteMoe", "Olmoe", "Ernie4_5_Moe", "FlexOlmo"):
        yield "experts, other dimensions of values, state space beside attention", name.lower(), name + "ForCausalLM", dict(DECODER, **EXPERTS)
    for name in ("DeepseekV2", "DeepseekV3"):
        options = dict(DECODER, **LATENT)
        options.update({} if name == "DeepseekV3" else dict(topk_method="group_limited_greedy"))
        yield "experts, other dimensions of values, state space beside attention", name.lower(), name + "ForCausalLM", options
    options = dict(DECODER, **LATENT, n_shared_experts=1, head_dim=16)
    for name in ("Glm4Moe", "Dots1"):
        yield "experts, other dimensions of values, state space beside attention", name.lower(), name + "ForCausalLM", dict(
            options, num_key_value_heads=2
        )
    chunks = dict(head_dim=16, attention_chunk_size=8, num_local_experts=4, intermediate_size_mlp=96)
    yield "experts, other dimensions of values, state space beside attention", "llama4", "Llama4ForCausalLM", dict(DECODER, **chunks)


def _encoders():
    for name in ("Bert", "Roberta", "XLMRoberta", "Electra", "Camembert", "Ernie", "RobertaPreLayerNorm", "Data2VecText"):
        yield "encoders", name.lower(), name + "ForMaskedLM", dict(DECODER, is_decoder=False)
    yield "encoders", "albert", "AlbertForMaskedLM", dict(DECODER, embedding_size=32)
    yield "encoders", "distilbert", "DistilBertForMaskedLM", dict(vocab_size=128, dim=64, hidden_dim=96, n_layers=2, n_heads=4, pad_token_id=0)
    yield "encoders", "esm", "EsmForMaskedLM", dict(DECODER, position_embedding_type="rotary", mask_token_id=3)
    yield "encoders", "eurobert", "EuroBertForMaskedLM", DECODER
    for window in (8, 64):
        options = dict(DECODER, local_attention=window, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2)
        yield "encoders", f"modernbert-window{window}", "ModernBertForMaskedLM", options
    yield "encoders", "clip-text", "CLIPTextModel", dict(DECODER, eos_token_id=2)
    yield "encoders", "siglip-text", "SiglipTextModel", dict(DECODER, projection_size=64)


def _seq2seq():
    for name in ("Bart", "MBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "M2M100", "PLBart"):
        yield "encoder and decoder", name.lower(), name + "ForConditionalGeneration", SEQ2SEQ
    yield "encoder and decoder", "marian", "MarianMTModel", SEQ2SEQ
    for name, buckets, distance in (("T5", 32, 128), ("T5", 8, 20), ("MT5", 32, 128), ("UMT5", 32, 128), ("UMT5", 8, 16)):
        options = dict(T5, relative_attention_num_buckets=buckets, relative_attention_max_distance=distance)
        yield "T5's bias", f"{name.lower()}-{buckets}-buckets", name + "ForConditionalGeneration", options
    yield "T5's bias", "t5-gated", "T5ForConditionalGeneration", dict(T5, feed_forward_proj="gated-gelu")
    experts = dict(num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
    yield "T5's bias", "switch_transformers", "SwitchTransformersForConditionalGeneration", dict(T5, **experts)


def _tensors():
    for name in ("ViT", "DeiT", "IJepa", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "ViTMSN"):
        yield "vision", name.lower(), name + "Model", IMAGE, PIXELS
    yield "vision", "clip-vision", "CLIPVisionModel", IMAGE, PIXELS
    yield "vision", "siglip-vision", "SiglipVisionModel", IMAGE, PIXELS
    yield "vision", "yolos", "YolosModel", dict(IMAGE, image_size=[32, 32], num_detection_tokens=4), PIXELS
    yield "vision", "videomae", "VideoMAEModel", dict(IMAGE, num_frames=4), dict(pixel_values=(2, 4, 3, 32, 32))
    yield "vision", "vivit", "VivitModel", dict(IMAGE, num_frames=4, tubelet_size=[2, 8, 8]), dict(pixel_values=(2, 4, 3, 32, 32))
    for name in ("Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat", "Data2VecAudio"):
        yield "audio", name.lower(), name + "Model", SPEECH, dict(input_values=(2, 1600))
    sound = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_length=32, num_mel_bins=32)
    yield "audio", "ast", "ASTModel", sound, dict(input_values=(2, 32, 32))


def _refused():
    small = dict(DECODER)
    yield "bloom", "BloomForCausalLM", dict(vocab_size=128, hidden_size=64, n_layer=2, n_head=4), "decoder"
    yield "mpt", "MptForCausalLM", dict(vocab_size=128, d_model=64, n_layers=2, n_heads=4, max_seq_len=64), "decoder"
    yield "codegen", "CodeGenForCausalLM", dict(GPT, rotary_dim=8), "decoder"
    yield "gptj", "GPTJForCausalLM", dict(GPT, rotary_dim=8), "decoder"
    yield "gpt_neo", "GPTNeoForCausalLM", dict(
        vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ), "decoder"
    yield "falcon", "FalconForCausalLM", dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4), "decoder"
    yield "xglm", "XGLMForCausalLM", dict(vocab_size=128, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4), "decoder"
    yield "git", "GitForCausalLM", dict(small, vision_config=dict(IMAGE)), "decoder"
    for name in ("MPNet", "Deberta", "DebertaV2", "ConvBert", "RemBert", "MegatronBert"):
        yield name.lower(), name + "ForMaskedLM", small, "encoder"
    yield "longt5", "LongT5ForConditionalGeneration", T5, "seq2seq"
    yield "wavlm", "WavLMModel", SPEECH, dict(input_values=(2, 1600))
    yield "beit", "BeitModel", dict(IMAGE, use_relative_position_bias=True), PIXELS
    yield "swin", "SwinModel", dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4), PIXELS


VARIANTS = []
for _make in (_decoders, _windows, _experts):
    VARIANTS += [Variant(*fields, generates=True, static="gpt_bigcode" not in fields[1]) for fields in _make()]
VARIANTS += [Variant(*fields, kind="encoder") for fields in _encoders()]
VARIANTS += [Variant(*fields, kind="seq2seq", generates=True, static=True) for fields in _seq2seq()]
VARIANTS += [Variant(*fields[:4], kind="tensors", shapes=fields[4]) for fields in _tensors()]
VARIANTS += [
    Variant("refused", name, model, options, *(("tensors", goes_in) if isinstance(goes_in, dict) else (goes_in,)), refused=True)
    for name, model, options, goes_in in _refused()
]
