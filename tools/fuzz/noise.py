"""Disturbs a program by what rounding may do to it, so that the oracle itself shows how much of a difference is legal.

Every value that two correct compilers may round differently is multiplied by numbers a few units in the last place
from 1. Where the disturbed runs scatter, the program amplifies rounding, and only their range binds the result.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flagos_backend.ir.attributes import CompareAttributes, ConstantAttributes, DimensionsAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from tools.fuzz.movement import combiner
from tools.fuzz.scope import NUMPY_DTYPE

E = ElementType

# What makes floats without rounding: moves, choices, and what only touches the sign.
_EXACT = frozenset(
    {
        *(Opcode.PARAMETER, Opcode.CONSTANT, Opcode.IOTA, Opcode.BROADCAST, Opcode.RESHAPE, Opcode.TRANSPOSE),
        *(Opcode.REVERSE, Opcode.SLICE, Opcode.CONCATENATE, Opcode.PAD, Opcode.DYNAMIC_SLICE, Opcode.GATHER),
        *(Opcode.DYNAMIC_UPDATE_SLICE, Opcode.COPY, Opcode.OPTIMIZATION_BARRIER, Opcode.SELECT, Opcode.CLAMP),
        *(Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.NEGATE, Opcode.GET_TUPLE_ELEMENT, Opcode.CALL, Opcode.CONDITIONAL),
        *(Opcode.WHILE, Opcode.TUPLE, Opcode.BITCAST_CONVERT, Opcode.REAL, Opcode.IMAG, Opcode.COMPLEX),
    }
)
# These add up many operands, so that the error is relative to the operands, not to the result.
_SUMS = frozenset(
    {Opcode.DOT, Opcode.CONVOLUTION, Opcode.REDUCE, Opcode.REDUCE_WINDOW, Opcode.SCATTER, Opcode.FFT, Opcode.SUBTRACT}
)
_SUMS |= {Opcode.ADD, Opcode.SELECT_AND_SCATTER, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.REMAINDER}
# XLA's own functions of float64 are off by hundreds of units near zeros.
_ULPS = {E.F16: 2, E.BF16: 2, E.F32: 8, E.F64: 1024}
_EPSILON = {E.F64: 2.0**-52, E.F32: 2.0**-23, E.F16: 2.0**-10, E.BF16: 2.0**-7}
_POISONS = (complex(np.nan, 0), complex(np.inf, np.nan), 0j, 1 + 1j, complex(0, -np.inf), complex(np.nan, np.nan))


def disturb(module: Module, run: int, *, flush: bool = False) -> Module:
    """``module`` with noise that differs from run to run. ``flush``: zeros become numbers as large as those that a
    processor may flush to zero."""
    computations: dict[int, Computation] = {}
    scalars = scalar_functions(module)
    for computation in module.computations():
        computations[id(computation)] = (
            computation if id(computation) in scalars else _Disturber(run, flush, computations).run(computation)
        )
    return replace(module, entry=computations[id(module.entry)])


def _is_complex_abs(instruction: Instruction) -> bool:
    """C99 makes infinity of infinity and NaN, XLA NaN: its operand is poisoned, the result is no complex number."""
    shape = instruction.operands[0].shape if instruction.opcode is Opcode.ABS else None
    return isinstance(shape, ArrayShape) and shape.element_type.is_complex


def _tests_equality(instruction: Instruction) -> bool:
    if instruction.opcode is not Opcode.COMPARE:
        return False
    shape, attributes = instruction.operands[0].shape, instruction.attributes_as(CompareAttributes)
    return (
        isinstance(shape, ArrayShape)
        and shape.element_type in _EPSILON
        and attributes.direction in (Comparison.EQ, Comparison.NE)
        and attributes.order is ComparisonOrder.PARTIAL
    )


def scalar_functions(module: Module) -> set[int]:
    """Combiners and comparators: their callers' values are disturbed instead."""
    structured = (Opcode.WHILE, Opcode.CONDITIONAL, Opcode.CALL)
    found = (i for c in module.computations() for i in c.instructions if i.opcode not in structured)
    return {id(called) for instruction in found for called in instruction.called}


class _Disturber:
    def __init__(self, run: int, flush: bool, computations: dict[int, Computation]) -> None:
        self._run = run
        self._rng = np.random.default_rng([run, len(computations)])
        self._flush = flush
        self._computations = computations
        self._instructions: list[Instruction] = []

    def run(self, computation: Computation) -> Computation:
        values: dict[Instruction, Instruction] = {}
        for instruction in computation.instructions:
            operands = [values[operand] for operand in instruction.operands]
            if instruction.opcode in _SUMS or _is_complex_abs(instruction):
                operands = [self._noisy(operand) for operand in operands]
            called = tuple(self._computations[id(callee)] for callee in instruction.called)
            copy = Instruction(
                instruction.opcode, instruction.shape, tuple(operands), instruction.attributes, called, instruction.name
            )
            self._instructions.append(copy)
            if self._run % 2 and _tests_equality(instruction):
                copy = self._nearly_equal(copy)
            if self._run % 2 and instruction.opcode is Opcode.FFT:
                copy = self._nearly_zero(copy)
            values[instruction] = copy if instruction.opcode in _EXACT else self._noisy(copy)
        return Computation(computation.name, tuple(self._instructions), values[computation.root])

    def _noisy(self, value: Instruction) -> Instruction:
        shape = value.shape
        if not isinstance(shape, ArrayShape) or shape.element_type.real not in _EPSILON:
            return value
        real = shape.element_type.real
        amplitude = _ULPS[real] * _EPSILON[real]
        noisy = self._add(Opcode.MULTIPLY, value, self._constant(shape, 1 + amplitude * self._numbers(shape)))
        if shape.element_type.is_complex:
            noisy = self._poisoned(noisy, shape)
        if not self._flush:
            return noisy
        tiny = 2.0**-1022 if real is E.F64 else 2.0**-14 if real is E.F16 else 2.0**-126
        return self._add(Opcode.ADD, noisy, self._constant(shape, 4 * tiny * self._numbers(shape)))

    def _nearly_equal(self, comparison: Instruction) -> Instruction:
        """Noise hardly ever makes two numbers equal that another rounding would: here near ones count as equal."""
        lhs, rhs = comparison.operands
        shape = lhs.shape
        assert isinstance(shape, ArrayShape)
        limit = 2 * _ULPS[shape.element_type] * _EPSILON[shape.element_type]
        distance = self._add(Opcode.ABS, self._add(Opcode.SUBTRACT, lhs, rhs))
        allowed = self._add(
            Opcode.MULTIPLY, self._add(Opcode.ABS, rhs), self._constant(shape, np.full(shape.dims, limit))
        )
        is_near = self._compare(Comparison.LE, distance, allowed)
        if comparison.attributes_as(CompareAttributes).direction is Comparison.EQ:
            return self._add(Opcode.OR, comparison, is_near)
        return self._add(Opcode.AND, comparison, self._add(Opcode.NOT, is_near))

    def _nearly_zero(self, transform: Instruction) -> Instruction:
        """An FFT's errors are relative to its whole row. Where terms cancel only they are left, or nothing, which noise
        does not make: here parts that are no larger are zero."""
        (operand,) = transform.operands
        shape = transform.shape
        assert isinstance(shape, ArrayShape)
        part = ArrayShape(shape.element_type.real, shape.dims)
        row = ArrayShape(part.element_type, shape.dims[:-1])
        zero = self._constant(ArrayShape(part.element_type), np.zeros(()))
        sizes = self._add(Opcode.ABS, operand, shape=part)
        along, across = DimensionsAttributes((shape.rank - 1,)), DimensionsAttributes(tuple(range(shape.rank - 1)))
        add = combiner(Opcode.ADD, part.element_type)
        sums = self._append(Instruction(Opcode.REDUCE, row, (sizes, zero), along, (add,), name="sums_of_rows"))
        limits = self._append(Instruction(Opcode.BROADCAST, part, (sums,), across, name="limits"))
        errors = np.full(shape.dims, _ULPS[part.element_type] * _EPSILON[part.element_type])
        limits = self._add(Opcode.MULTIPLY, limits, self._constant(part, errors))
        zeros = self._constant(part, np.zeros(shape.dims))
        kept = []
        for opcode in (Opcode.REAL, Opcode.IMAG):
            value = self._add(opcode, transform, shape=part)
            is_rest = self._compare(Comparison.LE, self._add(Opcode.ABS, value), limits)
            kept.append(self._add(Opcode.SELECT, is_rest, zeros, value, shape=part))
        return self._add(Opcode.COMPLEX, *kept, shape=shape)

    def _compare(self, direction: Comparison, lhs: Instruction, rhs: Instruction) -> Instruction:
        assert isinstance(lhs.shape, ArrayShape)
        shape = ArrayShape(E.PRED, lhs.shape.dims)
        return self._append(Instruction(Opcode.COMPARE, shape, (lhs, rhs), CompareAttributes(direction), name="near"))

    def _poisoned(self, value: Instruction, shape: ArrayShape) -> Instruction:
        """Any number where a part is not finite: compilers differ in what becomes of the other part."""
        part = ArrayShape(shape.element_type.real, shape.dims)
        predicate = ArrayShape(E.PRED, shape.dims)
        parts = [self._add(opcode, value, shape=part) for opcode in (Opcode.REAL, Opcode.IMAG)]
        finite = self._add(Opcode.AND, *(self._add(Opcode.IS_FINITE, p, shape=predicate) for p in parts))
        poison = self._constant(shape, np.full(shape.dims, _POISONS[self._run % len(_POISONS)]))
        return self._add(Opcode.SELECT, finite, value, poison, shape=shape)

    def _numbers(self, shape: ArrayShape) -> np.ndarray:
        """Uniform in [-1, 1]; complex ones on both axes."""
        parts = [self._rng.uniform(-1, 1, shape.dims) for _ in range(1 + shape.element_type.is_complex)]
        return np.asarray(parts[0] if len(parts) == 1 else parts[0] + 1j * parts[1])

    def _constant(self, shape: ArrayShape, values: np.ndarray) -> Instruction:
        data = np.asarray(values).astype(NUMPY_DTYPE[shape.element_type]).tobytes()
        return self._append(Instruction(Opcode.CONSTANT, shape, (), ConstantAttributes(data), name="noise"))

    def _add(self, opcode: Opcode, *operands: Instruction, shape: ArrayShape | None = None) -> Instruction:
        return self._append(Instruction(opcode, shape or operands[0].shape, operands, name="noisy"))

    def _append(self, instruction: Instruction) -> Instruction:
        self._instructions.append(instruction)
        return instruction
