"""Attention through ATen's fused kernels: FlashAttention and cuDNN, for calls that say no more than they know."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.ir.custom_calls.attention import Attention, AttentionBackwardCall, AttentionCall, Views
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType, leaves
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.attention import shapes_of, views_of
from flagos_backend.kernels.reference.registry import Kernel, Run, Value
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.kernels.vendor import placing
from flagos_backend.process.torch_loading import Tensor, torch

_TYPES = frozenset({ElementType.F16, ElementType.BF16})
_MAX_CHANNELS, _CHANNEL_MULTIPLE = 256, 8
_LOADING_ROWS, _LOADING_CHANNELS = 64, 64
aten = torch.ops.aten
# What the operators below call, in some of torch's versions: there their results are allocated.
_INNER = (
    "_cudnn_attention_forward",
    "_cudnn_attention_backward",
    "_flash_attention_forward",
    "_flash_attention_backward",
)
_THROUGH = frozenset(getattr(aten, name).default for name in _INNER if hasattr(aten, name))


def unsupported(instruction: Instruction, target: Target) -> str:
    return _unsupported(instruction, target, AttentionCall.of(instruction).attention)


def unsupported_backward(instruction: Instruction, target: Target) -> str:
    call = AttentionBackwardCall.of(instruction)
    reason = _unsupported(instruction, target, call.attention)
    return reason or ("it gives no gradient of a bias" if call.bias_gradient is not None else "")


def _unsupported(instruction: Instruction, target: Target, a: Attention) -> str:
    if not target.has_fused_attention:
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
    able = (name for name in _FORWARD if not call.tells_nan or name in _TELL_NAN)
    return tuple(_variant(name, _forward(instruction, call, _FORWARD[name]), instruction) for name in able)


def _variant(name: str, into: Kernel, instruction: Instruction) -> Variant:
    nowhere = [None for _ in leaves(instruction.shape)]
    query = shapes_of(instruction)[0]
    warm_up = functools.partial(_load_library, name, dtype_of(query.element_type))
    return Variant(name, lambda run, *operands: into(run, nowhere, *operands), into, warm_up)


@functools.cache
def _load_library(name: str, dtype: torch.dtype) -> None:
    """A process's first call loads the library, which takes a tenth of a second."""
    rows = torch.zeros((1, 1, _LOADING_ROWS, _LOADING_CHANNELS), dtype=dtype, device="cuda")
    _FORWARD[name]((None, None), rows, rows, rows, True, 1.0)


_call_into = functools.partial(placing.call_into, through=_THROUGH)
# Where results are wanted, as the operator lays them out: [B,H,T,E] and [B,H,T], or like query, key and value.
_Places = Sequence[Tensor | None]


def _flash_forward(places: _Places, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> list[Any]:
    operator = aten._scaled_dot_product_flash_attention.default
    return _call_into(operator, places, q, k, v, 0.0, causal, False, scale=scale)[:2]


def _cudnn_forward(places: _Places, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> list[Any]:
    operator = aten._scaled_dot_product_cudnn_attention.default
    output, statistics = places
    statistics = None if statistics is None else statistics.unsqueeze(-1)
    return _call_into(operator, (output, statistics), q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]


_FORWARD = {"cudnn": _cudnn_forward, "flash": _flash_forward}
# FlashAttention's statistics of a row with one NaN among its logits are a number (PyTorch 2.11, on an H200).
_TELL_NAN = frozenset({"cudnn"})


def _forward(instruction: Instruction, call: AttentionCall, compute: Any) -> Kernel:
    a = call.attention
    views = views_of(instruction, a)
    dtype, size = dtype_of(next(leaves(instruction.shape)).element_type), views.sizes

    def run(_: Run, outputs: Sequence[Tensor | None], query: Tensor, key: Tensor, value: Tensor) -> Value:
        q, k, v = _operands(views, a, query, key, value)
        wanted, statistics = outputs[0], outputs[1] if call.statistics else None
        place = None if wanted is None else views.query(wanted, a.output, "e")
        output, found = compute((place, statistics), q, k, v, a.upper is not None, a.scale)
        result = _finished(wanted, views.like_query(output.to(dtype), a.output, "e"))
        if not call.statistics:
            return result
        return result, found.reshape(size.B, size.H, size.T) if statistics is None else statistics

    return run


def _operands(views: Views, a: Attention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return views.query(query, a.query), views.key(key, a.key), views.key(value, a.value, "e")


def _finished(wanted: Tensor | None, result: Tensor) -> Tensor:
    """``result`` where it is wanted, if anywhere: there already, unless no view of that is laid out for an operator."""
    if wanted is None:
        return result
    return wanted if result.data_ptr() == wanted.data_ptr() else wanted.copy_(result)


def backward_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    call = AttentionBackwardCall.of(instruction)
    return tuple(_variant(name, _backward(instruction, call, run), instruction) for name, run in _BACKWARD.items())


def _flash_backward(
    places: _Places, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, causal: bool, scale: float
) -> list[Any]:
    state = torch.empty(2, dtype=torch.uint64, device="cpu"), torch.empty((), dtype=torch.uint64, device="cpu")
    operator = aten._scaled_dot_product_flash_attention_backward.default
    return _call_into(
        operator, places, g, q, k, v, o, stats, None, None, q.shape[2], k.shape[2], 0.0, causal, *state, scale=scale
    )


def _cudnn_backward(
    places: _Places, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor, causal: bool, scale: float
) -> list[Any]:
    state = torch.empty((), dtype=torch.int64, device=g.device)
    operator = aten._scaled_dot_product_cudnn_attention_backward.default
    return _call_into(
        operator, places, g, q, k, v, o, stats.unsqueeze(-1), state, state, None, None, None, q.shape[2], k.shape[2],
        0.0, causal, scale=scale,
    )  # fmt: skip


_BACKWARD = {"cudnn": _cudnn_backward, "flash": _flash_backward}


def _backward(instruction: Instruction, call: AttentionBackwardCall, compute: Any) -> Kernel:
    a = call.attention
    views = views_of(instruction, a)
    wanted = call.wanted()
    types = {name: dtype_of(leaf.element_type) for name, leaf in zip(wanted, leaves(instruction.shape), strict=True)}
    # Of each gradient that the operators give: what it is called, and how it lies in the array that is wanted.
    seen = {
        "query": (functools.partial(views.query, channel="d"), functools.partial(views.like_query, channel="d")),
        "key": (functools.partial(views.key, channel="d"), functools.partial(views.like_key, channel="d")),
        "value": (functools.partial(views.key, channel="e"), functools.partial(views.like_key, channel="e")),
    }

    def run(
        _: Run, outputs: Sequence[Tensor | None], query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        statistics: Tensor, gradient: Tensor,
    ) -> Value:  # fmt: skip
        q, k, v = _operands(views, a, query, key, value)
        o, g = views.query(output, a.output, "e"), views.query(gradient, call.output_gradient, "e")
        given = {name: found for name, found in zip(wanted, outputs, strict=True) if found is not None}
        places = [see(given[name], wanted[name]) if name in given else None for name, (see, _) in seen.items()]
        found = compute(places, g.to(q.dtype), q, k, v, o.to(q.dtype), statistics, a.upper is not None, a.scale)
        gradients = dict(zip(seen, found, strict=True))
        return tuple(
            _finished(given.get(name), seen[name][1](gradients[name].to(types[name]), dims))
            for name, dims in wanted.items()
        )

    return run
