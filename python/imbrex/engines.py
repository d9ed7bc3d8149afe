"""What the plug-ins for serving engines share: versions, settings, threads, types, and the check of a cache's layout.

No engine is imported here.
"""

import contextlib
import json
import logging
import os
import re
import threading
import weakref
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from . import _core
from .plan import KvLayer, Plan, Workspace

logger = logging.getLogger("imbrex")

SETTINGS_VARIABLE = "IMBREX_ENGINE_CONFIG"
ANY_VERSION_VARIABLE = "IMBREX_ENGINE_ANY_VERSION"


@dataclass(frozen=True)
class Settings:
    """What a user may set for a plug-in: in IMBREX_ENGINE_CONFIG, a JSON object, or where the engine has a way in its own options."""

    backend: str = ""  # an imbrex backend or alias; empty: the first that runs the layer
    num_threads: int = 0  # CPUs; 0: those of PyTorch
    validate: bool = True  # check every batch
    self_check: bool = True  # write to the cache's pages and read them back before the first step
    on_device: str = "auto"  # plan from lengths on the GPU: "auto" (where the host's are not exact), "always" or "never"


def settings(given: Optional[Dict[str, Any]] = None) -> Settings:
    """The settings of IMBREX_ENGINE_CONFIG, overridden by the given ones. ValueError for an unknown name or a wrong type."""
    text = os.environ.get(SETTINGS_VARIABLE, "")
    try:
        merged = json.loads(text) if text else {}
    except ValueError as error:
        raise ValueError(f"{SETTINGS_VARIABLE}: expected a JSON object, got {text!r} ({error})") from None
    if not isinstance(merged, dict) or not isinstance(given or {}, dict):
        raise ValueError(f"settings of imbrex: expected an object, got {merged if not isinstance(merged, dict) else given!r}")
    merged = {**merged, **(given or {})}
    known = {f.name: type(f.default) for f in fields(Settings)}
    for name, value in merged.items():
        if name not in known:
            raise ValueError(f"settings of imbrex: expected some of {', '.join(known)}, got {name!r}")
        if type(value) is not known[name]:
            raise ValueError(f"settings of imbrex: expected {name} of type {known[name].__name__}, got {value!r}")
    made = Settings(**merged)
    if made.on_device not in ("auto", "always", "never"):
        raise ValueError(f'settings of imbrex: expected on_device "auto", "always" or "never", got {made.on_device!r}')
    return made


def version_of(text: str) -> Tuple[int, int, int]:
    """(0, 33, 1) of "0.33.1rc2"; zeros for what is no version."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(text))
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def check_version(engine: str, version: str, written_for: Sequence[str], least_patch: bool) -> None:
    """ImportError unless the engine's version has the first two numbers of one that the plug-in was written for; a warning when the third
    differs. least_patch: an older third number is an error too. IMBREX_ENGINE_ANY_VERSION=1 makes a warning of the error."""
    actual, known = version_of(version), [version_of(v) for v in written_for]
    if actual in known:
        return
    text = f"imbrex was written for {engine} {' and '.join(written_for)}, and this is {version}"
    close = [k for k in known if k[:2] == actual[:2] and (actual >= k or not least_patch)]
    if close or os.environ.get(ANY_VERSION_VARIABLE) == "1":
        logger.warning("%s: the interface may differ", text)
        return
    raise ImportError(f"{text}. {ANY_VERSION_VARIABLE}=1 tries it all the same")


@contextlib.contextmanager
def all_cores():
    """Threads made in this block may use all cores that any thread of the process may. Engines bind each of theirs to one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    union = set(before)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            union |= os.sched_getaffinity(int(thread))
    os.sched_setaffinity(0, union)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_workspaces = threading.local()


def shared_workspace(device: str) -> Workspace:
    """A workspace that all callers on one thread share as long as one of them keeps it: for an engine that computes on one stream at a time."""
    of_device = _workspaces.__dict__.setdefault("of_device", weakref.WeakValueDictionary())
    return of_device.get(device) or of_device.setdefault(device, Workspace(device))


def make_plan(spec: _core.AttentionSpec, device: str, chosen: Settings, **limits: Any) -> Plan:
    """A plan for an engine's layers, whose outputs are of the model's type."""
    out_dtype = None if spec.q_dtype.startswith("fp8") else spec.q_dtype
    with all_cores():
        return Plan(spec, device, backend=chosen.backend, num_threads=chosen.num_threads, validate=chosen.validate, out_dtype=out_dtype, **limits)


_announced: Set[str] = set()


def announce(log: logging.Logger, plan: Plan, layers: str, self_check: str) -> None:
    """One line of the engine's log, once a process: which imbrex and which of its backends computes attention of `layers`, over what cache."""
    try:
        version = metadata.version("imbrex")
    except metadata.PackageNotFoundError:
        version = "(not installed, run from its sources)"
    backend = str(plan).split(":")[0]  # "cuda_sm90 (sm_90a)"
    kernels = dict(_core.backends()).get(backend.split(" ")[0], "a plug-in of imbrex")
    text = f"imbrex {version}: {backend} runs {layers}: {plan.spec}; {self_check}. Kernels: {kernels}"
    if text not in _announced:
        _announced.add(text)
        log.info("%s", text)


def device_text(device: Any) -> str:
    """ "cpu" or "cuda:1" of a torch.device or its name."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise NotImplementedError(f"imbrex: expected a device of type cpu or cuda, got {device}")
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def type_name(dtype: Any) -> str:
    """ "bf16" of torch.bfloat16. NotImplementedError for a type that imbrex does not have."""
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
    name = str(dtype).rsplit(".", 1)[-1]
    if name not in names:
        raise NotImplementedError(f"imbrex: expected one of {', '.join(names)}, got {name}")
    return names[name]


def as_bytes(pages: Any) -> Any:
    """fp8 tensors as uint8, which every version of DLPack has."""
    import torch

    return pages.view(torch.uint8) if pages.element_size() == 1 and pages.dtype != torch.uint8 else pages


def floats(tensor: Any, device: Any = None) -> Any:
    """float32 [n], contiguous, for sinks, slopes and scales; the tensor itself where it is that already."""
    import torch

    return tensor.detach().to(device=device or tensor.device, dtype=torch.float32).reshape(-1).contiguous()


# The check of a cache's layout.


@dataclass
class CheckedLayer:
    """One layer whose pages are checked. Functions take and give tensors on the device of the pages."""

    name: str
    spec: _core.AttentionSpec
    kv: KvLayer  # as the kernels will see it; of latents without v
    write: Callable[[Plan, Any, Any, Any], None]  # (plan, k, v, slots): new tokens, the way the engine's steps will
    rows: Callable[[Any], Tuple[Any, Any]]  # slots -> k and v [n, heads, dim] as the engine's own indices find them
    extras: Dict[str, Any]  # sinks, alibi_slopes for Plan.run
    score: Dict[str, Any]  # scale, soft_cap, window_left and others, for the reference
    first_block: int = 0  # blocks in front of it are no request's, and the engine need not write to them

    @property
    def values(self) -> Any:
        """The pages of values, which with latents are the first elements of those of keys."""
        return self.kv.k[..., : self.spec.head_dim_v] if self.kv.v is None else self.kv.v


def first_seen(position: int, *, window_left: int = -1, chunk: int = 0, chunk_lookback: int = 0, **_: Any) -> int:
    """The first key that the query at a position sees, of a causal layer."""
    first = max(0, position - window_left) if window_left >= 0 else 0
    return max(first, (position // chunk - chunk_lookback) * chunk) if chunk else first


def reference_row(
    q: Any, k: Any, v: Any, *, scale: float, soft_cap: float = 0.0, alibi_sqrt: bool = False, sinks=None, alibi_slopes=None, **mask: Any
) -> Any:
    """Attention of the last token in float64: q [heads, d], k and v [n, kv_heads, d]; `mask` as first_seen() takes it. Returns [heads, d]."""
    import torch

    q, k, v = (x.double().cpu() for x in (q, k, v))
    group, last = q.shape[0] // k.shape[1], k.shape[0] - 1
    logits = torch.einsum("hd,nhd->hn", q, k.repeat_interleave(group, 1)) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    distance = torch.arange(k.shape[0], dtype=torch.float64, device="cpu") - last
    if alibi_slopes is not None:
        logits = logits + alibi_slopes.double().cpu()[:, None] * (-torch.sqrt(-distance) if alibi_sqrt else distance)
    logits = logits.masked_fill(distance < first_seen(last, **mask) - last, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().cpu()[:, None]], 1)
    weights = logits.softmax(-1)[:, : k.shape[0]]
    return torch.einsum("hn,nhd->hd", weights, v.repeat_interleave(group, 1))


def _cache_error(text: str) -> _core.Error:
    error = _core.Error(text)
    error.code = "python.engine_cache"
    return error


def check_pages(layers: List[CheckedLayer], device: str, chosen: Settings) -> None:
    """Writes a request into the first two blocks for requests and the last one of every layer, and reads it back, by the engine's own indices and by
    attention; then puts back what was there. Error python.engine_cache names the layer that gives something else."""
    import torch

    generator = torch.Generator(device="cpu").manual_seed(20)
    written, saved = [], []
    try:
        for layer in layers:
            plan, blocks, step, k, v = _request(layer, device, chosen, generator)
            saved += [(x, blocks, x[blocks].clone()) for x in (layer.kv.k, layer.values)]
            try:
                layer.write(plan, k.clone(), v.clone(), step["slot_mapping"])
            except _core.Error as error:
                raise _cache_error(f"{layer.name}: expected pages that can be written to: {error}") from error
            written.append((layer, plan, step, k, v))
        for layer, plan, step, k, v in written:
            _check_rows(layer, step["slot_mapping"], k, v)
            _check_attention(layer, plan, step, k, v)
    finally:
        for pages, blocks, before in reversed(saved):
            pages[blocks] = before


def _request(layer: CheckedLayer, device: str, chosen: Settings, generator: Any) -> Tuple[Plan, List[int], Dict[str, Any], Any, Any]:
    """A plan that is updated with a request over some blocks of a layer: with these, the arrays of its step, and its keys and values."""
    import torch

    spec, pages = layer.spec, layer.kv.k
    for side, x, dim in (("k", layer.kv.k, spec.head_dim_qk), ("v", layer.values, spec.head_dim_v)):
        sizes = [spec.block_size, spec.num_kv_heads, dim]
        if spec.kv_format == "amx_packed":
            sizes = [spec.num_kv_heads, spec.block_size * dim * (1 if spec.kv_dtype.startswith("fp8") else 2)]
        if list(x.shape[1:]) != sizes:
            raise _cache_error(f"{layer.name}: expected {side} [num_blocks, {', '.join(map(str, sizes))}], got {list(x.shape)}")
    last = pages.shape[0] - 1
    blocks = sorted({min(layer.first_block, last), min(layer.first_block + 1, last), last})
    num_tokens = (len(blocks) - 1) * spec.block_size + 1
    position = torch.arange(num_tokens, device="cpu")
    slots = (torch.tensor(blocks, device="cpu")[position // spec.block_size] * spec.block_size + position % spec.block_size).to(pages.device)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[spec.q_dtype]
    k, v = (
        (torch.randn((num_tokens, spec.num_kv_heads, dim), generator=generator, device="cpu") * scale).to(pages.device, dtype)
        for dim, scale in zip((spec.head_dim_qk, spec.head_dim_v), _scales(layer))
    )
    if layer.kv.v is None:
        v = k[..., : spec.head_dim_v]
    plan = make_plan(spec, device, chosen, max_num_reqs=1, max_num_tokens=num_tokens, max_seq_len=num_tokens, load_on_demand=True)
    step = dict(block_table=torch.tensor([blocks], dtype=torch.int32, device=pages.device), slot_mapping=slots)
    ends = torch.tensor([0, num_tokens], dtype=torch.int32, device="cpu")
    plan.update(ends, ends[1:], **step)
    return plan, blocks, step, k, v


def _scales(layer: CheckedLayer) -> List[Any]:
    """A factor for each head of k and of v, [heads, 1] or 1."""
    return [1.0 if s is None else s.float().cpu().reshape(-1, 1) for s in (layer.kv.k_scale, layer.kv.v_scale)]


def _widened(x: Any, kv_dtype: str) -> Any:
    import torch

    kinds = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    return (x.contiguous().view(kinds[kv_dtype]) if kv_dtype in kinds else x).float().cpu()


def _check_rows(layer: CheckedLayer, slots: Any, k: Any, v: Any) -> None:
    import torch

    tolerance = {"fp8_e4m3": 0.07, "fp8_e5m2": 0.14}.get(layer.spec.kv_dtype, 0.01)
    for side, found, wrote, scale in zip("kv", layer.rows(slots), (k, v), _scales(layer)):
        found, wrote = _widened(found, layer.spec.kv_dtype), wrote.float().cpu() / scale
        if found.shape != wrote.shape or not torch.allclose(found, wrote, rtol=tolerance, atol=tolerance / 4):
            raise _cache_error(
                f"{layer.name}: expected to find {side} at the slots it was written to, got other numbers: the cache's layout is not the "
                f"one that imbrex was written for, or layers share memory (pages {list(layer.kv.k.shape)}, strides {layer.kv.k.stride()})"
            )


def _check_attention(layer: CheckedLayer, plan: Plan, step: Dict[str, Any], k: Any, v: Any) -> None:
    """Each head looks at one key of its own, so that a key or value read from a wrong place shows in the output."""
    import torch

    spec, num_tokens = layer.spec, k.shape[0]
    ends = torch.tensor([0, 1], dtype=torch.int32, device="cpu")
    plan.update(ends, torch.tensor([num_tokens], dtype=torch.int32, device="cpu"), **step)
    near = min(8 if layer.extras.get("alibi_slopes") is not None else num_tokens, num_tokens - first_seen(num_tokens - 1, **layer.score))
    heads = torch.arange(spec.num_q_heads, device="cpu")
    targets = (num_tokens - 1 - heads * max(1, near // spec.num_q_heads) % near).to(k.device)
    kv_heads = (heads // (spec.num_q_heads // spec.num_kv_heads)).to(k.device)
    keys = k[targets, kv_heads].float()
    q = (keys * (8 / (spec.scale * (keys * keys).sum(-1, keepdim=True)))).to(k.dtype)[None]
    out = torch.empty((1, spec.num_q_heads, spec.head_dim_v), dtype=k.dtype, device=k.device)
    plan.run(q, layer.kv, out, **layer.extras)
    cached = [_widened(x, spec.kv_dtype) * s for x, s in zip(layer.rows(step["slot_mapping"]), _scales(layer))]
    expected = reference_row(q[0], *cached, **layer.score, **layer.extras)
    error = (out[0].double().cpu() - expected).abs().max().item()
    allowed = 0.08 * float(torch.as_tensor(_scales(layer)[1], device="cpu").max())
    if not error < allowed:  # NaN too
        raise _cache_error(
            f"{layer.name}: expected attention over the pages just written within {allowed:.3g} of float64, got an error of {error:.3g}"
        )
