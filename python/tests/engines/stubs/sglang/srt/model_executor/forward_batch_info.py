from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, List, Optional

import torch


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_extend(self, include_draft_extend_v2=False):
        extends = (self.EXTEND, self.MIXED, self.TARGET_VERIFY, self.SPLIT_PREFILL, self.DLLM_EXTEND)
        return self in extends or (include_draft_extend_v2 and self == self.DRAFT_EXTEND_V2)

    def is_decode(self):
        return self == self.DECODE

    def is_mixed(self):
        return self == self.MIXED

    def is_idle(self):
        return self == self.IDLE

    def is_decode_or_idle(self):
        return self in (self.DECODE, self.IDLE)

    def is_target_verify(self):
        return self == self.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return self == self.DRAFT_EXTEND_V2

    def is_dllm_extend(self):
        return self == self.DLLM_EXTEND


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: Any
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_sum: Optional[int]
    out_cache_loc_is_physical: bool = False
    encoder_lens: Optional[torch.Tensor] = None
    encoder_out_cache_loc: Optional[torch.Tensor] = None
    encoder_lens_cpu: Optional[List[int]] = None
    seq_lens_cpu: Optional[torch.Tensor] = None
    spec_info: Any = None
    positions: Optional[torch.Tensor] = None
    extend_num_tokens: Optional[int] = None
    extend_seq_lens: Optional[torch.Tensor] = None
    extend_prefix_lens: Optional[torch.Tensor] = None
    extend_start_loc: Optional[torch.Tensor] = None
    extend_prefix_lens_cpu: Optional[List[int]] = None
    extend_seq_lens_cpu: Optional[List[int]] = None
    max_seq_len_host: Optional[int] = None
    mha_return_lse: bool = False
    multi_item_delimiter_indices: Optional[List[torch.Tensor]] = None
    _attn_output: Optional[torch.Tensor] = None
