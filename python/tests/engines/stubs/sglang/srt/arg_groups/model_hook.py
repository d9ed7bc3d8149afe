def attention_backends_of(config):
    return config.prefill_attention_backend or config.attention_backend, config.decode_attention_backend or config.attention_backend


def resolved_view(server_args):
    return server_args


def model_config_of(server_args):
    return server_args.model_config


def handle_model_specific_adjustments(server_args):
    (architecture,) = model_config_of(server_args).hf_config.architectures
    supported = {
        "GptOssForCausalLM": ["triton", "trtllm_mha", "fa3", "fa4", "ascend", "intel_amx", "intel_xpu", "aiter"],
        "Gemma4ForCausalLM": ["trtllm_mha", "triton", "fa4", "ascend", "intel_xpu", "intel_amx", "aiter"],
    }
    if architecture in supported:
        prefill, decode = attention_backends_of(server_args)
        assert prefill in supported[architecture] and decode in supported[architecture], f"{architecture} requires one of {supported[architecture]}"
    if architecture in ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"):
        backend = resolved_view(server_args).attention_backend
        assert backend in {"fa3", "aiter", "triton"}, f"fa3, aiter, triton is required for Llama4 model but got {backend}"
        assert resolved_view(server_args).decode_attention_backend is None
