"""What a collective is given in place of the inner tensors, where its backend would not take them: contiguous memory,
and for gloo dtypes and reductions that it has. What is written is copied back when the collective ends.

gloo reads memory as it lies, whatever the strides, and knows few dtypes. A tensor for which nothing has to be done is
given as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from flagos_backend.frontends.torch.distributed.errors import ReductionUnsupported

_GLOO: Final = "gloo"
_REDUCTION: Final = "reduce_op"
_Kind: Any = dist.ReduceOp.RedOpType  # PyTorch's stubs lack its members

#: What gloo moves in place of any dtype, by the bytes of one element; complex128 as pairs.
_MOVED: Final = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
#: What gloo reduces itself.
_REDUCED: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
#: Wider integers of which the low bits are the result.
_WIDER: Final = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
#: Of truth values, which gloo would add as bytes.
_OF_BOOL: Final = {
    _Kind.SUM: _Kind.MAX,
    _Kind.MAX: _Kind.MAX,
    _Kind.BOR: _Kind.MAX,
    _Kind.PRODUCT: _Kind.MIN,
    _Kind.MIN: _Kind.MIN,
    _Kind.BAND: _Kind.MIN,
    _Kind.BXOR: _Kind.BXOR,
}
_LINEAR: Final = frozenset({_Kind.SUM, _Kind.AVG})


@dataclass
class Staged:
    """``arguments``: the operator's. ``begin``: starts it in another way than the operator. ``finish``: what is left to
    do when it has ended."""

    arguments: dict[str, Any]
    begin: Callable[[], dist.Work] | None = None
    actions: list[Callable[[], None]] = field(default_factory=list)

    def finish(self) -> None:
        with torch.no_grad():
            for action in self.actions:
                action()


def written(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that a collective writes to."""
    return [key for key in arguments if key.startswith("output")] or ["tensors"]


def stage(name: str, inner: Mapping[str, Any], group: dist.ProcessGroup, backend: str) -> Staged:
    """Raises ReductionUnsupported."""
    kind = _kind_of(inner[_REDUCTION]) if _REDUCTION in inner else None
    staged = Staged(dict(inner))
    results = written(name, inner)
    # Of a reduction to one rank, the others have no result.
    keeps = name == "reduce_" and inner["root_rank"] != group.rank()
    for key, value in inner.items():
        carry = functools.partial(
            _stage, kind=kind, backend=backend, staged=staged, is_result=key in results and not keeps
        )
        staged.arguments[key] = each(value, carry)
    if kind is not None and backend == _GLOO:
        tensors: list[Tensor] = []
        each(inner[results[0]], tensors.append)
        carried = _carried_kind(kind, tensors[0]) if tensors else kind
        if carried != kind:
            staged.begin = _reduction(name, staged.arguments, group, carried)
        if kind == _Kind.AVG and not keeps:
            # First of all, in the dtype that was added.
            averaged: list[Tensor] = []
            each(staged.arguments[results[0]], averaged.append)
            staged.actions.insert(0, lambda: _divide(averaged, group.size()))
    return staged


def each(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A tensor, or a list of them at any depth, with the function on each; anything else as it is."""
    if isinstance(value, Tensor):
        return function(value)
    return [each(part, function) for part in value] if isinstance(value, list | tuple) else value


def _stage(tensor: Tensor, kind: Any, backend: str, staged: Staged, is_result: bool) -> Tensor:
    carried = tensor.resolve_conj().resolve_neg()
    if backend == _GLOO:
        carried = _movable(carried) if kind is None else _reducible(carried, kind)
    carried = carried.contiguous()
    if is_result and carried.data_ptr() != tensor.data_ptr():
        back = carried.view(tensor.dtype) if carried.itemsize == tensor.itemsize else carried
        staged.actions.append(lambda: _copy(tensor, back))
    return carried


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_complex() and not source.is_complex():
        source = torch.view_as_complex(source)
    target.copy_(source)


def _movable(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor)
    return tensor.view(_MOVED[tensor.itemsize])


def _reducible(tensor: Tensor, kind: Any) -> Tensor:
    if tensor.dtype in _REDUCED:
        return tensor
    if tensor.dtype is torch.bool and kind in _OF_BOOL:
        return tensor.view(torch.uint8)
    if tensor.dtype in _WIDER:
        return tensor.to(_WIDER[tensor.dtype])
    if tensor.is_complex() and kind in _LINEAR:
        return torch.view_as_real(tensor)
    raise ReductionUnsupported(dtype=str(tensor.dtype), reduction=kind.name, backend=_GLOO, place="a reduction")


def _kind_of(reduction: Any) -> Any:
    """From what operators are given, which has the kind as a number."""
    return _Kind(int(reduction.op()))


def _carried_kind(kind: Any, tensor: Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return _OF_BOOL[kind]
    return _Kind.SUM if kind == _Kind.AVG else kind


def _divide(tensors: list[Tensor], count: int) -> None:
    """Averages of integers are rounded towards zero, as NCCL's."""
    for tensor in tensors:
        tensor.div_(count, rounding_mode=None if tensor.is_floating_point() else "trunc")


def _reduction(name: str, given: Mapping[str, Any], group: Any, kind: Any) -> Callable[[], dist.Work]:
    """Starts the operator with another reduction: operators take one that Python cannot make."""
    options_of, method, tensors = _REDUCTIONS[name]
    options: Any = options_of()
    options.reduceOp = dist.ReduceOp(kind)
    options.asyncOp = given["async_op"]
    if given["timeout"] >= 0:
        options.timeout = timedelta(milliseconds=given["timeout"])
    if name == "reduce_":
        options.rootRank, options.rootTensor = given["root_rank"], given["root_tensor"]
    return lambda: getattr(group, method)(*(given[key] for key in tensors), options)


#: Options, method of a group, and its tensors.
_REDUCTIONS: Final[dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]]] = {
    "allreduce_": (c10d.AllreduceOptions, "allreduce", ("tensors",)),
    "allreduce_coalesced_": (c10d.AllreduceCoalescedOptions, "allreduce_coalesced", ("tensors",)),
    "reduce_": (c10d.ReduceOptions, "reduce", ("tensors",)),
    "reduce_scatter_": (c10d.ReduceScatterOptions, "reduce_scatter", ("output_tensors", "input_tensors")),
    "_reduce_scatter_base_": (c10d.ReduceScatterOptions, "_reduce_scatter_base", ("output_tensor", "input_tensor")),
    "reduce_scatter_tensor_coalesced_": (
        c10d.ReduceScatterOptions,
        "reduce_scatter_tensor_coalesced",
        ("outputs", "inputs"),
    ),
}
