"""Loads that start at run time become loads at one number each, the element's, which the nest computes: tiles read an
array at the numbers in a tile. Between fusion_policy.py and emit_takes.py.

Numbers are 32 bits wide where they are enough, which twice as many fit into a vector of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from flagos_backend.codegen.cpu.steps import array_of
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.bounds import bounds_of, bounds_of_type
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Region, Shift
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

_MAX_S32 = (1 << 31) - 1
# Each of their numbers is an S32.
_NARROW = frozenset(
    {ElementType.PRED, ElementType.S8, ElementType.U8, ElementType.S16, ElementType.U16, ElementType.S32}
)


def with_flat_addresses(region: Region) -> Region:
    """``region`` with each load that has shifts at ``start``, with no offset, coefficients, or other shift."""
    return replaced(region, [e for e in region.expressions() if isinstance(e, Load) and e.index.shifts], _flat)


def _flat(load: Expression, moved: Moved, pool: Pool) -> Expression:
    assert isinstance(load, Load), load
    guard = None if load.guard is None else moved[load.guard]
    last = array_of(load.source).num_elements - 1
    kind = ElementType.S32 if last <= _MAX_S32 else ElementType.S64
    offset = load.index.offset
    number: Expression | None = None
    if any(load.index.coefficients):
        number = Index(kind, replace(load.index, offset=0, shifts=()))
    for shift in load.index.shifts:
        term, ahead = _split(_as(kind, moved[shift.start], pool))
        if shift.factor != 1:
            term = _apply(pool, kind, Opcode.MULTIPLY, term, literal_of(shift.factor, kind))
        offset += ahead * shift.factor
        number = term if number is None else _apply(pool, kind, Opcode.ADD, number, term)
    assert number is not None
    if offset:
        least, greatest = bounds_of_type(kind)
        wrapped = (offset - least) % (greatest - least + 1) + least  # as the sum does
        number = _apply(pool, kind, Opcode.ADD, number, literal_of(wrapped, kind))
    index = Affine(0, (0,) * len(load.index.coefficients), (Shift(number, last),))
    return Load(load.element_type, load.source, index, guard)


def _as(kind: ElementType, start: Expression, pool: Pool) -> Expression:
    """A start as a number of type ``kind``. One that was widened to be clamped is clamped as it was."""
    if start.element_type is kind:
        return start
    if _is_widened(start):
        return _apply(pool, kind, Opcode.CONVERT, start.operands[0])
    if isinstance(start, Apply) and start.opcode is Opcode.CLAMP:
        low, wide, high = start.operands
        if (
            _is_widened(wide)
            and isinstance(low, Literal)
            and isinstance(high, Literal)
            and max(abs(int(number_of(low))), abs(int(number_of(high)))) <= _MAX_S32
        ):
            narrow = _apply(pool, kind, Opcode.CONVERT, wide.operands[0])
            least, greatest = (literal_of(int(number_of(limit)), kind) for limit in (low, high))
            return _apply(pool, kind, Opcode.CLAMP, least, narrow, greatest)
    return _apply(pool, kind, Opcode.CONVERT, start)


def _split(start: Expression) -> tuple[Expression, int]:
    """A number, and how far ahead of it ``start`` is: neighbours of an element then have all but the last addition in
    common."""
    if isinstance(start, Apply) and start.opcode is Opcode.ADD and not start.detail:
        for value, step in (start.operands, start.operands[::-1]):
            if isinstance(step, Literal):
                number = int(number_of(step))
                widest = bounds_of_type(start.element_type)
                least, greatest = bounds_of(value)
                if widest[0] <= least + number and greatest + number <= widest[1]:  # nothing wraps
                    return value, number
    return start, 0


def _is_widened(value: Expression) -> TypeGuard[Apply]:
    """Whether it is a number of few bits, converted."""
    is_converted = isinstance(value, Apply) and value.opcode is Opcode.CONVERT
    return is_converted and value.operands[0].element_type in _NARROW


def _apply(pool: Pool, element_type: ElementType, opcode: Opcode, *operands: Expression) -> Expression:
    if opcode is Opcode.CONVERT and operands[0].element_type is element_type:
        return operands[0]
    return pool.apply(Apply(element_type, opcode, ()), operands)
