"""Attention in float64 with NumPy: what the package's outputs are held to."""
import numpy as np


def bf16_bits(x):
    """float32 rounded to bfloat16, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def attention(
    q,
    k,
    v,
    *,
    causal,
    scale=None,
    window_left=-1,
    window_right=-1,
    chunk=0,
    chunk_lookback=0,
    soft_cap=0.0,
    temperature=None,
    sinks=None,
    alibi_slopes=None,
    alibi_sqrt=False,
    mask=None,
    positions=None,
):
    """q [t, hq, d], k and v [s, hkv, d] of one request, mask [t, s] or None, temperature: a factor for each query, [t]; out and the natural log
    of the denominator."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    logits = np.einsum("thd,shd->hts", q, np.repeat(k, group, 1)) * (scale or q.shape[2] ** -0.5)
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    if temperature is not None:
        logits = logits * np.asarray(temperature, np.float64)[None, :, None]
    position = k.shape[0] - q.shape[0] + np.arange(q.shape[0])[:, None] if positions is None else np.asarray(positions)[:, None]
    key = np.arange(k.shape[0])[None, :]
    if alibi_slopes is not None:
        distance = -np.sqrt(np.maximum(position - key, 0)) if alibi_sqrt else key - position
        logits = logits + np.asarray(alibi_slopes, np.float64)[:, None, None] * distance
    seen = (key <= position if causal else key >= 0) & ((window_left < 0) | (key >= position - window_left))
    seen &= (window_right < 0) | (key <= position + window_right)
    if chunk:
        back = position // chunk - key // chunk
        seen &= (back >= 0) & (back <= chunk_lookback)
    if mask is not None:
        seen &= np.asarray(mask, bool)
    logits = np.where(seen, logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64)[:, None, None] - top)
    out = np.einsum("hts,shd->thd", weights / total, np.repeat(v, group, 1))
    return out, (np.log(total) + top)[..., 0].T
