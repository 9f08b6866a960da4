"""Computes before a loop what is the same in each of its iterations and costs a kernel of its own.

What generated kernels compute on the way stays in the body: it is free there, and would have to be read from memory.
But what products and the like read has to be in memory, and is written there before the loop.
The counterpart is match/sink_invariants.py, for what is made of nothing but constants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flagos_backend.ir.attributes import TupleIndexAttributes
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.elementwise import is_elementwise
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.passes.rewrite import Substitution, array_shape, index_in, rewrite_computations, with_operands

# An iteration may never come, so that what might not end, or end the program, stays in it.
_STAYS = frozenset(
    {
        *(Opcode.CALL, Opcode.CONDITIONAL, Opcode.CUSTOM_CALL, Opcode.WHILE),
        *(Opcode.GET_TUPLE_ELEMENT, Opcode.PARAMETER),
    }
)
_LIBRARY_CALLS = frozenset(
    {Opcode.CHOLESKY, Opcode.CONVOLUTION, Opcode.DOT, Opcode.FFT, Opcode.SORT, Opcode.TRIANGULAR_SOLVE}
)
_COSTLY = _LIBRARY_CALLS | {Opcode.REDUCE, Opcode.REDUCE_WINDOW, Opcode.SCATTER}
_MOVES = frozenset({Opcode.CONVERT, Opcode.TRANSPOSE})


def hoist_invariants(module: Module) -> Module:
    """``module`` with the loops' invariants in their states, and whatever that leaves unused still in place."""
    effects = Effects()

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        substitution = Substitution(replaced)
        instructions: list[Instruction] = []
        for instruction in computation.instructions:
            better = substitution.apply(instruction)
            hoisting = _Hoisting.of(better, effects)
            if hoisting is None:
                instructions.append(better)
            else:
                better = hoisting.rewritten(instructions)
            substitution.record(instruction, better)
        if not substitution.values:
            return computation
        return Computation(computation.name, tuple(instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)


@dataclass(frozen=True, slots=True)
class _Hoisting:
    """``made``: of the body of ``loop``, in order, what is made before it. ``carried``: what the body reads of that."""

    loop: Instruction
    made: tuple[Instruction, ...]
    carried: tuple[Instruction, ...]

    @classmethod
    def of(cls, loop: Instruction, effects: Effects) -> _Hoisting | None:
        """None for another instruction, and for a loop that has nothing to hoist."""
        if loop.opcode is not Opcode.WHILE or not all(map(_takes_elements, loop.called)):
            return None
        _, body = loop.called
        if body.root.opcode is not Opcode.TUPLE:
            return None
        invariant = _invariants(body, effects)
        varying = [instruction for instruction in body.instructions if instruction not in invariant]
        read = _read_from_memory(varying)
        costly = {i for i, varies in invariant.items() if varies and (i in read or _is_costly(i, invariant))}
        made = {i for i in _made_for(costly) if i.opcode is not Opcode.GET_TUPLE_ELEMENT}
        left = [*varying, *(instruction for instruction in invariant if instruction not in made)]
        used = {operand for instruction in left for operand in instruction.operands}
        carried = tuple(i for i in body.instructions if i in costly and i in used)
        if not carried:
            return None
        return cls(loop, tuple(i for i in body.instructions if i in made), carried)

    def rewritten(self, instructions: list[Instruction]) -> Instruction:
        """Appends what is made before the loop, and the loop; the value to use for the old one."""
        loop, (condition, body) = self.loop, self.loop.called
        (initial,) = loop.operands
        assert isinstance(loop.shape, TupleShape)

        def put(instruction: Instruction) -> Instruction:
            instructions.append(instruction)
            return instruction

        elements = initial.operands
        if initial.opcode is not Opcode.TUPLE:
            elements = tuple([put(_element(initial, index)) for index in range(len(loop.shape.elements))])
        (state,) = body.parameters
        values = {i: elements[index_in(i, state)] for i in body.instructions if index_in(i, state) >= 0}
        for instruction in self.made:
            operands = tuple([values[operand] for operand in instruction.operands])
            values[instruction] = put(with_operands(instruction, operands, instruction.called))
        shape = TupleShape((*loop.shape.elements, *(i.shape for i in self.carried)))
        start = (*elements, *(values[i] for i in self.carried))
        wide = put(Instruction(Opcode.TUPLE, shape, start, name=f"{loop.name}.state"))
        called = (self._widened(condition, shape, ()), self._widened(body, shape, self.carried))
        made = put(Instruction(loop.opcode, shape, (wide,), loop.attributes, called, loop.name, loop.metadata))
        results = tuple([put(_element(made, index)) for index in range(len(elements))])
        return put(Instruction(Opcode.TUPLE, loop.shape, results, name=f"{loop.name}.results"))

    @staticmethod
    def _widened(computation: Computation, shape: TupleShape, carried: tuple[Instruction, ...]) -> Computation:
        """Condition or body on the larger state. ``carried``: what is at its end, where the computation hands it on."""
        (old,) = computation.parameters
        state = Instruction(Opcode.PARAMETER, shape, (), old.attributes, name=old.name, metadata=old.metadata)
        first = len(shape.elements) - len(carried)
        values = {old: state} | {i: _element(state, first + number) for number, i in enumerate(carried)}
        instructions = list(values.values())
        for instruction in computation.instructions:
            if instruction in values:
                continue
            operands = tuple([values[operand] for operand in instruction.operands])
            if carried and instruction is computation.root:
                operands = (*operands, *(values[i] for i in carried))
                name, metadata = instruction.name, instruction.metadata
                made = Instruction(Opcode.TUPLE, shape, operands, name=name, metadata=metadata)
            else:
                made = with_operands(instruction, operands, instruction.called)
            values[instruction] = made
            instructions.append(made)
        return Computation(computation.name, tuple(instructions), values[computation.root])


def _takes_elements(computation: Computation) -> bool:
    (state,) = computation.parameters
    read = (i for i in computation.instructions if state in i.operands)
    return computation.root is not state and all(i.opcode is Opcode.GET_TUPLE_ELEMENT for i in read)


def _invariants(body: Computation, effects: Effects) -> dict[Instruction, bool]:
    """What is the same in each iteration, and whether it depends on what the loop is given."""
    (state,) = body.parameters
    unchanged = {index for index, value in enumerate(body.root.operands) if index_in(value, state) == index}
    found: dict[Instruction, bool] = {}
    for instruction in body.instructions:
        if index_in(instruction, state) in unchanged and isinstance(instruction.shape, ArrayShape):
            found[instruction] = True
        elif instruction.opcode is Opcode.CONSTANT:
            found[instruction] = False
        elif _may_move(instruction, effects) and all(operand in found for operand in instruction.operands):
            found[instruction] = any(found[operand] for operand in instruction.operands)
    return found


def _may_move(instruction: Instruction, effects: Effects) -> bool:
    shape = instruction.shape
    is_array = isinstance(shape, ArrayShape) and shape.element_type is not ElementType.TOKEN
    return is_array and instruction.opcode not in _STAYS and not effects.of(instruction)


def _is_costly(instruction: Instruction, invariant: dict[Instruction, bool]) -> bool:
    """Whether an invariant is a kernel of its own, or less to read in each iteration than anything that it is made
    of."""
    if instruction.opcode not in _MOVES:
        return instruction.opcode in _COSTLY
    size = array_shape(instruction).num_bytes
    narrows = size < array_shape(instruction.operands[0]).num_bytes
    given = [i for i in _made_for({instruction}) if invariant[i]]
    return (narrows or instruction.opcode is Opcode.TRANSPOSE) and all(array_shape(i).num_bytes >= size for i in given)


def _read_from_memory(instructions: Iterable[Instruction]) -> set[Instruction]:
    """What is computed point by point for library calls among ``instructions``. They may convert by themselves."""
    found = set()
    for instruction in instructions:
        if instruction.opcode in _LIBRARY_CALLS:
            for operand in instruction.operands:
                while operand.opcode is Opcode.RESHAPE:
                    operand = operand.operands[0]
                if is_elementwise(operand) and operand.opcode is not Opcode.CONVERT:
                    found.add(operand)
    return found


def _made_for(values: set[Instruction]) -> set[Instruction]:
    """``values``, and what they are made of in a loop's body."""
    found: set[Instruction] = set()
    pending = list(values)
    while pending:
        instruction = pending.pop()
        if instruction not in found:
            found.add(instruction)
            if instruction.opcode is not Opcode.GET_TUPLE_ELEMENT:
                pending += instruction.operands
    return found


def _element(value: Instruction, index: int) -> Instruction:
    assert isinstance(value.shape, TupleShape)
    attributes, name = TupleIndexAttributes(index), f"{value.name}.{index}"
    return Instruction(Opcode.GET_TUPLE_ELEMENT, value.shape.elements[index], (value,), attributes, name=name)
