"""The cells of the GPU benchmark: what each computes, the peers that it is compared with, and the ratio that it has to reach. Needs no PyTorch."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

TABLE = Path(__file__).with_name("cells.json")
DOCUMENT = 1024  # keys
BYTES = {"bf16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True)
class Cell:
    group: str
    name: str
    protocol: str  # sustained, graph or replay: see protocols.py
    unit: str  # of what is shown beside the time: TFLOP/s, or TB/s of keys and values where the peers are in us
    head_dim: int
    heads: tuple[int, int]  # of queries, of keys
    batch: int
    query: int  # tokens of a request
    context: int  # keys of a request, its query tokens included; 0: they differ, see lengths
    page: int  # 0: ragged keys without pages
    kv: str
    causal: bool
    tokens: int  # keys of all requests
    q: str = "bf16"  # the output is bf16 whatever it is
    lengths: str | None = None  # which draw of lengths: see inputs.py
    rotate: bool = True  # other pages in each call, so that L2 does not hold them
    balanced: bool = False
    mixed: int = 0  # query tokens of the first request, where the others have `query`
    window: int = 0  # keys that a query sees, itself included; 0: all
    soft_cap: float = 0.0
    sinks: bool = False
    mask: str = ""  # a custom one, beside `causal`: documents (of 1024 keys each), or holes (a third of the keys, anywhere)
    sdpa: str | None = None  # PyTorch's kernels run beside ours and join these peers: peers, dense or none
    base: str | None = None  # the cell whose time is the yardstick
    floor: dict[str, float] | None = None  # {"peers": 0.97}: of the best peer; {"base": r}: of the base's; {"us": t}: at most
    peers: dict[str, float] = field(default_factory=dict)  # us, measured elsewhere
    dense: dict[str, float] = field(default_factory=dict)  # us, over keys without pages

    @property
    def query_lens(self) -> list[int]:
        return [self.mixed or self.query] + [self.query] * (self.batch - 1)

    @property
    def flops(self) -> float:
        """FLOPs for the keys that are seen, where all requests have `context` keys."""
        return sum(4.0 * self.heads[0] * self.head_dim * self.seen(queries) for queries in self.query_lens)

    def seen(self, queries: int) -> float:
        """Pairs of a request's queries and the keys that these see."""
        if self.mask == "documents":
            return sum(min(DOCUMENT, queries - begin) ** 2 / 2 for begin in range(0, queries, DOCUMENT))
        if not self.causal:
            return queries * self.context
        first = self.context - queries  # keys in front of the first query
        if not self.window:
            return queries * self.context - queries**2 / 2
        whole = max(min(queries, self.context - self.window), 0)  # of the queries, those that see a whole window
        return whole * self.window + sum(min(first + i + 1, self.window) for i in range(queries - whole))

    @property
    def read(self) -> int:
        """Keys of all requests that some query sees."""
        if not self.window or not self.context:
            return self.tokens
        return sum(min(self.context, self.window + queries - 1) for queries in self.query_lens)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.read * self.heads[1] * self.head_dim * BYTES[self.kv]

    @property
    def work(self) -> float:
        """FLOPs or bytes, whichever the rate counts."""
        return self.flops if self.unit == "TFLOP/s" else float(self.kv_bytes)

    def rate(self, us: float) -> float:
        """TFLOP/s or TB/s."""
        return self.work / us / 1e6

    def spec(self) -> dict:
        extras = {name: getattr(self, name) for name in ("window", "soft_cap", "sinks") if getattr(self, name)}
        if self.mask:
            extras["custom_mask"] = True
        return {
            **extras,
            "q_heads": self.heads[0],
            "kv_heads": self.heads[1],
            "head_dim": self.head_dim,
            "q": self.q,
            "kv": self.kv,
            "page": self.page,
            "causal": self.causal,
        }


def name_of(row: dict) -> str:
    page = f"p{row['page']}" if row["page"] else "dense"
    if row["group"].startswith("prefill"):
        mask = "causal" if row["causal"] else "full"
        return f"{row['group']}/d{row['head_dim']}/{row['heads'][0]}-{row['heads'][1]}/{row['batch']}x{row['query']}/{mask}"
    if row["group"] == "mask":
        return f"mask/{row['mask']}/d{row['head_dim']}/{row['heads'][0]}-{row['heads'][1]}/{row['batch']}x{row['query']}"
    if row["group"] == "verify":
        return f"verify/q{row['query']}"
    if row["group"] == "launch":
        return f"launch/{row['protocol']}"
    if "lengths" in row:
        return f"{row['group']}/{page}/{row['lengths']}"
    if row["query"] > 1:
        return f"{row['group']}/{page}/{row['batch']}x{row['query']}of{row['context']}"
    return f"{row['group']}/{page}/{row['context']}x{row['batch']}"


def cell_of(row: dict) -> Cell:
    unit = row.pop("unit")
    row = {"tokens": row["batch"] * row["context"], **row, "name": name_of(row), "unit": "TFLOP/s" if unit == "TFLOP/s" else "TB/s"}
    row["heads"] = tuple(row["heads"])
    if row.get("base"):
        row["base"] = row["base"].format(**row)
    row["peers"], row["dense"] = row["peers"] or {}, row.get("dense") or {}
    cell = Cell(**row)
    if unit == "us":
        return cell
    in_us = {name: cell.work / rate / 1e6 for name, rate in cell.peers.items()}
    return Cell(**{**row, "peers": in_us})


def load(table: Path = TABLE) -> list[Cell]:
    data = json.loads(table.read_text())
    return [cell_of({**data["groups"][row["group"]], **row}) for row in data["cells"]]


def origin(table: Path = TABLE) -> dict:
    return json.loads(table.read_text())["origin"]


def chosen(cells: list[Cell], pattern: str) -> list[Cell]:
    """The cells whose names begin with the regular expression, and the cells that these are compared with."""
    wanted = {cell.name for cell in cells if re.match(pattern, cell.name)}
    wanted |= {cell.base for cell in cells if cell.name in wanted and cell.base}
    return [cell for cell in cells if cell.name in wanted]
