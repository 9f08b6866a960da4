"""What AOTAutograd takes apart: the operators that generated code computes at least as fast, fused with what is around
them. On the host in the types that its loops compute in; of the others, and of indices, ATen's kernels run best there.
For backend.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions

from flagos_backend.torch.compile.corrections import statistics_dtype
from flagos_backend.torch.compile.placement import computes_on_host
from flagos_backend.torch.compile.sites import site_of
from flagos_backend.torch.recurrent import CELLS

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
    aten.tanh_backward,
)
# Positions that are compared, which on the host ATen need not do.
_TRIANGLES = (aten.tril, aten.triu)
# Of later versions of PyTorch.
_APART_IF_THERE = ("_fused_rms_norm", "_fused_rms_norm_backward")


def _layer_norm(
    x: torch.Tensor, sizes: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """native_layer_norm in operators that fuse; PyTorch's own decomposition is one of its primitives. Halves are
    computed in float32, which their statistics stay in. Results are row-major, however the input lies: a graph may
    view them so."""
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
    return result.to(x.dtype).contiguous(), mean.contiguous(), scale.contiguous()


# What generated code of the host computes with.
_WIDE = (torch.float32, torch.float64)


def _product_and_sum(
    addend: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """addmm as two operators, which round as ATen's one does: in the type of the result."""
    if x.dtype not in _WIDE or (beta, alpha) != (1, 1):
        return NotImplemented
    return torch.mm(x, y) + addend


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """Batch norm by known statistics: a factor and a summand for each channel, as in ATen's kernel."""
    if any(known is not None and known.dtype not in _WIDE for known in (x, weight, bias, mean, variance)):
        return NotImplemented
    factor = torch.rsqrt(variance + eps)
    if weight is not None:
        factor = factor * weight
    summand = -mean * factor
    if bias is not None:
        summand = summand + bias
    sizes = [-1, *(1 for _ in range(x.dim() - 2))]
    unused = x.new_empty(0)
    return x * factor.view(sizes) + summand.view(sizes), unused, unused


def _batch_norm_of_accelerators(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same where few operations on a channel's parameters are repeated for each element, and no kernel makes them
    beforehand. Halves are computed in float32 and rounded once, as by ATen's kernel, which hands the statistics on."""
    sizes = [-1, *(1 for _ in range(x.dim() - 2))]

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    inverse = torch.rsqrt(wide(variance) + eps)
    factor = inverse if weight is None else inverse * wide(weight)
    result = (wide(x) - wide(mean).view(sizes)) * factor.view(sizes)
    if bias is not None:
        result = result + wide(bias).view(sizes)
    if computes_on_host(x.device):  # where an accelerator is simulated
        mean = inverse = x.new_empty(0, dtype=statistics_dtype(x, weight, bias, mean))
    else:
        mean = mean.to(inverse.dtype, copy=True)
    return result.to(x.dtype), mean, inverse


def _nan_to_num(
    x: torch.Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    """By comparisons, which fuse, and which tell weights of an attention from other numbers (passes/match)."""
    if not x.is_floating_point():
        return NotImplemented
    found = torch.where(x != x, 0.0 if nan is None else nan, x)
    limits = torch.finfo(x.dtype)
    found = torch.where(x == torch.inf, limits.max if posinf is None else posinf, found)
    return torch.where(x == -torch.inf, limits.min if neginf is None else neginf, found)


def _lower_bound(x: torch.Tensor, least: float) -> Any:
    """clamp_min of numbers, also of NaN."""
    if not x.is_floating_point() or isinstance(least, torch.SymFloat):
        return NotImplemented
    return torch.maximum(x, torch.full([], least, dtype=x.dtype, device=x.device))


_MEAN, _SUM = 1, 2


def _is_class(x: torch.Tensor, target: torch.Tensor, ignored: int) -> torch.Tensor:
    """Where an element of ``x`` [N, C, ...] or [C] is of the class ``target`` [N, ...], [] or [1], if that counts.
    Numbers are compared in 32 bits, which are one instruction on accelerators."""
    dim = min(x.dim() - 1, 1)
    target = target.reshape([*target.shape[:dim], 1, *target.shape[dim:]] if x.dim() > 1 else [1])
    counts = (target != ignored) & (target >= 0) & (target < x.shape[dim])
    classes = torch.arange(x.shape[dim], device=x.device, dtype=torch.int32)
    shape = [-1, *(1 for _ in range(x.dim() - dim - 1))]
    return classes.view(shape) == torch.where(counts, target, -1).to(torch.int32)


def _of_classes(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight.view([-1, *(1 for _ in range(x.dim() - 2))])


def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """nll_loss_forward as a sum over the classes, in the kernel that reads them for the softmax. A target that is no
    class has no loss here, where ATen's kernel ends the process."""
    dim, counts = min(x.dim() - 1, 1), _is_class(x, target, ignore_index)
    weighted = x if weight is None else x * _of_classes(weight, x)
    loss = -torch.where(counts, weighted, 0).sum(dim)
    if reduction not in (_MEAN, _SUM) and x.dim() > 1:
        return loss, x.new_zeros(())
    if weight is None:
        total = (target != ignore_index).sum().to(x.dtype)
    else:
        total = torch.where(counts, _of_classes(weight, x).to(x.dtype), 0).sum()
    if reduction in (_MEAN, _SUM):
        loss = loss.sum()
    return (loss / total if reduction == _MEAN else loss), total


def _nll_loss_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total: torch.Tensor,
) -> torch.Tensor:
    if reduction == _MEAN:
        gradient = gradient / total
    if x.dim() > gradient.dim() > 0:
        gradient = gradient.unsqueeze(1)
    each = -gradient if weight is None else -gradient * _of_classes(weight, x)
    return torch.where(_is_class(x, target, ignore_index), each, 0).to(x.dtype)


def _in_wide_types(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule for operands in types that generated code of the host computes with."""

    def decomposition(*operands: Any, **keywords: Any) -> Any:
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        # Without any, ATen says what it thinks of it.
        numbers = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
        return rule(*operands, **keywords) if numbers and numbers <= set(_WIDE) else NotImplemented

    return decomposition


@functools.cache
def _of_host() -> Mapping[Any, Callable[..., Any]]:
    wide = {
        **_of_both(),
        # Not the forward pass: ATen's looks for targets that are no class.
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
    }
    return {
        **{overload: _in_wide_types(rule) for overload, rule in wide.items()},
        **CELLS,  # in any type: for tensors of the device flagos PyTorch traces them, and the host has none
        aten.addmm.default: _product_and_sum,
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
    }


def _of_both() -> Mapping[Any, Callable[..., Any]]:
    later = tuple(getattr(aten, name) for name in _APART_IF_THERE if hasattr(aten, name))
    found: Mapping[Any, Callable[..., Any]] = get_decompositions([*_APART, *later])
    return {**found, aten.native_layer_norm.default: _layer_norm}


@functools.cache
def _of_accelerators() -> Mapping[Any, Callable[..., Any]]:
    more: Mapping[Any, Callable[..., Any]] = get_decompositions([*_TRIANGLES, aten.logsumexp])
    return {
        **_of_both(),
        **more,
        **CELLS,
        aten.clamp_min.default: _lower_bound,
        aten.nan_to_num.default: _nan_to_num,
        aten._native_batch_norm_legit_no_training.default: _batch_norm_of_accelerators,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss_forward.default: _nll_loss,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
        aten.nll_loss2d_forward.default: _nll_loss,
    }


def runs_on_host(inputs: Sequence[Any]) -> bool:
    """Whether a graph with these inputs does; True where it has no place, which the program is then refused for."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    try:
        return site_of(devices).is_host
    except ValueError:  # two accelerators
        return True


def decompositions_for(inputs: Sequence[Any]) -> Mapping[Any, Callable[..., Any]]:
    """For a graph with these inputs, by overload."""
    return _of_host() if runs_on_host(inputs) else _of_accelerators()
