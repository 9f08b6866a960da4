"""Holds a loop nest to its rules: indices within arrays, types and numbers of operands, what may vary along what."""

from __future__ import annotations

from itertools import pairwise

from flagos_backend.errors import LoopNestInvalid
from flagos_backend.ir.elementwise import COMBINES
from flagos_backend.ir.functions import FUNCTIONS
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.intrinsics import OPERANDS
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Store

_PRED = ElementType.PRED
_UNARY = frozenset(
    {
        *FUNCTIONS,
        *(Opcode.ABS, Opcode.NEGATE, Opcode.SIGN, Opcode.NOT, Opcode.POPCNT, Opcode.CLZ, Opcode.CONVERT),
        *(Opcode.BITCAST_CONVERT, Opcode.IS_FINITE, Opcode.REAL, Opcode.IMAG),
    }
)
_TERNARY = frozenset({Opcode.SELECT, Opcode.CLAMP})
# The result has another type than the operands, or they have several.
_MIXED = frozenset(
    {
        *(Opcode.CONVERT, Opcode.BITCAST_CONVERT, Opcode.IS_FINITE, Opcode.COMPARE, Opcode.SELECT),
        *(Opcode.REAL, Opcode.IMAG, Opcode.COMPLEX, Opcode.ABS),
    }
)
_DIRECTIONS = frozenset(comparison.value for comparison in Comparison)


def verify_loop_nest(region: Region) -> None:
    """Raises LoopNestInvalid naming the first expression or store that breaks a rule, and the rule."""
    if any(size < 0 for size in region.dims):
        _broken(region, "the nest", f"dimensions {region.dims} must not be negative")
    if not region.stores:
        _broken(region, "the nest", "it stores nothing")
    for expression in region.expressions():
        rule = _rule_broken(region, expression)
        if rule:
            _broken(region, describe(expression), rule)
    for store in region.stores:
        rule = _store_rule_broken(region, store)
        if rule:
            _broken(region, f"the store into %{store.target.name}", rule)


def describe(expression: Expression) -> str:
    """An expression in one line, without what it is made of."""
    kind = expression.element_type.name.lower()
    if isinstance(expression, Load):
        return f"{kind} load of %{expression.source.name}"
    if isinstance(expression, Literal):
        return f"{kind} literal"
    if isinstance(expression, Index):
        return f"{kind} index"
    if isinstance(expression, Reduce):
        return f"{kind} reduction by {expression.combine} over dimensions {list(expression.dims)}"
    form = f" ({expression.detail})" if expression.detail else ""
    return f"{kind} {expression.opcode}{form}"


def _broken(region: Region, place: str, rule: str) -> None:
    targets = ", ".join(dict.fromkeys(f"%{store.target.name}" for store in region.stores))
    dims = "x".join(map(str, region.dims))
    raise LoopNestInvalid(rule=rule, place=f"{place}, in the loop nest of {dims or 'one'} points that makes {targets}")


def _rule_broken(region: Region, expression: Expression) -> str | None:
    if isinstance(expression, Load):
        return _load_rule_broken(region, expression)
    if isinstance(expression, Literal):
        size = expression.element_type.bytes
        return None if len(expression.data) == size else f"a literal has {size} bytes, not {len(expression.data)}"
    if isinstance(expression, Index):
        if not expression.element_type.is_integer and not expression.element_type.is_float:
            return "an index is a number"
        return _index_rule_broken(region, expression.value)
    return (
        _reduction_rule_broken(region, expression) if isinstance(expression, Reduce) else _apply_rule_broken(expression)
    )


def _load_rule_broken(region: Region, load: Load) -> str | None:
    source = load.source.shape
    if not isinstance(source, ArrayShape):
        return "what is loaded is no array"
    if load.element_type is not source.element_type:
        return f"the array is of {source.element_type.name.lower()}"
    if load.guard is not None:
        if load.guard.element_type is not _PRED:
            return "a guard is a predicate"
        return _index_rule_broken(region, load.index)
    return _index_rule_broken(region, load.index) or _bounds_rule_broken(region, load.index, source)


def _store_rule_broken(region: Region, store: Store) -> str | None:
    target = store.target.shape
    if not isinstance(target, ArrayShape):
        return "what is stored to is no array"
    if store.value.element_type is not target.element_type:
        return f"the value is {store.value.element_type.name.lower()}, the array {target.element_type.name.lower()}"
    rule = _index_rule_broken(region, store.index) or _bounds_rule_broken(region, store.index, target)
    if rule:
        return rule
    unplaced = region.reach[store.value] - region.along(store.index)
    repeated = [d for d in sorted(unplaced) if region.dims[d] > 1]
    return f"the value varies along the dimensions {repeated}, the place does not" if repeated else None


def _index_rule_broken(region: Region, index: Affine) -> str | None:
    if len(index.coefficients) != region.rank:
        return f"an index has a coefficient for each of {region.rank} dimensions, not {len(index.coefficients)}"
    for shift in index.shifts:
        if shift.start.element_type not in (ElementType.S32, ElementType.S64):
            return f"a start is s32 or s64, not {shift.start.element_type.name.lower()}"
        if shift.limit < 0:
            return f"a start lies between 0 and its limit, which is {shift.limit}"
    return None


def _bounds_rule_broken(region: Region, index: Affine, array: ArrayShape) -> str | None:
    """Whatever the starts are, each point's element is one of the array."""
    if 0 in region.dims:
        return None
    steps = [c * (size - 1) for c, size in zip(index.coefficients, region.dims, strict=True)]
    steps += [shift.factor * shift.limit for shift in index.shifts]
    least = index.offset + sum(step for step in steps if step < 0)
    greatest = index.offset + sum(step for step in steps if step > 0)
    if least < 0 or greatest >= array.num_elements:
        return f"elements {least} to {greatest} of an array of {array.num_elements}"
    return None


def _reduction_rule_broken(region: Region, reduction: Reduce) -> str | None:
    if reduction.combine not in COMBINES:
        return f"nothing is reduced by {reduction.combine}"
    if (
        not reduction.dims
        or any(not 0 <= d < region.rank for d in reduction.dims)
        or any(a >= b for a, b in pairwise(reduction.dims))
    ):
        return f"the dimensions must be some of {region.rank}, in order"
    if (
        reduction.value.element_type is not reduction.element_type
        or reduction.initial.element_type is not reduction.element_type
    ):
        kinds = f"{reduction.value.element_type.name.lower()} and {reduction.initial.element_type.name.lower()}"
        return f"what is reduced, and what it begins with, have the result's type, not {kinds}"
    varying = [d for d in sorted(region.reach[reduction.initial]) if region.dims[d] > 1]
    return f"what it begins with varies along the dimensions {varying}" if varying else None


def _apply_rule_broken(expression: Apply) -> str | None:
    opcode, detail, operands = expression.opcode, expression.detail, expression.operands
    if opcode is Opcode.COMPARE:
        if detail not in _DIRECTIONS:
            return f"there is no comparison {detail!r}"
    elif detail:
        wanted = OPERANDS.get((opcode, detail))
        if wanted is None:
            return "there is no such form of the operation"
        if len(operands) != wanted:
            return f"it takes {wanted} operands, not {len(operands)}"
        return _same_type_rule_broken(expression)
    wanted = 1 if opcode in _UNARY else 3 if opcode in _TERNARY else 2
    if len(operands) != wanted:
        return f"it takes {wanted} operands, not {len(operands)}"
    kinds = [operand.element_type for operand in operands]
    same = kinds[1:] if opcode is Opcode.SELECT else kinds
    if len(set(same)) != 1:
        return f"its operands are {', '.join(kind.name.lower() for kind in kinds)}"
    if opcode in (Opcode.COMPARE, Opcode.IS_FINITE) and expression.element_type is not _PRED:
        return "its result is a predicate"
    if opcode is Opcode.SELECT and (kinds[0] is not _PRED or kinds[1] is not expression.element_type):
        return f"it chooses by a predicate, between its own type, not by {kinds[0].name.lower()}"
    return None if opcode in _MIXED else _same_type_rule_broken(expression)


def _same_type_rule_broken(expression: Apply) -> str | None:
    kinds = [operand.element_type for operand in expression.operands]
    same = all(kind is expression.element_type for kind in kinds)
    return None if same else f"its operands are {', '.join(dict.fromkeys(kind.name.lower() for kind in kinds))}"
