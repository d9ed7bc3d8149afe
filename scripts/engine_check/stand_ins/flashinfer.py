"""A stand-in for FlashInfer (the wheel is for CUDA): what SGLang's drafts of UNO import of it."""

import torch


def top_k(logits, count, sorted=True, deterministic=False):
    return torch.topk(logits, count, dim=-1, sorted=sorted)
