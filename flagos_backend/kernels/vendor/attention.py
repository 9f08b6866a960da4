"""Attention through ATen's fused kernels: FlashAttention and cuDNN, for calls that say no more than they know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType, leaves
from flagos_backend.kernels.attention import Attention, AttentionBackwardCall, AttentionCall, Views
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.attention import shapes_of, views_of
from flagos_backend.kernels.reference.registry import Kernel, Run, Value
from flagos_backend.kernels.reference.storage import dtype_of

_TYPES = frozenset({ElementType.F16, ElementType.BF16})
_MAX_CHANNELS, _CHANNEL_MULTIPLE = 256, 8
aten = torch.ops.aten


def unsupported(instruction: Instruction, target: Target) -> str:
    return _unsupported(instruction, target, AttentionCall.of(instruction).attention)


def unsupported_backward(instruction: Instruction, target: Target) -> str:
    call = AttentionBackwardCall.of(instruction)
    reason = _unsupported(instruction, target, call.attention)
    return reason or ("it gives no gradient of a bias" if call.bias_gradient is not None else "")


def _unsupported(instruction: Instruction, target: Target, a: Attention) -> str:
    if target.device_type != "cuda":
        return f"ATen has no fused attention for {target.vendor or target.device_type} that is used here"
    types = {shape.element_type for shape in shapes_of(instruction)[:3]}
    if len(types) != 1 or not types <= _TYPES:
        return "query, key and value must all be f16 or bf16"
    size = views_of(instruction, a).sizes
    if a.cap is not None:
        return "its logits have a soft cap"
    if a.sink is not None:
        return "its logits have a sink"
    if a.bias is not None or a.mask is not None or a.lower is not None:
        return "it has a bias or a mask"
    if a.upper is not None and (a.upper != 0 or size.T != size.S):
        return "its band is no causal mask of a square"
    if size.D != size.E or size.D > _MAX_CHANNELS or size.D % _CHANNEL_MULTIPLE:
        return f"{size.D} and {size.E} channels are not the same multiple of {_CHANNEL_MULTIPLE} up to {_MAX_CHANNELS}"
    if 0 in (size.B, size.H, size.T, size.S):
        return "there is nothing to compute"
    return ""


def forward_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    call = AttentionCall.of(instruction)
    return tuple(Variant(name, _forward(instruction, call, run)) for name, run in _FORWARD.items())


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, statistics, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return output, statistics


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, statistics, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return output, statistics


_FORWARD = {"cudnn": _cudnn_forward, "flash": _flash_forward}


def _forward(instruction: Instruction, call: AttentionCall, compute: Any) -> Kernel:
    a = call.attention
    views = views_of(instruction, a)
    dtype, size = dtype_of(next(leaves(instruction.shape)).element_type), views.sizes

    def run(_: Run, query: Tensor, key: Tensor, value: Tensor) -> Value:
        q, k, v = _operands(views, a, query, key, value)
        output, statistics = compute(q, k, v, a.upper is not None, a.scale)
        result = views.like_query(output.to(dtype), a.output, "e")
        return (result, statistics.reshape(size.B, size.H, size.T)) if call.statistics else result

    return run


def _operands(views: Views, a: Attention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return views.query(query, a.query), views.key(key, a.key), views.key(value, a.value, "e")


def backward_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    call = AttentionBackwardCall.of(instruction)
    return tuple(Variant(name, _backward(instruction, call, run)) for name, run in _BACKWARD.items())


def _flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, causal: bool, scale: float
) -> Any:
    state = torch.empty(2, dtype=torch.uint64, device="cpu"), torch.empty((), dtype=torch.uint64, device="cpu")
    return aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, o, stats, None, None, q.shape[2], k.shape[2], 0.0, causal, *state, scale=scale
    )


def _cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, causal: bool, scale: float
) -> Any:
    state = torch.empty((), dtype=torch.int64, device=g.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, o, stats.unsqueeze(-1), state, state, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip


_BACKWARD = {"cudnn": _cudnn_backward, "flash": _flash_backward}


def _backward(instruction: Instruction, call: AttentionBackwardCall, compute: Any) -> Kernel:
    a = call.attention
    views = views_of(instruction, a)
    types = [dtype_of(leaf.element_type) for leaf in leaves(instruction.shape)]

    def run(
        _: Run, query: Tensor, key: Tensor, value: Tensor, output: Tensor, statistics: Tensor, gradient: Tensor
    ) -> Value:
        q, k, v = _operands(views, a, query, key, value)
        o, g = views.query(output, a.output, "e"), views.query(gradient, call.output_gradient, "e")
        dq, dk, dv = compute(g.to(q.dtype), q, k, v, o.to(q.dtype), statistics, a.upper is not None, a.scale)
        given: list[Tensor] = []
        if call.query_gradient is not None:
            given.append(views.like_query(dq.to(types[len(given)]), call.query_gradient, "d"))
        if call.key_gradient is not None:
            given.append(views.like_key(dk.to(types[len(given)]), call.key_gradient, "d"))
        if call.value_gradient is not None:
            given.append(views.like_key(dv.to(types[len(given)]), call.value_gradient, "e"))
        return tuple(given)

    return run
