"""Attention stays whole: PyTorch chooses a fused form for devices that it knows, and would take it apart here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """aten::scaled_dot_product_attention: [N, heads, L, E], [N, heads, S, E], [N, heads, S, Ev] to [N, heads, L, Ev].

    The fused operator where it takes these operands, as PyTorch decides for the host; else the product of its parts.
    """
    if _fused_takes(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            mask = torch.where(mask, zero, torch.full_like(zero, float("-inf")))
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        fused: Any = aten._scaled_dot_product_flash_attention_for_cpu.default
        output: Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
        return output
    composed: Any = aten._scaled_dot_product_attention_math.default
    result: Tensor = composed(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _fused_takes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, gqa: bool
) -> bool:
    """The conditions of PyTorch's sdp_utils for the host, which hold for tensors without data too."""
    operands = (query, key, value)
    if not torch._C._get_flash_sdp_enabled() or dropout_p != 0.0:
        return False
    if any(t.dim() != 4 or t.dtype not in _DTYPES or t.dtype is not query.dtype or t.stride(-1) != 1 for t in operands):
        return False
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        return False
    if query.shape[-1] != key.shape[-1] or query.shape[-1] != value.shape[-1] or query.shape[0] != key.shape[0]:
        return False
    heads, of_key = query.shape[1], key.shape[1]
    if heads % of_key if gqa else heads != of_key:
        return False
    if key.shape[:3] != value.shape[:3]:
        return False
    if mask is None:
        return True
    if is_causal or mask.requires_grad or mask.dim() not in (2, 4) or mask.dtype not in (torch.bool, query.dtype):
        return False
    full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(full), strict=False))
