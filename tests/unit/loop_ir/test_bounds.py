"""Bounds of integers: random expressions stay within theirs for every operand, wrapping as the types do."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir import bounds
from flagos_backend.loop_ir.bounds import bounds_of
from flagos_backend.loop_ir.literals import literal_of
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Literal, Load

E = ElementType
O = Opcode  # noqa: E741
_TYPES = {E.S8: np.int8, E.U8: np.uint8, E.S16: np.int16, E.U16: np.uint16, E.S32: np.int32, E.PRED: np.bool_}
_INTEGERS = tuple(_TYPES)[:-1]
_BINARY = {
    O.ADD: np.add,
    O.SUBTRACT: np.subtract,
    O.MULTIPLY: np.multiply,
    O.MAXIMUM: np.maximum,
    O.MINIMUM: np.minimum,
    O.AND: np.bitwise_and,
    O.OR: np.bitwise_or,
}
Valued = tuple[Expression, np.ndarray]


def _load(kind: E, values: np.ndarray) -> Valued:
    array = Instruction(O.PARAMETER, ArrayShape(kind, values.shape), name="x")
    return Load(kind, array, Affine(0, (1,))), values.astype(_TYPES[kind])


def _literal(rng: np.random.Generator, kind: E) -> Valued:
    limits = np.iinfo(_TYPES[kind])
    number = int(rng.integers(limits.min, limits.max, endpoint=True)) if rng.random() < 0.3 else int(rng.integers(100))
    return literal_of(number, kind), np.full(256, number, _TYPES[kind])


def _random(rng: np.random.Generator, kind: E, depth: int) -> Valued:
    """An expression of ``kind``, and what it is for 256 values of what it loads."""
    if depth == 0 or rng.random() < 0.1:
        limits = np.iinfo(_TYPES[kind])
        spread = np.linspace(limits.min, limits.max, 256).astype(_TYPES[kind])
        return _load(kind, rng.permutation(spread)) if rng.random() < 0.6 else _literal(rng, kind)
    opcode = (*_BINARY, O.CLAMP, O.SELECT, O.CONVERT)[rng.integers(len(_BINARY) + 3)]
    if opcode is O.CONVERT:
        source = (*_INTEGERS, E.PRED)[rng.integers(len(_TYPES))]
        x, values = _load(source, rng.random(256) < 0.5) if source is E.PRED else _random(rng, source, depth - 1)
        return Apply(kind, opcode, (x,)), values.astype(_TYPES[kind])
    operands = [_random(rng, kind, depth - 1) for _ in range(3 if opcode in (O.CLAMP, O.SELECT) else 2)]
    expressions, (a, b, *c) = tuple(e for e, _ in operands), [v for _, v in operands]
    if opcode is O.CLAMP:
        return Apply(kind, opcode, expressions), np.minimum(np.maximum(a, b), c[0])
    if opcode is O.SELECT:
        condition, holds = _load(E.PRED, rng.random(256) < 0.5)
        return Apply(kind, opcode, (condition, *expressions[:2])), np.where(holds, a, b)
    with np.errstate(over="ignore"):
        return Apply(kind, opcode, expressions), _BINARY[opcode](a, b)


@pytest.mark.parametrize("kind", _INTEGERS)
def test_random_expressions_stay_within_their_bounds(kind: E, rng: np.random.Generator) -> None:
    narrow = 0
    for _ in range(400):
        value, found = _random(rng, kind, int(rng.integers(1, 5)))
        least, greatest = bounds_of(value)
        assert least <= found.min() and found.max() <= greatest, value
        limits = np.iinfo(_TYPES[kind])
        narrow += not isinstance(value, Literal) and (least > limits.min or greatest < limits.max)
    assert narrow > 20  # else nothing was looked at


def test_an_index_that_was_clamped() -> None:
    x, _ = _load(E.S32, np.zeros(1))
    clamped = Apply(E.S32, O.CLAMP, (literal_of(0, E.S32), x, literal_of(9, E.S32)))
    masked = Apply(E.S32, O.AND, (x, literal_of(7, E.S32)))
    assert bounds_of(Apply(E.S64, O.CONVERT, (clamped,))) == (0, 9)
    assert bounds_of(Apply(E.S32, O.ADD, (clamped, literal_of(3, E.S32)))) == (3, 12)
    assert bounds_of(masked) == (0, 7)


def test_floats_tell_nothing() -> None:
    array = Instruction(O.PARAMETER, ArrayShape(E.F32, (1,)), name="x")
    converted = Apply(E.S8, O.CONVERT, (Load(E.F32, array, Affine(0, (1,))),))
    assert bounds_of(converted) == (-128, 127)


def test_what_is_used_often_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects of three operands that are one: as many numbers as a tree of them has leaves would take."""
    looked_at: list[Expression] = []
    look = bounds._of_expression
    monkeypatch.setattr(
        bounds, "_of_expression", lambda value, *others: looked_at.append(value) or look(value, *others)
    )
    value: Expression = literal_of(5, E.S32)
    for _ in range(8):
        value = Apply(E.S32, O.CLAMP, (value, value, value))
    assert bounds_of(value) == (5, 5)
    assert len(looked_at) == 9
