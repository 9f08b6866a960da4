"""Evaluates fused schedules with NumPy over whole index grids: the oracle of fusion and of its emitters."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from flagos_backend.fusion.schedule import Schedule
from flagos_backend.ir.attributes import ConstantAttributes, DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region

_COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "GE": np.greater_equal,
    "GT": np.greater,
    "LE": np.less_equal,
    "LT": np.less,
}
_BINARY = {
    Opcode.ADD: np.add,
    Opcode.SUBTRACT: np.subtract,
    Opcode.MULTIPLY: np.multiply,
    Opcode.DIVIDE: np.true_divide,
    Opcode.MAXIMUM: np.maximum,
    Opcode.MINIMUM: np.minimum,
    Opcode.AND: np.bitwise_and,
    Opcode.OR: np.bitwise_or,
    Opcode.XOR: np.bitwise_xor,
    Opcode.POWER: np.power,
    Opcode.REMAINDER: np.fmod,
}
_UNARY = {
    Opcode.NEGATE: np.negative,
    Opcode.EXP: np.exp,
    Opcode.LOG: np.log,
    Opcode.LOG1P: np.log1p,
    Opcode.TANH: np.tanh,
    Opcode.SQRT: np.sqrt,
    Opcode.RSQRT: lambda x: 1 / np.sqrt(x),
    Opcode.ABS: np.abs,
    Opcode.NOT: np.invert,
    Opcode.IS_FINITE: np.isfinite,
}


def numpy_dtype(element_type: ElementType) -> np.dtype:
    if element_type is ElementType.PRED:
        return np.dtype(bool)
    if element_type is ElementType.BF16:
        return np.dtype(ml_dtypes.bfloat16)
    name = element_type.name.lower()
    return np.dtype({"s": "int", "u": "uint", "f": "float", "c": "complex"}[name[0]] + name[1:])


def evaluate(computation: FlatComputation, schedule: Schedule, arguments: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs of ``computation``, run as ``schedule`` says. Library calls other than dot are a KeyError."""
    memory = {p: np.ascontiguousarray(a).reshape(-1) for p, a in zip(computation.parameters, arguments, strict=True)}
    for instruction in computation.instructions:
        if instruction.opcode is Opcode.CONSTANT:
            data = instruction.attributes_as(ConstantAttributes).data
            memory[instruction] = np.frombuffer(data, numpy_dtype(instruction.shape.element_type))
    for item in schedule.items:
        if isinstance(item, Region):
            run_region(item, memory)
        else:
            _run_dot(item, schedule, memory)
    return [memory[schedule.buffers[o]].reshape(o.shape.dims) for o in computation.outputs]


def run_region(region: Region, memory: dict[Instruction, np.ndarray]) -> None:
    grid = np.indices(region.dims) if region.dims else []
    values: dict[Expression, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for expression in region.expressions():
            values[expression] = _value(expression, values, grid, memory)
    for store in region.stores:
        # A dimension that the index does not depend on was reduced: one point of it, even where it is empty.
        coefficients = store.index.coefficients
        kept = tuple(size if c else 1 for size, c in zip(region.dims, coefficients, strict=True))
        where = _positions(store.index, np.indices(kept) if kept else [], kept, values)
        value = np.asarray(values[store.value])
        first = tuple(slice(None) if c else slice(0, 1) for c in coefficients)
        value = value[first] if value.ndim else value
        _buffer(store.target, memory)[where] = np.broadcast_to(value, kept)


def _buffer(target: Instruction, memory: dict[Instruction, np.ndarray]) -> np.ndarray:
    if target not in memory:
        memory[target] = np.zeros(target.shape.num_elements, numpy_dtype(target.shape.element_type))
    return memory[target]


def _positions(
    index: Affine,
    grid: np.ndarray,
    dims: tuple[int, ...],
    values: dict[Expression, np.ndarray],
    guard: np.ndarray | bool = True,
) -> np.ndarray:
    total = np.full(dims, index.offset)
    for shift in index.shifts:
        assert shift.start.element_type is ElementType.S64
        inside = (values[shift.start] >= 0) & (values[shift.start] <= shift.limit)
        assert np.all(inside | np.invert(guard))
        total = total + shift.factor * values[shift.start]
    for coefficient, axis in zip(index.coefficients, grid, strict=True):
        total = total + coefficient * axis
    return total


def _value(
    expression: Expression,
    values: dict[Expression, np.ndarray],
    grid: np.ndarray,
    memory: dict[Instruction, np.ndarray],
) -> np.ndarray:
    dims = np.shape(grid)[1:]
    dtype = numpy_dtype(expression.element_type)
    if isinstance(expression, Load):
        index, flat = expression.index, memory[expression.source]
        if expression.guard is not None:
            guard = values[expression.guard]
            return _guarded(flat, _positions(index, grid, dims, values, guard), guard)
        return flat[index.offset] if index.is_constant else flat[_positions(index, grid, dims, values)]
    if isinstance(expression, Literal):
        return np.frombuffer(expression.data, dtype)[0]
    if isinstance(expression, Index):
        return _positions(expression.value, grid, dims, values, guard=False).astype(dtype)
    if isinstance(expression, Reduce):
        combine = _BINARY[expression.combine]
        value = np.broadcast_to(values[expression.value], dims)
        return combine(values[expression.initial], combine.reduce(value, axis=expression.dims, keepdims=True))
    assert isinstance(expression, Apply)
    operands = [values[operand] for operand in expression.operands]
    if expression.opcode is Opcode.COMPARE:
        return _COMPARE[expression.detail](*operands)
    if expression.opcode is Opcode.SELECT:
        return np.where(*operands)
    if expression.opcode is Opcode.CLAMP:
        return np.minimum(np.maximum(operands[0], operands[1]), operands[2])
    if expression.opcode is Opcode.DIVIDE and expression.element_type.is_integer:
        return np.trunc(np.true_divide(*operands)).astype(dtype)
    if expression.opcode is Opcode.CONVERT:
        return operands[0].astype(dtype)
    if expression.opcode is Opcode.LOG and expression.detail == Intrinsic.NEAR:
        return np.log2(1 - operands[0].astype(np.float64) ** 2).astype(dtype)
    table = _UNARY if len(operands) == 1 else _BINARY
    return table[expression.opcode](*operands).astype(dtype)


def _guarded(flat: np.ndarray, positions: np.ndarray, guard: np.ndarray) -> np.ndarray:
    """A load, and what nobody may need where ``guard`` fails."""
    positions, guard = np.broadcast_arrays(positions, guard)
    loaded = np.full(guard.shape, 99 if flat.dtype.kind in "biu" else np.nan, flat.dtype)
    loaded[guard] = flat[positions[guard]]
    assert np.all(positions[guard] >= 0)
    return loaded


def _run_dot(dot: Instruction, schedule: Schedule, memory: dict[Instruction, np.ndarray]) -> None:
    assert dot.opcode is Opcode.DOT, f"{dot.opcode} has no region"
    attributes = dot.attributes_as(DotAttributes)
    lhs, rhs = (memory[schedule.buffers[o]].reshape(o.shape.dims) for o in dot.operands)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = [next(letters) for _ in lhs.shape]
    right = [next(letters) for _ in rhs.shape]
    pairs = [*zip(attributes.lhs_batch, attributes.rhs_batch, strict=True)]
    pairs += zip(attributes.lhs_contracting, attributes.rhs_contracting, strict=True)
    for a, b in pairs:
        right[b] = left[a]
    batch = [left[d] for d in attributes.lhs_batch]
    free = [c for d, c in enumerate(left) if d not in (*attributes.lhs_batch, *attributes.lhs_contracting)]
    free += [c for d, c in enumerate(right) if d not in (*attributes.rhs_batch, *attributes.rhs_contracting)]
    out = np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(batch + free)}", lhs, rhs)
    memory[dot] = np.ascontiguousarray(out).reshape(-1)
