"""Faults that a transform of loop nests could make, put into nests one by one: the mutants of mutation testing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.printer import has_numbers
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Literal, Load, Reduce, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

O = Opcode  # noqa: E741
INF = float("inf")
_ORDERED = frozenset({O.SUBTRACT, O.DIVIDE, O.REMAINDER, O.SELECT, O.SHIFT_LEFT, O.SHIFT_RIGHT_LOGICAL})
_OTHER = {
    O.ADD: O.SUBTRACT,
    O.SUBTRACT: O.ADD,
    O.MULTIPLY: O.ADD,
    O.MAXIMUM: O.MINIMUM,
    O.MINIMUM: O.MAXIMUM,
    O.XOR: O.AND,
    O.OR: O.AND,
    O.AND: O.OR,
}
_Make = Callable[[Expression, Moved, Pool], Expression]


def mutants(nests: Sequence[Region]) -> Iterator[tuple[str, list[Region]]]:
    """``nests`` with one fault each, and what kind of fault it is."""
    for number, nest in enumerate(nests):
        for kind, broken in _mutants(nest):
            yield kind, [*nests[:number], broken, *nests[number + 1 :]]
        if len(nests) > 1:
            yield "a nest that is dropped", [*nests[:number], *nests[number + 1 :]]


def _mutants(nest: Region) -> Iterator[tuple[str, Region]]:
    for d, size in enumerate(nest.dims):
        yield "a bound that is off by one", replace(nest, dims=(*nest.dims[:d], size - 1, *nest.dims[d + 1 :]))
    for number, store in enumerate(nest.stores):
        others = (nest.stores[:number], nest.stores[number + 1 :])
        moved = replace(store, index=replace(store.index, offset=store.index.offset - 1))
        yield "a store that is off by one", replace(nest, stores=(*others[0], moved, *others[1]))
        yield "a store that is dropped", replace(nest, stores=(*others[0], *others[1]))
    for expression in nest.expressions():
        for kind, make in _faults(expression, nest.dims):
            yield kind, replaced(nest, {expression}, make)


def _faults(expression: Expression, dims: Sequence[int]) -> Iterator[tuple[str, _Make]]:
    if isinstance(expression, Load):
        yield "a load that is off by one", lambda e, moved, pool: _moved_load(expression, 1)
        if any(step and size > 1 for step, size in zip(expression.index.coefficients, dims, strict=True)):
            yield "a load of one element", lambda e, moved, pool: _at_one_place(expression)
    elif isinstance(expression, Literal) and has_numbers(expression.element_type):
        yield "a wrong number", lambda e, moved, pool: _another(expression)
    elif isinstance(expression, Reduce):
        if expression.combine in _OTHER and _OTHER[expression.combine] is not O.SUBTRACT:
            yield (
                "another combination",
                lambda e, moved, pool: _reduction(expression, _OTHER[expression.combine], moved, pool),
            )
        if expression.combine is O.ADD:
            yield "another combination", lambda e, moved, pool: _reduction(expression, O.MAXIMUM, moved, pool)
    elif isinstance(expression, Apply):
        yield from _operation_faults(expression)


def _operation_faults(expression: Apply) -> Iterator[tuple[str, _Make]]:
    operands, opcode = expression.operands, expression.opcode
    if opcode in _OTHER and len(operands) == 2:
        yield (
            "another operation",
            lambda e, moved, pool: pool.apply(
                replace(expression, opcode=_OTHER[opcode], detail=""), tuple(moved[o] for o in operands)
            ),
        )
    if len(operands) < 2 or operands[-1] is operands[-2]:
        return
    if (opcode in _ORDERED and not expression.detail) or (
        opcode is O.COMPARE and expression.detail not in ("EQ", "NE")
    ):
        yield (
            "operands that are swapped",
            lambda e, moved, pool: pool.apply(
                expression, tuple(moved[o] for o in (*operands[:-2], operands[-1], operands[-2]))
            ),
        )
    if operands[0].element_type is operands[1].element_type:
        yield (
            "an operand in the place of another",
            lambda e, moved, pool: pool.apply(expression, tuple(moved[o] for o in (operands[1], *operands[1:]))),
        )


def _moved_load(load: Load, by: int) -> Load:
    return replace(load, index=replace(load.index, offset=load.index.offset + by))


def _at_one_place(load: Load) -> Load:
    return replace(load, index=Affine(load.index.offset, (0,) * len(load.index.coefficients), load.index.shifts))


def _another(literal: Literal) -> Literal:
    number = number_of(literal)
    return literal_of(20 if number in (INF, -INF) else 2 if number == 1 else 1, literal.element_type)


def _reduction(reduction: Reduce, combine: Opcode, moved: Moved, pool: Pool) -> Expression:
    return pool.reduce(
        replace(reduction, combine=combine), moved[reduction.value], moved[reduction.initial], reduction.dims
    )
