"""Scalar functions (reducers, comparators, maps), prepared once to run on whole arrays, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flagos_backend.errors import UnsupportedOpcode
from flagos_backend.ir.attributes import ConstantAttributes, ParameterAttributes, TupleIndexAttributes
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.instruction_count import InstructionCount
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, Shape, TupleShape
from flagos_backend.kernels.reference import registry, storage
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.process.torch_loading import Tensor, torch

# Takes the arguments, which broadcast together, and returns the results (0-d when they depend on no argument).
ScalarFunction = Callable[[Run, list[Tensor]], list[Tensor]]

# Where the leaves of a value, which may be a tuple, are among the values of a run.
_Slots = int | tuple["_Slots", ...]
_SAME = (Opcode.COPY, Opcode.ADD_DEPENDENCY, Opcode.OPTIMIZATION_BARRIER)
_MOVEMENTS = (Opcode.BROADCAST, Opcode.RESHAPE, Opcode.TRANSPOSE)


def scalar_function(computation: Computation) -> ScalarFunction:
    """``computation`` applied element by element; it makes its tables on PyTorch's default device.

    Raises UnsupportedOpcode for an instruction that is not elementwise, and ProgramTooLarge.
    """
    return _Builder(InstructionCount()).function(computation)


@dataclass(slots=True)
class _Step:
    """``run`` takes the values of ``operands`` and returns one for each of ``results``. ``frees``: what is read for the
    last time."""

    run: Callable[[Run, list[Any]], Sequence[Any]]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    frees: tuple[int, ...] = ()


@dataclass(slots=True)
class _Builder:
    """Calls are inlined, and tuples are resolved to the slots of their leaves."""

    count: InstructionCount
    effects: Effects = field(default_factory=Effects)
    initial: list[Any] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)

    def function(self, computation: Computation) -> ScalarFunction:
        arguments = [self._new(parameter.shape) for parameter in computation.parameters]
        size = len(self.initial)
        results = tuple(_leaves(self._inline(computation, arguments)))
        last = {slot: step for step in self.steps for slot in (*step.operands, *step.results)}
        for slot in sorted(last.keys() - set(results)):
            last[slot].frees += (slot,)
        return _runner(tuple(self.steps), self.initial, size, results)

    def _nested(self, computation: Computation) -> ScalarFunction:
        return _Builder(self.count, self.effects).function(computation)

    def _new(self, shape: Shape) -> _Slots:
        if isinstance(shape, TupleShape):
            return tuple(self._new(element) for element in shape.elements)
        self.initial.append(None)
        return len(self.initial) - 1

    def _inline(self, computation: Computation, arguments: Sequence[_Slots]) -> _Slots:
        made: dict[Instruction, _Slots] = {}
        for instruction in self.effects.needed(computation):
            self.count.add(instruction)
            made[instruction] = self._emit(instruction, [made[operand] for operand in instruction.operands], arguments)
        return made[computation.root]

    def _emit(self, instruction: Instruction, operands: list[_Slots], arguments: Sequence[_Slots]) -> _Slots:
        match instruction.opcode:
            case Opcode.PARAMETER:
                return arguments[instruction.attributes_as(ParameterAttributes).number]
            case Opcode.CONSTANT:
                return self._constant(instruction)
            case Opcode.TUPLE:
                return tuple(operands)
            case Opcode.GET_TUPLE_ELEMENT:
                (parts,) = operands
                assert isinstance(parts, tuple)
                return parts[instruction.attributes_as(TupleIndexAttributes).index]
            case Opcode.CALL:
                return self._inline(instruction.called[0], operands)
            case Opcode.WHILE:
                condition, body = (self._nested(computation) for computation in instruction.called)
                return self._step(_loop(condition, body), operands, instruction.shape)
            case Opcode.CONDITIONAL:
                sizes = [len(tuple(_leaves(operand))) for operand in operands[1:]]
                choice = _choice([self._nested(branch) for branch in instruction.called], sizes)
                return self._step(choice, operands, instruction.shape)
            case opcode if opcode in _SAME:
                return operands[0]
            case _:
                return self._emit_elementwise(instruction, operands)

    def _constant(self, instruction: Instruction) -> int:
        shape = instruction.shape
        assert isinstance(shape, ArrayShape)
        data = instruction.attributes_as(ConstantAttributes).data
        self.initial.append(storage.from_bytes(data, shape).to(torch.get_default_device()))
        return len(self.initial) - 1

    def _emit_elementwise(self, instruction: Instruction, operands: list[_Slots]) -> _Slots:
        opcode = instruction.opcode
        shapes = [instruction.shape, *(operand.shape for operand in instruction.operands)]
        scalar = all(isinstance(shape, ArrayShape) and not shape.dims for shape in shapes)
        if scalar and opcode in _MOVEMENTS:
            return operands[0]
        if scalar and opcode is Opcode.MAP:
            return self._inline(instruction.called[0], operands)
        if not scalar or not registry.is_elementwise(opcode):
            reason = "inside a scalar function (reducer, comparator, map) every instruction must be elementwise"
            raise UnsupportedOpcode.at(instruction, opcode=opcode, reason=reason)
        kernel = registry.prepare(instruction)
        return operands[0] if kernel is registry.identity else self._step(_one(kernel), operands, instruction.shape)

    def _step(self, run: Callable[[Run, list[Any]], Sequence[Any]], operands: Sequence[_Slots], shape: Shape) -> _Slots:
        results = self._new(shape)
        self.steps.append(_Step(run, tuple(_leaves(tuple(operands))), tuple(_leaves(results))))
        return results


def _leaves(slots: _Slots) -> Iterator[int]:
    if isinstance(slots, int):
        yield slots
    else:
        for part in slots:
            yield from _leaves(part)


def _runner(steps: tuple[_Step, ...], initial: list[Any], first: int, results: tuple[int, ...]) -> ScalarFunction:
    """``first``: how many of the ``initial`` values the arguments are."""
    rest = initial[first:]

    def run_steps(run: Run, arguments: list[Tensor]) -> list[Tensor]:
        values: list[Any] = [*arguments, *rest]
        for step in steps:
            outcome = step.run(run, [values[slot] for slot in step.operands])
            for slot, value in zip(step.results, outcome, strict=True):
                values[slot] = value
            for slot in step.frees:
                values[slot] = None
        return [values[slot] for slot in results]

    return run_steps


def _one(kernel: Kernel) -> Callable[[Run, list[Any]], Sequence[Any]]:
    return lambda run, values: (kernel(run, *values),)


def _loop(condition: ScalarFunction, body: ScalarFunction) -> ScalarFunction:
    """Every element goes round until its own condition fails."""

    def run_loop(run: Run, state: list[Tensor]) -> list[Tensor]:
        active = condition(run, state)[0]
        while active.any():
            state = [torch.where(active, new, old) for new, old in zip(body(run, state), state, strict=True)]
            active = active & condition(run, state)[0]
        return state

    return run_loop


def _choice(branches: Sequence[ScalarFunction], sizes: Sequence[int]) -> ScalarFunction:
    """Every branch runs on all elements, and each element keeps its own. ``sizes``: how many values a branch takes."""
    last = len(branches) - 1

    def run_choice(run: Run, values: list[Tensor]) -> list[Tensor]:
        selector, rest = values[0], iter(values[1:])
        outcomes = [
            branch(run, [next(rest) for _ in range(size)]) for branch, size in zip(branches, sizes, strict=True)
        ]
        chosen = outcomes[last]
        for index in reversed(range(last)):
            # A PRED selector takes the first branch when true; an integer out of range takes the last.
            mask = selector if selector.dtype is torch.bool else selector == index
            chosen = [torch.where(mask, new, old) for new, old in zip(outcomes[index], chosen, strict=True)]
        return chosen

    return run_choice
