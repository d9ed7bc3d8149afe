from sglang.srt.layers.attention.linear.utils import Dispatcher


class GDNAttnBackend:
    def __init__(self, model_runner):
        self.kernel_dispatcher = Dispatcher(model_runner.linear_attn_backends)
