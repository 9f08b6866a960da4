"""The key flagos_flash_attn: attention, with the logarithms of its sums for ring attention."""

from __future__ import annotations

from typing import Any, Final

import torch
from lightx2v.common.ops.attn.template import AttnWeightTemplate
from torch import Tensor

from flagos_backend.frontends.lightx2v import functions
from flagos_backend.frontends.lightx2v.refusal import floats, refuse

KEY: Final = "flagos_flash_attn"


class FlashAttention(AttnWeightTemplate):  # type: ignore[misc]
    """LightX2V's interface of attention. It has no weights."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}

    def apply(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        drop_rate: float = 0.0,
        attn_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """q [S, H, D] or [B, S, H, D], k and v [T, G, D] or [B, T, G, D]: [B·S, H·D].

        ``cu_seqlens``: int32 [n + 1], where each of n sequences begins; of three dimensions with n > 1 the sequences
        follow each other. ``attn_mask``: as scaled_dot_product_attention's. Raises TypeError, ValueError or
        RuntimeError, naming the key, for dtypes, sizes and devices that do not fit.
        """
        _check(q, k, v)
        causal = bool(causal)
        if attn_mask is not None and attn_mask.dtype is not torch.bool:
            attn_mask = attn_mask.to(q.dtype)
        options: dict[str, Any] = {"causal": causal, "scale": softmax_scale, "mask": attn_mask, "dropout": drop_rate}
        if q.ndim == 4:
            out = functions.attention(q, k, v, **options)
        elif _sequences(cu_seqlens_q) > 1:
            return _packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, **options)
        else:
            out = functions.attention(q[None], k[None], v[None], **options)
        return out.reshape(-1, q.shape[-2] * v.shape[-1])

    def apply_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """As ``apply`` without more, and f32 [B·S, H]: the natural logarithm of each row's sum of exponentials."""
        _check(q, k, v)
        if q.ndim == 3:
            q, k, v = q[None], k[None], v[None]
        out, lse = functions.attention_with_lse(q, k, v, softmax_scale)
        return out.reshape(-1, q.shape[-2] * v.shape[-1]), lse.reshape(-1, q.shape[-2])


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    floats(KEY, q=q, k=k, v=v)
    sizes = f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}"
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        refuse(KEY, f"{sizes} have no common form", "Pass [S, H, D] or [B, S, H, D] for all three.")
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or q.shape[:-3] != k.shape[:-3]:
        refuse(KEY, f"{sizes} do not fit", "k and v have the same tokens and heads, q the head size and batch of k.")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        refuse(KEY, f"q has {q.shape[-2]} heads and k {k.shape[-2]}", "The heads of k divide those of q.")
    if not k.shape[-3]:
        refuse(KEY, "k has no tokens", "Pass at least one.")
    if not q.dtype == k.dtype == v.dtype:
        refuse(KEY, f"q is of {q.dtype}, k of {k.dtype}, v of {v.dtype}", "Convert them to one dtype.", TypeError)


def _sequences(starts: Tensor | None) -> int:
    return 1 if starts is None else max(1, starts.shape[0] - 1)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor | None, starts_kv: Tensor | None, **options: Any
) -> Tensor:
    """Sequence by sequence. Reads the starts on the host."""
    if starts_q is None or starts_kv is None or starts_q.shape != starts_kv.shape:
        refuse(KEY, "cu_seqlens_q and cu_seqlens_kv tell of different numbers of sequences", "Pass both, alike.")
    own, other = starts_q.tolist(), starts_kv.tolist()
    for name, starts, tokens in (("cu_seqlens_q", own, q.shape[0]), ("cu_seqlens_kv", other, k.shape[0])):
        if starts[0] or starts[-1] != tokens or sorted(starts) != starts:
            refuse(KEY, f"{name} is {starts} for {tokens} tokens", "It rises from 0 to the number of tokens.")
    outs = [
        functions.attention(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0]
        for a, b, c, d in zip(own, own[1:], other, other[1:], strict=False)
    ]
    return torch.cat(outs).reshape(-1, q.shape[-2] * v.shape[-1])
