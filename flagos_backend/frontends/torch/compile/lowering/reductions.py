"""Sums, means, minima, maxima, truth and counts over dimensions. 16-bit floats are summed in float32, as ATen does."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import Rule, lowering
from flagos_backend.ir.attributes import (
    CompareAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    WindowAttributes,
    WindowDimension,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten
E = ElementType
Dims = Sequence[int] | int | None


def _dimensions(x: Instruction, dims: Dims) -> tuple[int, ...]:
    """Which dimensions are reduced; all of them when none is named."""
    rank = array(x).rank
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(rank))
    named = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({d % rank for d in named})) if rank else ()


def _reduce(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Dims, opcode: Opcode, initial: float
) -> Instruction:
    """``x`` reduced, in its own type, in the shape of the result."""
    kind = array(x).element_type
    reduced = emitter.builder.add(
        Opcode.REDUCE,
        [x, emitter.scalar(initial, kind)],
        DimensionsAttributes(_dimensions(x, dims)),
        called=[emitter.combiner(opcode, kind)],
    )
    return emitter.reshape(reduced, tuple(result.shape))


def _sum(emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Dims) -> Instruction:
    kind = element_type(result)
    if kind.is_complex or (kind.is_float and kind.bits < 16) or kind is E.PRED:
        raise NoLoweringError("sums of this type are ATen's")
    if array(x).element_type.is_float and kind.is_integer:
        raise NoLoweringError("what is out of range is ATen's to say")
    wide = E.F32 if kind in (E.F16, E.BF16) else kind
    return _reduce(emitter, result, emitter.convert(x, wide), dims, Opcode.ADD, 0)


@lowering(aten.sum.default, aten.sum.dim_IntList)
def _sum_rule(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Dims = None, *_: Any, **__: Any
) -> Instruction:
    kind = element_type(result)
    if kind in (E.F16, E.BF16):  # what is added up is rounded first
        x = emitter.cast(x, result)
    return emitter.convert(_sum(emitter, result, x, dims), kind)


@lowering(aten.mean.default, aten.mean.dim)
def _mean(emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Dims = None, *_: Any, **__: Any) -> Instruction:
    total = _sum(emitter, result, x, dims)
    count = prod(array(x).dims[d] for d in _dimensions(x, dims))
    kind = array(total).element_type
    mean = emitter.add(Opcode.DIVIDE, total, emitter.operand(float(count), kind, tuple(result.shape)))
    return emitter.convert(mean, element_type(result))


@lowering(aten.prod.default, aten.prod.dim_int)
def _prod(emitter: Emitter, result: torch.Tensor, x: Instruction, dim: Dims = None, *_: Any, **__: Any) -> Instruction:
    kind = element_type(result)
    if kind.is_complex or (kind.is_float and kind.bits < 16) or kind is E.PRED:
        raise NoLoweringError("products of this type are ATen's")
    if array(x).element_type.is_float and kind.is_integer:
        raise NoLoweringError("what is out of range is ATen's to say")
    wide = E.F32 if kind in (E.F16, E.BF16) else kind
    x = emitter.convert(emitter.cast(x, result), wide)
    return emitter.convert(_reduce(emitter, result, x, dim, Opcode.MULTIPLY, 1), kind)


def _min_max(opcode: Opcode, largest: bool) -> Rule:
    def rule(
        emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Dims = None, keep: bool = False
    ) -> Instruction:
        if any(array(x).dims[d] == 0 for d in _dimensions(x, dims)):
            raise NoLoweringError("ATen refuses minima and maxima of nothing")
        kind = array(x).element_type
        if kind.is_float and kind.bits >= 16:
            initial: float = float("-inf") if largest else float("inf")
        elif kind.is_integer:
            info = torch.iinfo(result.dtype)
            initial = info.min if largest else info.max
        else:
            raise NoLoweringError("minima and maxima of this type are ATen's")
        return _reduce(emitter, result, x, dims, opcode, initial)

    return rule


lowering(aten.amax.default, aten.max.default)(_min_max(Opcode.MAXIMUM, largest=True))
lowering(aten.amin.default, aten.min.default)(_min_max(Opcode.MINIMUM, largest=False))


def _truth(opcode: Opcode, initial: bool) -> Rule:
    def rule(
        emitter: Emitter, result: torch.Tensor, x: Instruction, dims: Dims = None, keep: bool = False
    ) -> Instruction:
        if array(x).element_type.is_complex or result.dtype is not torch.bool:
            raise NoLoweringError("the truth of this type is ATen's")
        return _reduce(emitter, result, emitter.convert(x, E.PRED), dims, opcode, initial)

    return rule


lowering(aten.any.default, aten.any.dim)(_truth(Opcode.OR, False))
lowering(aten.all.default, aten.all.dim)(_truth(Opcode.AND, True))


class _Reduction(enum.IntEnum):
    """ATen's numbers for what a loss does with its terms."""

    NONE = 0
    MEAN = 1
    SUM = 2


@lowering(aten.mse_loss.default)
def _mse_loss(
    emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction, reduction: int = _Reduction.MEAN
) -> Instruction:
    kind = _same_float(x, y)
    difference = emitter.add(Opcode.SUBTRACT, x, y)
    square = emitter.add(Opcode.MULTIPLY, difference, difference)
    if reduction == _Reduction.NONE:
        return square
    total = _reduce(emitter, result, square, None, Opcode.ADD, 0)
    if reduction == _Reduction.SUM:
        return total
    return emitter.add(Opcode.DIVIDE, total, emitter.scalar(float(array(x).num_elements), kind))


@lowering(aten.mse_loss_backward.default)
def _mse_loss_backward(
    emitter: Emitter, result: torch.Tensor, gradient: Instruction, x: Instruction, y: Instruction, reduction: int
) -> Instruction:
    kind, dims = _same_float(x, y), array(x).dims
    if array(gradient).element_type is not kind:
        raise NoLoweringError("the gradient is of another type")
    factor = 2.0 / array(x).num_elements if reduction == _Reduction.MEAN else 2.0
    scaled = emitter.add(Opcode.MULTIPLY, emitter.add(Opcode.SUBTRACT, x, y), emitter.operand(factor, kind, dims))
    return emitter.add(Opcode.MULTIPLY, scaled, emitter.expand(gradient, dims))


def _same_float(x: Instruction, y: Instruction) -> ElementType:
    kind = array(x).element_type
    if kind not in (E.F32, E.F64) or array(y) != array(x):
        raise NoLoweringError("other types and sizes are ATen's")
    return kind


@lowering(aten.histc.default)
def _histc(
    emitter: Emitter, result: torch.Tensor, x: Instruction, bins: int = 100, low: float = 0, high: float = 0
) -> Instruction:
    """Of integers, which devices count and the host's operator refuses."""
    if not array(x).element_type.is_integer or not int(low) < int(high):
        raise NoLoweringError("floats are the host's to count, and so is what has the limits of its data")
    count, low, high = prod(array(x).dims), int(low), int(high)
    values = emitter.reshape(emitter.convert(x, E.S64), (count,))

    def number(value: int) -> Instruction:
        return emitter.operand(value, E.S64, (count,))

    def compare(direction: Comparison, a: Instruction, b: Instruction) -> Instruction:
        return emitter.builder.add(Opcode.COMPARE, [a, b], CompareAttributes(direction))

    scaled = emitter.add(Opcode.MULTIPLY, emitter.add(Opcode.SUBTRACT, values, number(low)), number(bins))
    places = emitter.add(Opcode.MINIMUM, emitter.add(Opcode.DIVIDE, scaled, number(high - low)), number(bins - 1))
    outside = emitter.add(
        Opcode.OR, compare(Comparison.LT, values, number(low)), compare(Comparison.GT, values, number(high))
    )
    places = emitter.add(Opcode.SELECT, outside, number(-1), places)
    numbers = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(1), shape=ArrayShape(E.S64, (count, bins)))
    falls = compare(Comparison.EQ, emitter.builder.broadcast(places, (count, bins), [0]), numbers)
    counts = _reduce(emitter, result, emitter.convert(falls, E.S64), 0, Opcode.ADD, 0)
    return emitter.convert(counts, element_type(result))


@lowering(aten.max_pool2d.default)
def _max_pool(
    emitter: Emitter,
    result: torch.Tensor,
    x: Instruction,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil: bool = False,
) -> Instruction:
    """Windows over the last two dimensions; how many is known from the result. Behind the padding that they need is
    more where the last ones hang over."""
    shape, window = array(x), [WindowDimension(1)] * (result.dim() - 2)
    if not shape.element_type.is_float or shape.element_type.bits < 16:
        raise NoLoweringError("maxima of this type are ATen's")
    for number in range(2):
        width, step, low, between = (_of_two(v, number) for v in (size, stride or size, padding, dilation))
        reach = (result.shape[number - 2] - 1) * step + (width - 1) * between + 1
        high = max(reach - shape.dims[number - 2] - low, 0)
        window.append(WindowDimension(width, step, low, high, between))
    least = emitter.scalar(-torch.inf, shape.element_type)
    combiner = emitter.combiner(Opcode.MAXIMUM, shape.element_type)
    return emitter.builder.add(Opcode.REDUCE_WINDOW, [x, least], WindowAttributes(tuple(window)), called=[combiner])


def _of_two(values: Sequence[int], number: int) -> int:
    """Of both dimensions, or of each."""
    return values[number] if len(values) > 1 else values[0]
