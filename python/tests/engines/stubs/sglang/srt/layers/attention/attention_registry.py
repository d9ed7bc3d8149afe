ATTENTION_BACKENDS = {}


def register_attention_backend(name):
    def decorator(fn):
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator


def attn_backend_wrapper(runner, full_attn_backend):
    """The backend of a hybrid model's linear attention, with kernels as the arguments have them."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
    from sglang.srt.layers.attention.linear.utils import LinearAttnBackends, LinearAttnKernelBackend
    from sglang.srt.runtime_context import get_exec

    mamba = get_exec().mamba
    asked = [
        LinearAttnKernelBackend(name or mamba.linear_attn_backend) for name in (mamba.linear_attn_decode_backend, mamba.linear_attn_prefill_backend)
    ]
    runner.linear_attn_backends = LinearAttnBackends(*asked, verify=LinearAttnKernelBackend(mamba.linear_attn_verify_backend or "triton"))
    if runner.kind == "mamba2":
        return hybrid_linear_attn_backend.Mamba2AttnBackend(runner)
    return (gdn_backend.GDNAttnBackend if runner.kind == "gdn" else kda_backend.KDAAttnBackend)(runner)
