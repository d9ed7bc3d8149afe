from sglang.srt.layers.attention.linear.utils import backend_with


def causal_conv1d_fn(x, weight, bias, **options):
    return "SGLang's prompts"


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, **options):
    return "SGLang's tokens"


def can_use_fused_qkvzba_causal_conv1d_update_contiguous(*args, **options):
    return True, "it can"


GDNAttnBackend = backend_with(globals(), copies=True)
