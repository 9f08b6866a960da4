"""Joins two operations of which only the second reads the first: one pass of a tile, nothing between them in memory.

First the idiom (x << k) | (x >> bits - k), of which hashes are made, becomes a rotation. For the host CPU, just before
a region is written down: between emitter.py and encoding.py, which numbers what comes out of here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flagos_backend.codegen.cpu.bytecode import FLOAT_PAIRS, INTEGER_PAIRS
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import SUBTRACTED, Intrinsic
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite

_FLOATS = frozenset({ElementType.F32, ElementType.F64})
_INTEGERS = frozenset({ElementType.U32, ElementType.U64})
_COMMUTATIVE = frozenset({Opcode.ADD, Opcode.MULTIPLY, Opcode.AND, Opcode.OR, Opcode.XOR})


# The number of a pair by the opcode of its second operation and the detail of the joined one.
_FLOAT_NUMBERS = {(pair.second, pair.detail): number for number, pair in enumerate(FLOAT_PAIRS)}
_INTEGER_NUMBERS = {(pair.second, pair.detail): number for number, pair in enumerate(INTEGER_PAIRS)}


def pair_number(expression: Apply) -> int | None:
    """The number of a joined operation, whose three operands are those of the first and the other of the second."""
    table = _table(expression.element_type)
    return table.get((expression.opcode, expression.detail)) if len(expression.operands) == 3 else None


def _table(element_type: ElementType) -> dict[tuple[Opcode, str], int]:
    return _FLOAT_NUMBERS if element_type in _FLOATS else _INTEGER_NUMBERS if element_type in _INTEGERS else {}


def with_rotations(region: Region) -> Region:
    """``region`` with each (x << k) | (x >> bits - k) as one operation; the shifts may also be added or xored."""
    rotations = {e: found for e in region.expressions() if (found := _rotation(e)) is not None}
    if not rotations:
        return region
    pool = Pool()
    moved: dict[Expression, Expression] = {}

    def replace(expression: Expression) -> Expression | None:
        if expression not in rotations:
            return None
        value, amount = rotations[expression]
        shift = Apply(value.element_type, Opcode.SHIFT_LEFT, (), Intrinsic.ROTATE)
        return pool.apply(shift, (moved[value], moved[amount]))

    return _rewritten(region, pool, moved, replace)


def _rewritten(
    region: Region,
    pool: Pool,
    moved: dict[Expression, Expression],
    replace: Callable[[Expression], Expression | None],
) -> Region:
    rewrite(region.expressions(), pool, lambda index: index, lambda dims: dims, replace, moved)
    return Region(region.dims, tuple(Store(s.target, moved[s.value], s.index) for s in region.stores))


def _rotation(expression: Expression) -> tuple[Expression, Literal] | None:
    """What is rotated to the left, and by how much."""
    if not isinstance(expression, Apply) or expression.element_type not in _INTEGERS:
        return None
    if expression.opcode not in (Opcode.OR, Opcode.XOR, Opcode.ADD):
        return None
    by_opcode = {o.opcode: o for o in expression.operands if isinstance(o, Apply) and not o.detail}
    left, right = by_opcode.get(Opcode.SHIFT_LEFT), by_opcode.get(Opcode.SHIFT_RIGHT_LOGICAL)
    if left is None or right is None or left.operands[0] is not right.operands[0]:
        return None
    amount, back = left.operands[1], right.operands[1]
    if not isinstance(amount, Literal) or not isinstance(back, Literal):
        return None
    sizes = int.from_bytes(amount.data, "little"), int.from_bytes(back.data, "little")
    return (left.operands[0], amount) if min(sizes) > 0 and sum(sizes) == expression.element_type.bits else None


def with_pairs(region: Region, varies: Mapping[Expression, bool]) -> Region:
    """``region`` with operations joined where nothing else reads the first of two. ``varies``, in a loop over rows:
    whether an expression varies within a row; what does not is computed once for it, and not joined with what does."""
    pairs = _pairs(region, varies)
    if not pairs:
        return region
    pool = Pool()
    moved: dict[Expression, Expression] = {}

    def replace(expression: Expression) -> Expression | None:
        found = pairs.get(expression)
        if found is None or not isinstance(expression, Apply):
            return None
        first, other, detail = found
        like = Apply(expression.element_type, expression.opcode, (), detail)
        return pool.apply(like, (*(moved[operand] for operand in first.operands), moved[other]))

    return _rewritten(region, pool, moved, replace)


def _pairs(region: Region, varies: Mapping[Expression, bool]) -> dict[Expression, tuple[Apply, Expression, str]]:
    """By the second operation: the first, the second's other operand, and the ``detail`` of the two as one."""
    found: dict[Expression, tuple[Apply, Expression, str]] = {}
    for second in region.expressions():
        table = _table(second.element_type)
        if not isinstance(second, Apply) or len(second.operands) != 2 or second.detail:
            continue
        for first, other in (second.operands, second.operands[::-1]):
            if not isinstance(first, Apply) or first in found or region.uses[first] != 1 or len(first.operands) != 2:
                continue
            detail = first.detail or str(first.opcode)
            if first is second.operands[1] and second.opcode not in _COMMUTATIVE:
                detail += SUBTRACTED
            if (second.opcode, detail) in table and varies.get(first) == varies.get(second):
                found[second] = first, other, detail
                break
    return found
