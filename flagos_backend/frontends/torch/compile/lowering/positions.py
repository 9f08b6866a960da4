"""Minima and maxima with their positions. Like eager on the CPU, and JAX, they are the first of equal ones, and a NaN
is one."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array
from flagos_backend.frontends.torch.compile.lowering.table import Rule, lowering
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes, DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten
E = ElementType


def _found(emitter: Emitter, x: Instruction, dim: int, direction: Comparison) -> tuple[Instruction, Instruction]:
    """The minima or maxima of ``x`` along ``dim``, and their positions."""
    truth = array(x).element_type is E.PRED
    if truth:
        x = emitter.convert(x, E.S32)
    shape = array(x)
    kind = shape.element_type
    if not shape.rank or shape.dims[dim] == 0:
        raise NoLoweringError("ATen refuses minima and maxima of nothing, and a scalar has one place")
    greatest = direction is Comparison.GT
    if kind.is_float and kind.bits >= 16:
        initial: float = float("-inf") if greatest else float("inf")
    elif kind.is_integer:
        least = -(1 << (kind.bits - 1)) if kind.is_signed else 0
        initial = least if greatest else least + (1 << kind.bits) - 1
    else:
        raise NoLoweringError("positions of this type are ATen's")
    dim %= shape.rank
    places = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(dim), shape=ArrayShape(E.S64, shape.dims))
    along = DimensionsAttributes((dim,))
    both = emitter.builder.add(
        Opcode.REDUCE,
        [x, places, emitter.scalar(initial, kind), emitter.scalar(0, E.S64)],
        along,
        called=[_taken(direction, kind)],
    )
    # A reduction of its own: where nobody asks for positions, it is a minimum or maximum like others, as that of a
    # softmax.
    combiner = emitter.combiner(Opcode.MAXIMUM if greatest else Opcode.MINIMUM, kind)
    value = emitter.builder.add(Opcode.REDUCE, [x, emitter.scalar(initial, kind)], along, called=[combiner])
    return emitter.convert(value, E.PRED) if truth else value, emitter.builder.element(both, 1)


def _taken(direction: Comparison, kind: ElementType) -> Computation:
    """Which of two elements with their positions is taken."""
    builder = Builder(f"first_{direction.name.lower()}_{kind.name.lower()}")
    value, place, other, other_place = (builder.parameter(ArrayShape(t)) for t in (kind, E.S64, kind, E.S64))

    def compare(direction: Comparison, a: Instruction, b: Instruction) -> Instruction:
        return builder.add(Opcode.COMPARE, [a, b], CompareAttributes(direction))

    better = compare(direction, value, other)
    if kind.is_float:
        better = builder.add(Opcode.OR, [better, compare(Comparison.NE, value, value)])
    equal, before = compare(Comparison.EQ, value, other), compare(Comparison.LT, place, other_place)
    first = builder.add(Opcode.OR, [better, builder.add(Opcode.AND, [equal, before])])
    taken = [
        builder.add(Opcode.SELECT, [better, value, other]),
        builder.add(Opcode.SELECT, [first, place, other_place]),
    ]
    return builder.build(builder.tuple(taken))


def _position(direction: Comparison) -> Rule:
    def rule(
        emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int | None = None, keepdim: bool = False
    ) -> Instruction:
        if dim is None:
            x, dim = emitter.reshape(x, (array(x).num_elements,)), 0
        _, place = _found(emitter, x, dim, direction)
        return emitter.reshape(place, tuple(result.shape))

    return rule


def _both(direction: Comparison) -> Rule:
    def rule(
        emitter: Emitter, result: tuple[torch.Tensor, ...], x: Instruction, dim: int, keepdim: bool = False
    ) -> tuple[Instruction, ...]:
        found = _found(emitter, x, dim, direction)
        return tuple(emitter.reshape(one, tuple(like.shape)) for one, like in zip(found, result, strict=True))

    return rule


lowering(aten.argmax.default)(_position(Comparison.GT))
lowering(aten.argmin.default)(_position(Comparison.LT))
lowering(aten.max.dim)(_both(Comparison.GT))
lowering(aten.min.dim)(_both(Comparison.LT))
