"""Operators that make a tensor of nothing, filled, counting or with a diagonal, and triangles of matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import Rule, lowering
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten


def _filled(emitter: Emitter, result: torch.Tensor, value: complex) -> Instruction:
    emitter.refuse_overflow(value, element_type(result))
    return emitter.operand(value, element_type(result), tuple(result.shape))


@lowering(aten.full.default, aten.new_full.default)
def _full(emitter: Emitter, result: torch.Tensor, like: Any, *args: Any, **_: Any) -> Instruction:
    return _filled(emitter, result, args[-1])


@lowering(aten.full_like.default, aten.fill.Scalar)
def _full_like(emitter: Emitter, result: torch.Tensor, like: Instruction, value: complex, **_: Any) -> Instruction:
    return _filled(emitter, result, value)


@lowering(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten._efficientzerotensor.default)
def _zeros(emitter: Emitter, result: torch.Tensor, *_: Any, **__: Any) -> Instruction:
    return _filled(emitter, result, 0)


@lowering(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(emitter: Emitter, result: torch.Tensor, *_: Any, **__: Any) -> Instruction:
    return _filled(emitter, result, 1)


@lowering(aten.scalar_tensor.default)
def _scalar_tensor(emitter: Emitter, result: torch.Tensor, value: complex, **_: Any) -> Instruction:
    return _filled(emitter, result, value)


# Elements of what is a constant of a program.
_MAX_CONSTANT = 65_536


def _triangle(make: Callable[..., torch.Tensor]) -> Rule:
    """Places of a triangle, which are known when a program is made."""

    def rule(emitter: Emitter, result: torch.Tensor, rows: int, columns: int, offset: int = 0, **_: Any) -> Instruction:
        if result.numel() > _MAX_CONSTANT or element_type(result) not in _COUNTED:
            raise NoLoweringError("large constants are made where programs run")
        return emitter.builder.constant(make(rows, columns, offset, dtype=result.dtype, device="cpu").numpy())

    return rule


lowering(aten.tril_indices.default)(_triangle(torch.tril_indices))
lowering(aten.triu_indices.default)(_triangle(torch.triu_indices))


def _beside_diagonal(emitter: Emitter, dims: tuple[int, ...], direction: Comparison, diagonal: int) -> Instruction:
    """Of matrices of ``dims``: whether column - row stands in that relation to ``diagonal``, without an overflow."""
    *_, rows, columns = dims
    diagonal = max(-rows - 1, min(diagonal, columns + 1))
    shape = ArrayShape(ElementType.S64, (rows, columns))
    row, column = (emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(d), shape=shape) for d in range(2))
    place = emitter.add(Opcode.ADD, row, emitter.operand(diagonal, ElementType.S64, shape.dims))
    return emitter.expand(emitter.builder.add(Opcode.COMPARE, [column, place], CompareAttributes(direction)), dims)


def _part(direction: Comparison) -> Rule:
    """The elements on one side of a diagonal, the others zero."""

    def rule(emitter: Emitter, result: torch.Tensor, x: Instruction, diagonal: int = 0) -> Instruction:
        kind, dims = array(x).element_type, array(x).dims
        if len(dims) < 2:
            raise NoLoweringError("ATen refuses what is no matrix")
        zero = emitter.operand(0, kind, dims)
        if not result.numel():
            return zero
        return emitter.add(Opcode.SELECT, _beside_diagonal(emitter, dims, direction, diagonal), x, zero)

    return rule


lowering(aten.tril.default)(_part(Comparison.LE))
lowering(aten.triu.default)(_part(Comparison.GE))


@lowering(aten.eye.default, aten.eye.m)
def _eye(emitter: Emitter, result: torch.Tensor, *_: Any, **__: Any) -> Instruction:
    kind, dims = element_type(result), tuple(result.shape)
    if kind.is_complex:
        raise NoLoweringError("complex numbers are not made of truth values")
    if not result.numel():
        return emitter.operand(0, kind, dims)
    return emitter.convert(_beside_diagonal(emitter, dims, Comparison.EQ, 0), kind)


_COUNTED = frozenset({ElementType.S32, ElementType.S64})


@lowering(aten.arange.default)
def _arange_to(emitter: Emitter, result: torch.Tensor, end: float, **_: Any) -> Instruction:
    return _counted(emitter, result, 0, 1)


@lowering(aten.arange.start)
def _arange_from(emitter: Emitter, result: torch.Tensor, start: float, end: float, **_: Any) -> Instruction:
    return _counted(emitter, result, start, 1)


@lowering(aten.arange.start_step, torch.ops.prims.iota.default)
def _arange_by(emitter: Emitter, result: torch.Tensor, start: float, *args: Any, **options: Any) -> Instruction:
    if "step" in options:  # prims.iota(length, *, start, step)
        return _counted(emitter, result, options["start"], options["step"])
    return _counted(emitter, result, start, args[1] if len(args) > 1 else 1)


def _counted(emitter: Emitter, result: torch.Tensor, start: float, step: float) -> Instruction:
    kind = element_type(result)
    if kind not in _COUNTED or not isinstance(start, int) or not isinstance(step, int):
        raise NoLoweringError("other types than int32 and int64 are rounded by ATen's rule")
    shape = ArrayShape(kind, tuple(result.shape))
    counted = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(0), shape=shape)
    if step != 1:
        counted = emitter.add(Opcode.MULTIPLY, counted, emitter.operand(step, kind, shape.dims))
    if start != 0:
        counted = emitter.add(Opcode.ADD, counted, emitter.operand(start, kind, shape.dims))
    return counted
