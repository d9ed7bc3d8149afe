from enum import IntEnum
from typing import NamedTuple

import torch


class TreeMaskMode(IntEnum):
    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class VerifyMask(NamedTuple):
    buffer: torch.Tensor
    mode: TreeMaskMode
    max_bs: int
    is_read: bool = True

    def fits(self, bs):
        return bs <= self.max_bs
