"""Reduce-windows whose windows are all prefixes or all suffixes of one dimension: how such cumulative operations are
recognised, and torch's functions for them. Read by windows.py and by our own kernel of scans."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from flagos_backend.ir.attributes import CompareAttributes, ConstantAttributes, WindowAttributes, WindowDimension
from flagos_backend.ir.hlo import Computation, Instruction, parameter_number
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import integers, storage
from flagos_backend.kernels.reference.computations import plain_combiner
from flagos_backend.kernels.reference.cumulative_sum import cumulative_sum
from flagos_backend.kernels.reference.ordering import total_order
from flagos_backend.process.torch_loading import Tensor, torch

_TRIVIAL = WindowDimension(1)


class Combine(enum.StrEnum):
    """An associative and commutative function of two values."""

    ADD = "add"
    MULTIPLY = "multiply"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    AND = "and"
    OR = "or"
    LOG_ADD_EXP = "log-add-exp"


@dataclass(frozen=True, slots=True)
class Cumulative:
    """``combine`` of everything up to each element along ``dimension``; ``reverse``: of everything from it on."""

    combine: Combine
    dimension: int
    reverse: bool


def combine_of(computation: Computation) -> Combine | None:
    """What a function of two values computes; None where it is none of these."""
    opcode = plain_combiner(computation)
    if opcode is not None:
        return Combine(opcode) if opcode in {*Combine} else None
    return Combine.LOG_ADD_EXP if _adds_exponentials(computation) else None


def _adds_exponentials(computation: Computation) -> bool:
    """max(a, b) + log1p(exp(-|a - b|)), and a + b where a - b is NaN, as JAX writes log(exp(a) + exp(b))."""
    root = computation.root
    if root.opcode is not Opcode.SELECT:
        return False
    test, special, general = root.operands
    if test.opcode is not Opcode.COMPARE or test.attributes_as(CompareAttributes).direction is not Comparison.NE:
        return False
    difference, same = test.operands
    if difference is not same or general.opcode is not Opcode.ADD:
        return False
    greatest, rest = sorted(general.operands, key=lambda operand: operand.opcode is not Opcode.MAXIMUM)
    for opcode in (Opcode.LOG1P, Opcode.EXP, Opcode.NEGATE, Opcode.ABS):
        if rest.opcode is not opcode:
            return False
        (rest,) = rest.operands
    return (
        rest is difference
        and _is_of_both(difference, Opcode.SUBTRACT)
        and _is_of_both(special, Opcode.ADD)
        and _is_of_both(greatest, Opcode.MAXIMUM)
    )


def _is_of_both(instruction: Instruction, opcode: Opcode) -> bool:
    return instruction.opcode is opcode and {parameter_number(operand) for operand in instruction.operands} == {0, 1}


def cumulative_of(instruction: Instruction) -> Cumulative | None:
    """What a reduce-window of one array computes, whatever its initial value; None for anything else."""
    combine = combine_of(instruction.called[0]) if len(instruction.operands) == 2 else None
    window = instruction.attributes_as(WindowAttributes).window
    reduced = [d for d, w in enumerate(window) if w != _TRIVIAL]
    shape = instruction.operands[0].shape
    if combine is None or len(reduced) != 1 or not isinstance(shape, ArrayShape):
        return None
    dimension = reduced[0]
    size = shape.dims[dimension]
    if is_prefix(size, window[dimension]):
        return Cumulative(combine, dimension, reverse=False)
    return Cumulative(combine, dimension, reverse=True) if is_suffix(size, window[dimension]) else None


def is_prefix(size: int, window: WindowDimension) -> bool:
    """Whether each window reaches from the first of ``size`` elements to one of them."""
    return window == WindowDimension(window.size, padding_low=window.size - 1) and window.size >= size


def is_suffix(size: int, window: WindowDimension) -> bool:
    """Whether each window reaches from one of ``size`` elements to the last one."""
    return window == WindowDimension(window.size, padding_high=window.size - 1) and window.size >= size


def identity_of(combine: Combine | None, element_type: ElementType) -> float | int | None:
    """The storage value that ``combine`` does not feel, for the types that torch pads as they are."""
    if not _is_plain_number(element_type) or element_type.is_complex:
        return None
    if combine is Combine.ADD:
        return 0
    if combine is Combine.MULTIPLY:
        return 1
    if combine is Combine.LOG_ADD_EXP:
        return float("-inf")
    if combine not in (Combine.MAXIMUM, Combine.MINIMUM):
        return None
    if element_type.is_float:
        return float("-inf" if combine is Combine.MAXIMUM else "inf")
    return integers.least(element_type) if combine is Combine.MAXIMUM else integers.greatest(element_type)


def starts_with_identity(instruction: Instruction) -> bool:
    """Whether the initial value of a reduce-window is a constant that the reducer does not feel."""
    initial = instruction.operands[-1]
    shape = initial.shape
    if len(instruction.operands) != 2 or initial.opcode is not Opcode.CONSTANT or not isinstance(shape, ArrayShape):
        return False
    identity = identity_of(combine_of(instruction.called[0]), shape.element_type)
    value = storage.from_bytes(initial.attributes_as(ConstantAttributes).data, shape)
    return identity is not None and value.item() == identity


def prepare_running(instruction: Instruction) -> Callable[[Tensor], Tensor] | None:
    """A cumulative reduce-window without its initial value, by torch's functions; None where they have another result,
    and for anything else."""
    cumulative = cumulative_of(instruction)
    shape = instruction.operands[0].shape
    if cumulative is None or not isinstance(shape, ArrayShape):
        return None
    dimension = cumulative.dimension
    running = _running(cumulative.combine, shape.element_type, dimension)
    if running is None or not cumulative.reverse:
        return running
    return lambda x: running(x.flip(dimension)).flip(dimension)


def _running(combine: Combine, element_type: ElementType, dimension: int) -> Callable[[Tensor], Tensor] | None:
    """torch's cumulative form of ``combine`` along ``dimension``, where its result is XLA's."""
    if element_type is ElementType.PRED:
        if combine in (Combine.ADD, Combine.OR, Combine.MAXIMUM):
            return lambda x: x.to(torch.uint8).cummax(dimension).values.to(torch.bool)
        if combine in (Combine.MULTIPLY, Combine.AND, Combine.MINIMUM):
            return lambda x: x.to(torch.uint8).cummin(dimension).values.to(torch.bool)
        return None
    if not _is_plain_number(element_type):
        return None
    if combine is Combine.ADD:
        return lambda x: cumulative_sum(x, dimension)
    if combine is Combine.MULTIPLY:
        return lambda x: x.cumprod(dimension, dtype=x.dtype)
    if combine not in (Combine.MAXIMUM, Combine.MINIMUM, Combine.LOG_ADD_EXP) or element_type.is_complex:
        return None
    if combine is Combine.LOG_ADD_EXP:
        return lambda x: x.logcumsumexp(dimension)
    if element_type.is_unsigned and element_type.bits > 8:
        # total_order is its own inverse on unsigned integers.
        if combine is Combine.MAXIMUM:
            return lambda x: total_order(total_order(x, element_type).cummax(dimension).values, element_type)
        return lambda x: total_order(total_order(x, element_type).cummin(dimension).values, element_type)
    if combine is Combine.MAXIMUM:
        return lambda x: x.cummax(dimension).values
    return lambda x: x.cummin(dimension).values


def _is_plain_number(element_type: ElementType) -> bool:
    return element_type.bits >= 16 or (element_type.is_integer and element_type.bits == 8)
