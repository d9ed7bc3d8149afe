from enum import Enum

from torch import nn


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(nn.Module):
    def __init__(
        self,
        num_heads,
        head_dim,
        scaling,
        num_kv_heads,
        layer_id,
        logit_cap=0.0,
        v_head_dim=-1,
        sliding_window_size=-1,
        is_cross_attention=False,
        pos_encoding_mode="NONE",
        logit_capping_method="tanh",
        attn_type=AttentionType.DECODER,
        use_irope=False,
    ):
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = v_head_dim if v_head_dim != -1 else head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.use_irope, self.attn_type = is_cross_attention, use_irope, attn_type
        self.pos_encoding_mode, self.logit_capping_method, self.xai_temperature_len = pos_encoding_mode, logit_capping_method, -1
        self.k_scale = self.v_scale = self.k_scale_float = self.v_scale_float = None

    def forward(self, q, k, v, forward_batch, attn_backend, save_kv_cache=True, **kwargs):
        if k is not None:
            assert v is not None
            k, v = k.view(-1, self.tp_k_head_num, self.qk_head_dim), v.view(-1, self.tp_v_head_num, self.v_head_dim)
        return attn_backend.forward(q, k, v, self, forward_batch, save_kv_cache, **kwargs)
