"""What the functions of imbrex.flash_attn share: checks that name the argument, options as imbrex takes them, and what is refused.

Modules of this package import each other by absolute names: they are also loaded as parts of a package `flash_attn`, see the package's text.
"""
from typing import Any, Optional, Tuple, Union

import torch

from imbrex import _torch_attention

Tensor = torch.Tensor


def refuse(what: str, instead: str) -> None:
    raise NotImplementedError(f"imbrex.flash_attn: {what} is not there: {instead}")


def refused(name: str, instead: str) -> Any:
    """A function that refuses every call."""

    def function(*args: Any, **kwargs: Any) -> Any:
        refuse(name, instead)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Refused: {instead}."
    return function


def refuse_given(instead: str, **arguments: Any) -> None:
    """Refuses the first argument that is neither None, False nor 0."""
    for name, value in arguments.items():
        if torch.is_tensor(value) or value:
            refuse(f"{name}=", instead)


def wrong(name: str, expected: Any, got: Any) -> ValueError:
    return ValueError(f"imbrex.flash_attn: {name}: expected {expected}, got {got}")


def check_tensors(layouts: str, **tensors: Optional[Tensor]) -> None:
    """Checks that each tensor has as many dimensions as its layout names. layouts: one for each tensor, "batch seqlen_q heads d, .."; the last one repeats."""
    names = [x.split() for x in layouts.split(",")]
    for i, (name, x) in enumerate(tensors.items()):
        layout = names[min(i, len(names) - 1)]
        if x is not None and x.dim() != len(layout):
            raise wrong(name, f"[{', '.join(layout)}]", list(x.shape))


def check_ints(name: str, x: Tensor, size: Union[int, str]) -> None:
    """Contiguous int32 [size]; a size that is no number is only named."""
    if x.dtype != torch.int32 or x.dim() != 1 or not x.is_contiguous() or (isinstance(size, int) and len(x) != size):
        raise wrong(name, f"contiguous torch.int32 [{size}]", f"{x.dtype} {list(x.shape)}")


def check_call(dropout_p: float, *tensors: Optional[Tensor]) -> None:
    if dropout_p != 0.0:
        refuse(f"dropout (dropout_p {dropout_p})", "expected dropout_p 0.0")
    _torch_attention.no_gradient(*tensors)


def padded(*tensors: Tensor) -> Tuple[Tensor, ...]:
    """Head dimensions are multiples of 8; zeros change neither logits nor the values in front of them."""
    return tuple(torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in tensors)


def rows(x: Tensor) -> Tensor:
    """The tensor, copied if it is expanded or transposed: each element needs an address of its own, and those of a head must be contiguous."""
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))
    return x.contiguous() if overlaps or x.stride(-1) != 1 else x


def slopes_of(alibi_slopes: Optional[Tensor], batch: int, heads: int) -> Optional[Tensor]:
    """float32 [heads] where all requests have the same slopes, else [batch, heads]."""
    if alibi_slopes is None:
        return None
    shape = list(alibi_slopes.shape)
    if shape not in ([heads], [1, heads], [batch, heads]):
        raise wrong("alibi_slopes", f"[{heads}] or [{batch}, {heads}]", shape)
    slopes = _torch_attention.f32(alibi_slopes)
    return slopes[0] if shape == [1, heads] else slopes


def score_of(
    head_dim: int, softmax_scale: Optional[float], causal: bool, window_size: Tuple[int, int], softcap: float, slopes: Optional[Tensor], longest: int
) -> _torch_attention.Score:
    """slopes float32 [heads] or None; longest: no request has more queries or keys."""
    left, right = (int(n) for n in window_size)
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    score = _torch_attention.Score(bool(causal), (left, right), scale, float(softcap))
    if slopes is None:
        return score
    if causal or right == 0:
        return score._replace(alibi_slopes=slopes)
    # flash-attn's bias falls on both sides of a query, imbrex's ALiBi only in front of it. With a bucket for each distance T5's bias is any
    # function of the distance: half of the buckets are for keys after the query, and of each half the first half is for exact distances.
    exact = 1 << max(0, longest - 1).bit_length()
    falling = torch.arange(exact, dtype=torch.float32, device=slopes.device)[:, None] * -slopes
    return score._replace(relative_bias=falling.repeat(4, 1), relative_max_distance=exact + 1, relative_bidirectional=True)


def attend(
    q: Tensor, layer: Any, lengths: _torch_attention.Lengths, slopes: Optional[Tensor], score: Any, **options: Any
) -> Tuple[Tensor, Optional[Tensor]]:
    """_torch_attention.attend(); with slopes [batch, heads] once for each request, while the others have no keys, which costs a launch each.

    score: makes a Score of slopes [heads] or None.
    """
    if slopes is None or slopes.dim() == 1:
        return _torch_attention.attend(q, layer, lengths, score(slopes), **options)
    request = torch.arange(len(slopes), dtype=torch.int32, device=lengths.seq_lens.device)
    starts = options.pop("kv_start_loc", None)
    sums = None
    for r, own in enumerate(slopes):
        alone = lengths._replace(seq_lens=torch.where(request == r, lengths.seq_lens, 0), same=())
        if starts is not None:
            options["kv_start_loc"] = torch.cat((starts[r].expand(r + 1), starts[r + 1].expand(len(slopes) - r)))
        out, lse = _torch_attention.attend(q, layer, alone, score(own), **options)
        # Rows of other requests are 0, with -inf.
        sums = (out, lse) if sums is None else (sums[0].add_(out), None if lse is None else torch.maximum(sums[1], lse))
    return _torch_attention.attend(q, layer, lengths, score(None), **options) if sums is None else sums
