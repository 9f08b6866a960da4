"""Forms of a program for the oracle: as it is written, where XLA's rewrites change what it says, and in wider types."""

from __future__ import annotations

import abc
from dataclasses import replace

from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape
from tools.fuzz.noise import scalar_functions

E = ElementType

# XLA adds up the starts of a slice of a slice, and of gathers that are slices: what the inner one clamped it loses.
_MERGED = frozenset({Opcode.DYNAMIC_SLICE, Opcode.GATHER})

# StableHLO folds integer divisions of constants and ends the process at a divisor of zero, which XLA itself defines.
_DIVIDES = frozenset({Opcode.DIVIDE, Opcode.REMAINDER})

_WIDER = {E.F16: E.F64, E.BF16: E.F64, E.F32: E.F64, E.C64: E.C128}
# What XLA computes with errors of its own: functions, and sums that it rounds after each addition.
_INEXACT = frozenset(
    {
        *(Opcode.TANH, Opcode.EXP, Opcode.LOGISTIC, Opcode.SIN, Opcode.COS, Opcode.SQRT, Opcode.RSQRT, Opcode.LOG),
        *(Opcode.LOG1P, Opcode.EXPM1, Opcode.CBRT, Opcode.TAN, Opcode.ERF, Opcode.POWER, Opcode.ATAN2, Opcode.ABS),
        *(Opcode.SIGN, Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.REMAINDER),
        *(Opcode.DOT, Opcode.CONVOLUTION, Opcode.REDUCE, Opcode.REDUCE_WINDOW, Opcode.SCATTER, Opcode.FFT),
        Opcode.SELECT_AND_SCATTER,
    }
)


def as_written(module: Module) -> Module:
    """``module`` with barriers behind what XLA would merge wrongly, or fold with a crash."""
    return _rewritten(module, _Literal)


def widened(module: Module) -> Module:
    """``module`` with everything inexact computed in float64 and rounded once, to the type that it was written in."""
    return _rewritten(module, _Widened)


def _rewritten(module: Module, rewrite: type[_Rewrite]) -> Module:
    computations: dict[int, Computation] = {}
    scalars = scalar_functions(module)
    for computation in module.computations():
        computations[id(computation)] = (
            computation if id(computation) in scalars else rewrite(computations).run(computation)
        )
    return replace(module, entry=computations[id(module.entry)])


class _Rewrite(abc.ABC):
    """Copies a computation, instruction by instruction. ``computations``: the copies of those that it calls."""

    def __init__(self, computations: dict[int, Computation]) -> None:
        self._computations = computations
        self._instructions: list[Instruction] = []

    def run(self, computation: Computation) -> Computation:
        values: dict[Instruction, Instruction] = {}
        for instruction in computation.instructions:
            called = tuple(self._computations[id(callee)] for callee in instruction.called)
            operands = tuple(values[operand] for operand in instruction.operands)
            values[instruction] = self._value(replace(instruction, operands=operands, called=called))
        return Computation(computation.name, tuple(self._instructions), values[computation.root])

    @abc.abstractmethod
    def _value(self, copy: Instruction) -> Instruction:
        """What stands for ``copy``, an instruction of the copied operands; adds what that takes."""

    def _add(self, instruction: Instruction) -> Instruction:
        self._instructions.append(instruction)
        return instruction

    def _behind_barrier(self, value: Instruction) -> Instruction:
        return self._add(Instruction(Opcode.OPTIMIZATION_BARRIER, value.shape, (value,), name="as_written"))


class _Literal(_Rewrite):
    def _value(self, copy: Instruction) -> Instruction:
        if copy.opcode in _DIVIDES and _is_integer(copy.shape):
            dividend, divisor = copy.operands
            copy = replace(copy, operands=(dividend, self._behind_barrier(divisor)))
        value = self._add(copy)
        return self._behind_barrier(value) if copy.opcode in _MERGED else value


class _Widened(_Rewrite):
    def _value(self, copy: Instruction) -> Instruction:
        wide = _wide(copy.shape)
        if copy.opcode not in _INEXACT or wide == copy.shape:
            return self._add(copy)
        operands = tuple(self._converted(operand, _wide(operand.shape)) for operand in copy.operands)
        called = tuple(map(_wide_function, copy.called))
        value = self._add(replace(copy, shape=wide, operands=operands, called=called))
        # XLA leaves out what rounds in between, unless it does not see it.
        return self._behind_barrier(self._converted(value, copy.shape))

    def _converted(self, value: Instruction, shape: Shape) -> Instruction:
        return value if shape == value.shape else self._add(Instruction(Opcode.CONVERT, shape, (value,), name="wide"))


def _is_integer(shape: Shape) -> bool:
    return isinstance(shape, ArrayShape) and shape.element_type.is_integer


def _wide(shape: Shape) -> Shape:
    if not isinstance(shape, ArrayShape):
        return shape
    return replace(shape, element_type=_WIDER.get(shape.element_type, shape.element_type))


def _wide_function(function: Computation) -> Computation:
    """A combiner or a selection in wider types."""
    values: dict[Instruction, Instruction] = {}
    for instruction in function.instructions:
        operands = tuple(values[operand] for operand in instruction.operands)
        values[instruction] = replace(instruction, shape=_wide(instruction.shape), operands=operands)
    return Computation(function.name, tuple(values.values()), values[function.root])
