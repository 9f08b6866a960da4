"""Productions of control flow: loops with known and unknown trip counts, conditionals, calls, tuples; they may nest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flagos_backend.ir.attributes import CompareAttributes, WhileAttributes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from tools.fuzz.scope import INTEGERS, Scope, shape_of, type_of

E = ElementType
_MAX_DEPTH = 3

# Adds some random instructions to a scope; given by program.py, which knows all productions.
Fill = Callable[[Scope, int], None]


def while_loop(scope: Scope, fill: Fill) -> Instruction | None:
    """Counts up to a limit that is a constant or a carried value; the other carried values go through a random body."""
    if scope.depth >= _MAX_DEPTH:
        return None
    tape = scope.tape
    kind = tape.pick((E.S32, E.U32, E.S64, E.S8, E.U8))
    iterations, start, step = tape.pick((3, 0, 1, 2, 5)), tape.below(3), 1 + tape.below(2)
    # A limit that is met exactly: XLA's count of trips is one short of what a limit between two steps takes.
    limit = start + iterations * step
    known = not tape.chance(3)
    counter = scope.scalar(start, kind)
    bound = scope.scalar(limit, kind)
    if not known:  # no compiler looks through a barrier
        bound = scope.builder.add(Opcode.OPTIMIZATION_BARRIER, [bound])
    carried = [scope.operand() for _ in range(tape.below(4))]
    state = scope.builder.tuple([counter, bound, *carried])
    stops_early = tape.chance(4)
    body = _body(scope, state, kind, step, fill)
    condition = _condition(scope, state, stops_early)
    loop = scope.builder.add(Opcode.WHILE, [state], WhileAttributes(), called=[condition, body])
    for number in range(2, len(carried) + 2):
        scope.keep(scope.builder.element(loop, number))
    return scope.keep(scope.builder.element(loop, 0))


def _condition(scope: Scope, state: Instruction, stops_early: bool) -> Computation:
    """Whether the counter is below the bound and, to stop early, a predicate that is carried holds."""
    inner = Scope(scope.tape, "condition", scope)
    elements = _elements(inner, state)
    more = inner.builder.add(Opcode.COMPARE, elements[:2], CompareAttributes(Comparison.LT))
    predicates = [e for e in elements[2:] if shape_of(e) == ArrayShape(E.PRED)]
    if stops_early and predicates:
        more = inner.builder.add(Opcode.AND, [more, predicates[0]])
    return inner.builder.build(more)


def _body(scope: Scope, state: Instruction, kind: ElementType, step: int, fill: Fill) -> Computation:
    inner = Scope(scope.tape, "body", scope)
    counter, bound, *carried = _elements(inner, state)
    inner.values += [counter, *carried]
    fill(inner, scope.tape.below(5))
    advanced = inner.builder.add(Opcode.ADD, [counter, inner.scalar(step, kind)])
    results = [_next(inner, value) for value in carried]
    return inner.builder.build(inner.builder.tuple([advanced, bound, *results]))


def _next(scope: Scope, value: Instruction) -> Instruction:
    """What a carried value becomes: something of its shape, or a small change of it."""
    shape = shape_of(value)
    found = scope.find(lambda candidate: candidate == shape)
    if scope.tape.below(3) and found is not None and found is not value:
        return found
    if scope.tape.below(2) and shape.element_type in (*INTEGERS, E.F32, E.F64):
        return scope.builder.add(Opcode.ADD, [value, scope.like(shape)])
    return value


def _elements(scope: Scope, state: Instruction) -> list[Instruction]:
    """The elements of a tuple-shaped parameter like ``state``."""
    assert isinstance(state.shape, TupleShape)
    parameter = scope.builder.parameter(state.shape, "state")
    return [scope.builder.element(parameter, number) for number in range(len(state.shape.elements))]


def conditional(scope: Scope, fill: Fill) -> Instruction | None:
    """Two branches by a predicate, or up to four by a number, each with an operand of its own."""
    if scope.depth >= _MAX_DEPTH:
        return None
    tape = scope.tape
    count = 2 + tape.below(3)
    by_predicate = count == 2 and tape.below(2) == 0
    if by_predicate:
        selector = scope.like(ArrayShape(E.PRED))
    else:
        selector = scope.index(count)
        if type_of(selector) is not E.S32:
            selector = scope.builder.convert(selector, E.S32)
    results = [shape_of(scope.operand()) for _ in range(1 + tape.below(2))]
    operands, branches = [], []
    for number in range(count):
        passed = [scope.operand() for _ in range(tape.below(3))]
        operand = scope.builder.tuple(passed)
        operands.append(operand)
        branches.append(_branch(scope, f"branch{number}", operand, results, fill))
    chosen = scope.builder.add(Opcode.CONDITIONAL, [selector, *operands], called=branches)
    for number in range(1, len(results)):
        scope.keep(scope.builder.element(chosen, number))
    return scope.keep(scope.builder.element(chosen, 0))


def _branch(scope: Scope, name: str, operand: Instruction, results: Sequence[ArrayShape], fill: Fill) -> Computation:
    inner = Scope(scope.tape, name, scope)
    inner.values += _elements(inner, operand)
    fill(inner, scope.tape.below(4))
    return inner.builder.build(inner.builder.tuple([inner.like(shape) for shape in results]))


def call(scope: Scope, fill: Fill) -> Instruction | None:
    if scope.depth >= _MAX_DEPTH:
        return None
    arguments = [scope.operand() for _ in range(1 + scope.tape.below(2))]
    inner = Scope(scope.tape, "callee", scope)
    inner.values += [inner.builder.parameter(argument.shape) for argument in arguments]
    fill(inner, 1 + scope.tape.below(4))
    return scope.add(Opcode.CALL, arguments, called=[inner.builder.build(inner.values[-1])])
