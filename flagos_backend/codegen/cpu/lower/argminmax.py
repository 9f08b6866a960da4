"""The native step of reduces that give the position of a greatest or least element.

Between emitter.py, whose computations lose the positions that such a reduce compares, and native/cpu/argminmax.cc.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.elementwise import element_type
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.indexing import dims_of
from flagos_backend.passes.argminmax import argminmax_of, direction_of


def with_argminmax(computation: FlatComputation) -> FlatComputation:
    """``computation`` in which each reduce that finds a minimum or maximum has one operand, the array."""
    found = {i: _of_array(i) for i in computation.instructions if argminmax_of(i)}
    if not found:
        return computation
    leaves = computation.leaves_of
    return replace(
        computation,
        instructions=tuple(found.get(i, i) for i in computation.instructions),
        leaves_of=leaves | {new: leaves[old] for old, new in found.items()},
    )


def argminmax_numbers(reduce: Instruction) -> tuple[int, ...] | None:
    """The numbers of a native step for ``reduce``, if that is one that ``with_argminmax`` made: types of elements and
    positions; how many rows there are, of how many elements, how far apart those are; whether the greatest counts."""
    if len(reduce.operands) != 1:
        return None
    (array,) = reduce.operands
    dims, (d,) = dims_of(array), reduce.attributes_as(DimensionsAttributes).dimensions
    source, index = element_type(array), element_type(reduce.called[0].parameters[1])
    if source is None or index is None:
        raise AssertionError(f"{reduce.name} was taken for a minimum or maximum of an array")
    largest = direction_of(reduce.called[0]) is Comparison.GT
    return int(source), int(index), prod(dims[:d]), dims[d], prod(dims[d + 1 :]), int(largest)


def _of_array(reduce: Instruction) -> Instruction:
    return Instruction(
        reduce.opcode, reduce.shape, reduce.operands[:1], reduce.attributes, reduce.called, reduce.name, reduce.metadata
    )
