"""What AOTAutograd takes apart: the operators that generated code computes at least as fast, fused with what is around
them. On the host in the types that its loops compute in; of the others, and of indices, ATen's kernels run best there.
For backend.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._prims_common import suggest_memory_format

from flagos_backend.frontends.torch.compile.corrections import lying_as_whole, statistics_dtype
from flagos_backend.frontends.torch.compile.device_contexts import device_context_of
from flagos_backend.frontends.torch.compile.foreach import foreach_decompositions
from flagos_backend.frontends.torch.compile.placement import computes_on_host
from flagos_backend.frontends.torch.recurrent import CELLS

aten = torch.ops.aten

_APART = (
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten._safe_softmax,
    aten._softmax,
    aten._softmax_backward_data,
    aten.celu,
    aten.elu,
    aten.elu_backward,
    aten.frac,
    aten.gelu,
    aten.gelu_backward,
    aten.glu,
    aten.glu_backward,
    aten.hardsigmoid,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardtanh,
    aten.hardtanh_backward,
    aten.leaky_relu,
    aten.leaky_relu_backward,
    aten.logaddexp,
    aten.mish,
    aten.mish_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.native_layer_norm_backward,
    aten.silu,
    aten.silu_backward,
    aten.smooth_l1_loss,
    aten.softplus,
    aten.softplus_backward,
    aten.tanh_backward,
    aten.xlogy,
)
# Operators that are a few that fuse, or read at places that are computed. On the host ATen's run best.
_APART_ON_ACCELERATORS = (
    aten.binary_cross_entropy_with_logits,
    aten.grid_sampler_2d,
    aten.linalg_vector_norm,
    aten.linspace,
    aten.log_sigmoid_backward,
    aten.log_sigmoid_forward,
    aten.logsumexp,
    aten.reflection_pad1d,
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d,
    aten.reflection_pad2d_backward,
    aten.replication_pad1d,
    aten.replication_pad2d,
)
# Of later versions of PyTorch.
_APART_IF_THERE = ("_fused_rms_norm", "_fused_rms_norm_backward")


def _layer_norm(
    x: torch.Tensor, sizes: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """native_layer_norm in operators that fuse; PyTorch's own decomposition is one of its primitives. 16-bit floats are
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


def _variance_and_mean(
    x: torch.Tensor,
    dims: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """var_mean in operators that fuse: the mean, then the squares of the differences from it. 16-bit floats are
    computed in float32."""
    along = list(dims) if dims else list(range(x.dim()))
    count = math.prod(x.shape[dim] for dim in along)
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x
    mean = wide.mean(along, keepdim=True)
    centered = wide - mean
    squares = (centered * centered).sum(along, keepdim=keepdim)
    freedom: Any = torch.sym_max(count - (1 if correction is None else correction), 0)  # type: ignore[no-untyped-call]
    variance: torch.Tensor = squares / freedom
    return variance.to(x.dtype), (mean if keepdim else mean.sum(along)).to(x.dtype)


def _variance(x: torch.Tensor, dims: Sequence[int] | None = None, **options: Any) -> torch.Tensor:
    return _variance_and_mean(x, dims, **options)[0]


def _deviation(x: torch.Tensor, dims: Sequence[int] | None = None, **options: Any) -> torch.Tensor:
    return _variance(x, dims, **options).sqrt()


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
    result = x * factor.view(sizes) + summand.view(sizes)
    return result.contiguous(memory_format=suggest_memory_format(x)), unused, unused


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
    beforehand. 16-bit floats are computed in float32 and rounded once, as by ATen's kernel, which hands the statistics
    on."""
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
        **foreach_decompositions(),
        **CELLS,  # in any type: for tensors of the device flagos PyTorch traces them, and the host has none
        aten.addmm.default: _product_and_sum,
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
    }


def _of_both() -> Mapping[Any, Callable[..., Any]]:
    later = tuple(getattr(aten, name) for name in _APART_IF_THERE if hasattr(aten, name))
    found: Mapping[Any, Callable[..., Any]] = get_decompositions([*_APART, *later])
    return {
        **{overload: lying_as_whole(overload, rule) for overload, rule in found.items()},
        aten.native_layer_norm.default: _layer_norm,
        aten.std.correction: _deviation,
        aten.var.correction: _variance,
        aten.var_mean.correction: _variance_and_mean,
    }


@functools.cache
def _of_accelerators() -> Mapping[Any, Callable[..., Any]]:
    more: Mapping[Any, Callable[..., Any]] = get_decompositions([*_APART_ON_ACCELERATORS])
    return {
        **_of_both(),
        **foreach_decompositions(),
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
        return device_context_of(devices).is_host
    except ValueError:  # two accelerators
        return True


def decompositions_for(inputs: Sequence[Any]) -> Mapping[Any, Callable[..., Any]]:
    """For a graph with these inputs, by overload."""
    return _of_host() if runs_on_host(inputs) else _of_accelerators()
