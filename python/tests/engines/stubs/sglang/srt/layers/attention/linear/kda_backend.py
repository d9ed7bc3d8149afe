from sglang.srt.layers.attention.linear.utils import backend_with


def causal_conv1d_fn(x, weight, bias, **options):
    return "SGLang's prompts"


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, **options):
    return "SGLang's tokens"


KDAAttnBackend = backend_with(globals())
