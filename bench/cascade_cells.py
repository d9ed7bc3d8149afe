"""Steps of requests behind one prompt, as scripts/gpu_cascade.py names and times them."""
from __future__ import annotations

import re
from dataclasses import dataclass

PAGE, HEAD_DIM = 16, 128


@dataclass(frozen=True)
class Cell:
    """`requests` of `query` tokens each, whose first `common` keys are the same pages; `own` keys follow, the query tokens' among them."""

    q_heads: int
    kv_heads: int
    requests: int
    common: int
    own: int
    query: int = 1

    @staticmethod
    def parse(text: str) -> Cell:
        found = re.fullmatch(r"(\d+)/(\d+):(\d+)x(\d+)\+(\d+)(?:q(\d+))?", text)
        if found is None:
            raise ValueError(f'expected a cell such as "32/8:64x8192+100q5", got "{text}"')
        cell = Cell(*(int(number or 1) for number in found.groups()))
        if not cell.kv_heads or not cell.q_heads or cell.q_heads % cell.kv_heads:
            raise ValueError(f"expected a multiple of the kv heads for q heads, got {cell.q_heads} and {cell.kv_heads}")
        if not cell.requests or not cell.common or cell.common % PAGE:
            raise ValueError(f"expected requests behind a prompt of whole pages of {PAGE}, got {cell.requests} behind {cell.common} keys")
        if not 0 < cell.query <= cell.own:
            raise ValueError(f"expected query tokens that are among the {cell.own} own keys, got {cell.query}")
        return cell

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}:{self.requests}x{self.common}+{self.own}" + (f"q{self.query}" if self.query > 1 else "")

    @property
    def length(self) -> int:
        """Keys of a request."""
        return self.common + self.own

    @property
    def tokens(self) -> int:
        return self.requests * self.query
