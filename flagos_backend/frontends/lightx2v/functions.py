"""What the operators compute, as functions of tensors: PyTorch's own operators, which torch.compile fuses. No module of
LightX2V is imported here, so that they can be measured and compared without it."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

Layout = Literal["interleaved", "split_half"]

#: The largest magnitude of each type of quantized numbers.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Below it a row counts as zeros: the quotient by it is finite.
_SMALLEST_SCALE = 1e-10
# Rows of scores that are held at once where no kernel gives their logarithms.
_SCORE_ROWS = 1024
# ATen's product of bytes wants more than 16 rows, and multiples of eight of the other sizes, on accelerators.
_FEWEST_ROWS, _FILLED_ROWS, _MULTIPLE = 17, 32, 8
# Of fp8 matrices it wants multiples of 16.
FP8_MULTIPLE = 16


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Of q [B, S, H, D] and k, v [B, T, G, D], where G divides H: [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 - a symbolic size decides here, not in torch
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """As ``attention``, and the natural logarithm of each row's sum of exponentials: f32 [B, S, H]."""
    repeats = q.shape[2] // k.shape[2]
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)[:2]
    elif q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    else:
        out, lse = _attention_of_scores(q, k, v, scale)
    return out.transpose(1, 2), lse.transpose(1, 2).float()


def _attention_of_scores(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Of [B, H, S, D], some rows at a time, in f32."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    outs, sums = [], []
    for rows in torch.split(q, _SCORE_ROWS, dim=2):
        scores = (rows.float() @ k.float().transpose(-1, -2)) * factor
        lse = torch.logsumexp(scores, dim=-1)
        outs.append((torch.exp(scores - lse.unsqueeze(-1)) @ v.float()).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Over the last dimension, in f32 and rounded once to x's dtype."""
    return F.rms_norm(x, (x.shape[-1],), None if weight is None else weight.to(x.dtype), epsilon)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Over the last dimension, with f32 statistics, rounded once to x's dtype."""
    weight, bias = (None if part is None else part.to(x.dtype) for part in (weight, bias))
    return F.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)


def rotate(x: Tensor, cosines: tuple[Tensor, Tensor], sines: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    """Each pair of x rotated by its angle, in the dtype of the cosines and rounded once. ``cosines``, ``sines``: for
    the first and the second of each pair, of half of x's last dimension and broadcast against the others."""
    wide = x.to(cosines[0].dtype)
    if layout == "interleaved":
        first, second = wide.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    else:
        first, second = wide.chunk(2, dim=-1)
    rotated = (first * cosines[0] - second * sines[0], second * cosines[1] + first * sines[1])
    out = torch.stack(rotated, dim=-1).flatten(-2) if layout == "interleaved" else torch.cat(rotated, dim=-1)
    return out.to(x.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, n] as numbers of 8 bits, and what they are multiplied by: f32 [rows, 1]. Symmetric, by each row's
    largest magnitude; float8_e4m3fn or int8."""
    largest = LARGEST[dtype]
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST_SCALE) / largest
    quotient = wide / scale
    if dtype is torch.int8:
        quotient = torch.round(quotient)
    return quotient.clamp(-largest, largest).to(dtype), scale


def quantized_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [rows, in] times weight [in, out], both of float8_e4m3fn or int8, times the scales [rows, 1] and [1, out], plus
    bias [out]: of ``dtype``. Products of the 8-bit numbers themselves, summed in f32 or int32: the weight is never
    converted back to what it was quantized from."""
    if weight.dtype is torch.int8:
        product = _int_product(x, weight).float() * x_scale * weight_scale
    elif x.device.type in ("cpu", "flagos"):
        product = (x.float() @ weight.float()) * x_scale * weight_scale
    else:
        bias = None if bias is None else bias.to(dtype)
        return torch._scaled_mm(x, weight, x_scale, weight_scale, bias, None, dtype, use_fast_accum=True)
    return (product if bias is None else product + bias.float()).to(dtype)


def _int_product(x: Tensor, weight: Tensor) -> Tensor:
    (rows, contracted), columns = x.shape, weight.shape[1]
    if x.device.type in ("cpu", "flagos"):
        return torch._int_mm(x, weight)
    more, deeper, wider = (
        max(0, _FILLED_ROWS - rows) if rows < _FEWEST_ROWS else 0,
        -contracted % _MULTIPLE,
        -columns % _MULTIPLE,
    )
    if more or deeper:
        x = F.pad(x, (0, deeper, 0, more))
    if deeper or wider:
        weight = F.pad(weight, (0, wider, 0, deeper))
    return torch._int_mm(x, weight)[:rows, :columns]
