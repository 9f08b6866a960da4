"""What AOTAutograd takes apart: on accelerators the operators that generated kernels compute at least as fast, fused
with what is around them; on the host nothing, as ATen's kernels are what runs best there. For backend.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from flagos_backend.torch.compile.sites import site_of

aten = torch.ops.aten

_APART = (
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten._safe_softmax,
    aten._softmax,
    aten._softmax_backward_data,
    aten.gelu,
    aten.gelu_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.native_layer_norm_backward,
    aten.silu,
    aten.silu_backward,
)
# Of later versions of PyTorch.
_APART_IF_THERE = ("_fused_rms_norm", "_fused_rms_norm_backward")


def _layer_norm(
    x: torch.Tensor, sizes: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """native_layer_norm in operators that fuse; PyTorch's own decomposition is one of its primitives. Halves are
    computed in float32, which their statistics stay in."""
    dims = list(range(x.dim() - len(sizes), x.dim()))
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x
    mean = wide.mean(dims, keepdim=True)
    centered = wide - mean
    scale = torch.rsqrt((centered * centered).mean(dims, keepdim=True) + eps)
    result = centered * scale
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(x.dtype), mean, scale


@functools.cache
def _table() -> Mapping[Any, Callable[..., Any]]:
    later = tuple(getattr(aten, name) for name in _APART_IF_THERE if hasattr(aten, name))
    found: Mapping[Any, Callable[..., Any]] = get_decompositions([*_APART, *later])
    return {**found, aten.native_layer_norm.default: _layer_norm}


def decompositions_for(inputs: Sequence[Any]) -> Mapping[Any, Callable[..., Any]]:
    """For a graph with these inputs, by overload."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    try:
        return {} if site_of(devices).is_host else _table()
    except ValueError:  # two accelerators, which the program then refuses by its place
        return {}
