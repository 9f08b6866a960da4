"""Computes all branches of a conditional and selects, where that costs less than the branch does (if-conversion).

A branch is a step of its own, on accelerators a node of a graph or a word that the host waits for; what is selected is
part of the loop or kernel around it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from flagos_backend.ir.attributes import CompareAttributes, ConstantAttributes, TupleIndexAttributes
from flagos_backend.ir.elementwise import is_complex_elementwise, is_elementwise
from flagos_backend.ir.functions import FUNCTIONS, FUNCTIONS_OF_TWO
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape, leaves
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape, index_in, users_of
from flagos_backend.passes.simplify_updates import MAX_UPDATES, is_decidable

# A kernel of more takes longer to compile than the branch in most programs takes to run.
MAX_INSTRUCTIONS = 128

# A function takes about as long as this many additions.
_FUNCTION_WEIGHT = 32
_FUNCTIONS = frozenset({*FUNCTIONS, *FUNCTIONS_OF_TWO}) - {Opcode.REMAINDER}

_FREE = frozenset(
    {
        *(Opcode.BROADCAST, Opcode.CONSTANT, Opcode.GET_TUPLE_ELEMENT, Opcode.IOTA, Opcode.PARAMETER),
        *(Opcode.RESHAPE, Opcode.TUPLE),
    }
)
_MOVES = frozenset(
    {
        *(Opcode.CONCATENATE, Opcode.DYNAMIC_SLICE, Opcode.DYNAMIC_UPDATE_SLICE, Opcode.GATHER, Opcode.PAD),
        *(Opcode.REVERSE, Opcode.SLICE, Opcode.TRANSPOSE),
    }
)


def convert_conditionals_to_selects(module: Module, operations: int) -> Module:
    """``module`` without the conditionals whose branches take ``operations`` on elements at most, all together.

    The branches become calls, which inline_calls puts in place. Loops, draws, communication and whatever else is no
    work of a generated kernel keeps its conditional.
    """
    work = _Work()

    def rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
        if instruction.opcode is not Opcode.CONDITIONAL or not _selectable(instruction.shape):
            return None
        updated = _updated(instruction)
        costs = [work.of_branch(branch, updated) for branch in instruction.called]
        if any(cost is None for cost in costs):
            return None
        counts, sizes = zip(*(cost for cost in costs if cost is not None), strict=True)
        kept = enumerate(leaves(instruction.shape))
        selected = (len(costs) - 1) * sum(leaf.num_elements for index, leaf in kept if index not in updated)
        if sum(counts) > MAX_INSTRUCTIONS or sum(sizes) + selected > operations:
            return None
        return _selected(instruction, emitter)

    return apply_rule(module, rule)


def _selectable(shape: Shape) -> bool:
    elements = shape.elements if isinstance(shape, TupleShape) else (shape,)
    return all(isinstance(e, ArrayShape) and e.element_type is not ElementType.TOKEN for e in elements)


def _updated(conditional: Instruction) -> dict[int, list[Instruction]]:
    """The updates that make each element of the result from one array, the same in all branches: simplify_updates
    chooses of what they write. Not those of arrays that are read as well before they are handed on."""
    found: dict[int, list[Instruction]] = {}
    users = [users_of(branch) for branch in conditional.called]
    for index, _ in enumerate(leaves(conditional.shape)):
        bases: set[tuple[int, int]] = set()
        found[index] = []
        for branch, argument, uses in zip(conditional.called, conditional.operands[1:], users, strict=True):
            value = branch.root.operands[index] if branch.root.opcode is Opcode.TUPLE else branch.root
            while is_decidable(value) and len(uses.get(id(value), ())) <= 1:
                found[index].append(value)
                value = value.operands[0]
            bases.add(_argument(value, branch, argument))
        if len(bases) > 1 or -1 in next(iter(bases)) or len(found[index]) > MAX_UPDATES:
            del found[index]
    return found


def _argument(value: Instruction, branch: Computation, argument: Instruction) -> tuple[int, int]:
    """What ``value`` is outside of the branch: an instruction, by its id, and the element of it, else 0. With -1 for
    what the branch itself makes."""
    (parameter,) = branch.parameters
    if value is parameter:
        return id(argument), 0
    index = index_in(value, parameter)
    if index < 0:
        return -1, -1
    return (id(argument.operands[index]), 0) if argument.opcode is Opcode.TUPLE else (id(argument), index)


def _selected(conditional: Instruction, emitter: Emitter) -> Instruction:
    selector, *arguments = conditional.operands
    results = [
        emitter.emit(Opcode.CALL, conditional.shape, [argument], called=(branch,), like=conditional)
        for branch, argument in zip(conditional.called, arguments, strict=True)
    ]
    hits = _hits(selector, len(results), emitter)

    def choice(values: list[Instruction]) -> Instruction:
        chosen = values[-1]
        for hit, value in zip(reversed(hits), reversed(values[:-1]), strict=True):
            chosen = emitter.emit(Opcode.SELECT, value.shape, [hit, value, chosen], like=conditional)
        return chosen

    if not isinstance(conditional.shape, TupleShape):
        return choice(results)
    elements = [
        choice([_element(result, index, shape, emitter) for result in results])
        for index, shape in enumerate(conditional.shape.elements)
    ]
    return emitter.emit(Opcode.TUPLE, conditional.shape, elements, like=conditional)


def _hits(selector: Instruction, branches: int, emitter: Emitter) -> list[Instruction]:
    """Of each branch but the last, which is that of all numbers out of range, whether it is taken."""
    if array_shape(selector).element_type is ElementType.PRED:
        return [selector]
    hits = []
    for number in range(branches - 1):
        data = ConstantAttributes(np.int32(number).tobytes())
        constant = emitter.emit(Opcode.CONSTANT, selector.shape, (), data, like=selector)
        equal = CompareAttributes(Comparison.EQ)
        hits.append(
            emitter.emit(Opcode.COMPARE, ArrayShape(ElementType.PRED), [selector, constant], equal, like=selector)
        )
    return hits


def _element(value: Instruction, index: int, shape: Shape, emitter: Emitter) -> Instruction:
    return emitter.emit(Opcode.GET_TUPLE_ELEMENT, shape, [value], TupleIndexAttributes(index), like=value)


class _Work:
    """What computations cost where all of it is computed: instructions and operations on elements, None for what is
    not."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Computation, tuple[int, int] | None]] = {}  # ids are unique among living objects

    def of_computation(self, computation: Computation) -> tuple[int, int] | None:
        known = self._known.get(id(computation))
        if known is None:
            known = self._known[id(computation)] = (computation, self._sum(computation))
        return known[1]

    def of_branch(self, branch: Computation, updated: dict[int, list[Instruction]]) -> tuple[int, int] | None:
        """As of_computation, where the updates in ``updated`` cost what they write."""
        return self._sum(branch, {id(update) for updates in updated.values() for update in updates})

    def _sum(self, computation: Computation, updates: Collection[int] = ()) -> tuple[int, int] | None:
        count = size = 0
        for instruction in computation.instructions:
            cost = self._of_update(instruction) if id(instruction) in updates else self._of(instruction)
            if cost is None:
                return None
            count, size = count + cost[0], size + cost[1]
        return count, size

    def _of_update(self, instruction: Instruction) -> tuple[int, int] | None:
        if any(self.of_computation(combines) is None for combines in instruction.called):
            return None
        # What is written, what is there, and the choice between them.
        return 1, 3 * sum(array_shape(operand).num_elements for operand in instruction.operands[1:])

    def _of(self, instruction: Instruction) -> tuple[int, int] | None:
        opcode = instruction.opcode
        if opcode in _FREE:
            return 0, 0
        if opcode is Opcode.CALL:
            return self.of_computation(instruction.called[0])
        if opcode in (Opcode.REDUCE, Opcode.SCATTER):
            size = sum(array_shape(operand).num_elements for operand in instruction.operands)
            return None if self.of_computation(instruction.called[0]) is None else (1, size)
        if opcode in _MOVES or is_elementwise(instruction) or is_complex_elementwise(instruction):
            return 1, array_shape(instruction).num_elements * (_FUNCTION_WEIGHT if opcode in _FUNCTIONS else 1)
        return None
