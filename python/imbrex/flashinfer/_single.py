"""Attention of one request in one call. Plans are kept by thread, device and stream; a CUDA graph cannot hold these calls."""
import functools
import threading
from typing import Any, Dict, Optional, Tuple

import torch

from ._masks import mask_arrays
from ._options import DTypeLike, check_layout, check_supported, backend_name, refuse_nvfp4, score_fields, torch_dtype
from ._plans import Plans, Step, is_capturing
from ._run import Result, Scale, Types, attend, ragged


class _Kept(threading.local):
    def __init__(self) -> None:
        self.plans: Dict[Tuple[str, int, str], Plans] = {}


_kept = _Kept()
_MOST_PLANS = 16  # of a stream


def _plans(device: torch.device, backend: str) -> Plans:
    if is_capturing(device):
        raise RuntimeError("imbrex.flashinfer: functions of one request cannot be captured: use BatchDecode- or BatchPrefillWith..Wrapper")
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (str(device), stream, backend)
    if key not in _kept.plans:
        _kept.plans[key] = Plans(device, backend, kept=_MOST_PLANS)
    return _kept.plans[key]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    score: Dict[str, Any],
    causal: bool,
    o_dtype: torch.dtype,
    backend: str = "auto",
    mask: Optional[Dict[str, torch.Tensor]] = None,
    **options: Any,
) -> Result:
    """q [q_len, num_q_heads, head_dim_qk]; k and v of either layout."""
    k, v = ragged(k, check_layout(kv_layout)), ragged(v, kv_layout)
    types = Types(q.dtype, k.dtype, o_dtype)
    check_supported(types.q, types.kv, q.shape[2], v.shape[2])
    fields = dict(
        kind="encoder_decoder",  # there may be fewer keys than queries
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_v=v.shape[2],
        block_size=0,
        causal=bool(causal) and mask is None,
        custom_mask=mask is not None,
        **score,
        **types.fields(),
    )
    starts = torch.tensor([0, k.shape[0]], dtype=torch.int32, device="cpu" if mask is None else q.device)
    arrays = dict(kv_start_loc=starts, **(mask or {}))
    lengths = [torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([0, q.shape[0]], [k.shape[0]])]
    plans = _plans(q.device, backend_name(backend))
    plans.begin(fields, Step(*lengths, arrays))
    return attend(plans, types, q, k, v, alibi=score["alibi"], **options)


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    sm_scale: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    return_lse: bool = False,
) -> Result:
    """q [num_qo_heads, head_dim] over k and v [kv_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, kv_len, head_dim] (HND).

    Returns out [num_qo_heads, head_dim], with return_lse (out, lse float32 [num_qo_heads] in base 2).
    """
    refuse_nvfp4(None, k, v)
    score = score_fields(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
    scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    result = _attend(q[None], k, v, kv_layout, score, True, q.dtype, return_lse=return_lse, **scales)
    return (result[0][0], result[1][0]) if return_lse else result[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: Optional[torch.Tensor] = None,
    scale_k: Optional[torch.Tensor] = None,
    scale_v: Optional[torch.Tensor] = None,
    o_dtype: Optional[DTypeLike] = None,
    custom_mask: Optional[torch.Tensor] = None,
    packed_custom_mask: Optional[torch.Tensor] = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: Optional[float] = None,
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Result:
    """q [qo_len, num_qo_heads, head_dim_qk] over k and v [kv_len, num_kv_heads, ..] (NHD) or [num_kv_heads, kv_len, ..] (HND).

    custom_mask bool [qo_len, kv_len], or packed_custom_mask (packbits, little-endian), takes the place of `causal`. scale_q [num_qo_heads],
    scale_k and scale_v [num_kv_heads] are of fp8 tensors, k_scale and v_scale numbers for all heads. Returns out [qo_len, num_qo_heads,
    head_dim_vo] of o_dtype (q's), with return_lse (out, lse float32 [qo_len, num_qo_heads] in base 2).
    """
    refuse_nvfp4(kv_cache_sf, k, v)
    if (scale_k is not None and k_scale is not None) or (scale_v is not None and v_scale is not None):
        raise ValueError("scales: expected scale_k or k_scale, and scale_v or v_scale, got both")
    kv_len = k.shape[0 if check_layout(kv_layout) == "NHD" else 1]
    return _attend(
        q,
        k,
        v,
        kv_layout,
        score_fields(pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        causal,
        torch_dtype(o_dtype or q.dtype),
        backend,
        mask_arrays(custom_mask, packed_custom_mask, [q.shape[0] * kv_len], q.device),
        q_scale=scale_q,
        k_scale=k_scale if scale_k is None else scale_k,
        v_scale=v_scale if scale_v is None else scale_v,
        return_lse=return_lse,
    )


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)
