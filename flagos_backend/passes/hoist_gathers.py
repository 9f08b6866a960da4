"""A gather of single elements goes before the elementwise operations that make its array, where that is much larger.

They are computed again, of the chosen elements alone; else the whole array, such as the logarithms of all probabilities
for one label a row, would be written only for the gather to read. A sum of rows of which all is zero but the element at
a label, as ``where(positions == label, x, 0)`` has them, is such a gather, too.
"""

from __future__ import annotations

from flagos_backend.ir.attributes import Attributes, DimensionsAttributes, GatherAttributes
from flagos_backend.ir.constants import is_splat_of, scalar_bytes
from flagos_backend.ir.elementwise import is_elementwise
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.one_hot import ADDABLE, Rows, adds
from flagos_backend.passes.rewrite import (
    Emitter,
    Replacement,
    array_shape,
    replace_each,
    rewrite_computations,
    users_of,
)

# How many elements the array has for each that is chosen.
_LEAST_SHARE = 8
# What is computed again, and how many arrays are gathered from instead of one.
_MOST_OPERATIONS = 32
_MOST_ARRAYS = 3
# Rows that are shorter are added up in less time than a gather takes to start where it is a kernel of its own.
_LEAST_ROW = 1024

_KERNELS = frozenset({Opcode.DOT, Opcode.CONVOLUTION})
_IN_MEMORY = _KERNELS | {Opcode.PARAMETER, Opcode.CONSTANT, Opcode.GET_TUPLE_ELEMENT}


def hoist_gathers(module: Module) -> Module:
    return rewrite_computations(module, _transform)


def _transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
    written: set[int] | None = None

    def find(instruction: Instruction) -> Replacement | None:
        nonlocal written
        choose = _sunk if _chooses_few(instruction) else _chosen_of_sum if _may_choose(instruction) else None
        if choose is None:
            return None
        written = _written(computation) if written is None else written
        return choose(instruction, written)

    return replace_each(computation, replaced, find)


def _chooses_few(instruction: Instruction) -> bool:
    if instruction.opcode is not Opcode.GATHER:
        return False
    attributes, source = instruction.attributes_as(GatherAttributes), instruction.operands[0]
    single = not attributes.offset_dims and all(size == 1 for size in attributes.slice_sizes)
    share = array_shape(source).num_elements >= _LEAST_SHARE * max(array_shape(instruction).num_elements, 1)
    return single and share and is_elementwise(source)


def _sunk(gather: Instruction, written: set[int]) -> Replacement | None:
    return _Sunk(gather, written).array()


def _may_choose(instruction: Instruction) -> bool:
    return instruction.opcode is Opcode.REDUCE and len(instruction.operands) == 2


def _chosen_of_sum(reduce: Instruction, written: set[int]) -> Replacement | None:
    """What replaces a sum of rows that are zero but at a label, and the instructions that make it."""
    value, initial = reduce.operands
    dims, shape = reduce.attributes_as(DimensionsAttributes).dimensions, array_shape(value)
    if len(dims) != 1 or shape.element_type not in ADDABLE or not adds(reduce.called[0]):
        return None
    emitter = Emitter()
    rows = Rows(dims[0], shape.dims, emitter, reduce)
    if rows.size < _LEAST_ROW or value.opcode is not Opcode.SELECT:
        return None
    hit, source, other = value.operands
    if not (rows.is_one_hot(hit) and rows.is_zero(other) and is_elementwise(source)):
        return None
    gather = rows.gather(source, rows.labels(hit))
    found = _Sunk(gather, written).array()
    if found is None:
        return None
    chosen, made = found
    emitter.instructions += made
    result = array_shape(reduce)
    zero = rows.without(other)
    part = emitter.emit(Opcode.SELECT, result, (rows.sole(hit, hit=True), chosen, zero), like=reduce)
    total = emitter.emit(Opcode.BROADCAST, result, (initial,), DimensionsAttributes(()), like=reduce)
    # Zeros take the sign from a zero: one that the sum begins with, or those of the row.
    begins_so = is_splat_of(initial, scalar_bytes(0, shape.element_type))
    for added in (part,) if begins_so else (part, zero):
        total = emitter.emit(Opcode.ADD, result, (total, added), like=reduce)
    return total, emitter.instructions


def _written(computation: Computation) -> set[int]:
    """The results of products and convolutions, as they are written: with what only follows one, in its epilogue."""
    users, ends = users_of(computation), set()
    for instruction in computation.instructions:
        if instruction.opcode in _KERNELS:
            value = instruction
            while len(users.get(id(value), ())) == 1 and value is not computation.root:
                (user,) = users[id(value)]
                if not is_elementwise(user):
                    break
                value = user
            ends.add(id(value))
    return ends


class _Sunk:
    """What replaces a gather."""

    def __init__(self, gather: Instruction, written: set[int]) -> None:
        self._gather, self._written = gather, written
        self._attributes = gather.attributes_as(GatherAttributes)
        self._dims = array_shape(gather).dims
        self._emitter = Emitter()
        self._known: dict[int, Instruction | None] = {}
        self._operations = self._arrays = 0

    def array(self) -> Replacement | None:
        """Its value, and the instructions that make it; None where it stays."""
        source = self._gather.operands[0]
        if id(source) in self._written:
            return None
        value = self._chosen(source)
        made = self._emitter.instructions
        if value is None or self._arrays > _MOST_ARRAYS:
            return None
        return value, made

    def _chosen(self, value: Instruction) -> Instruction | None:
        """The elements of ``value``, an array of the size that is gathered from; None if it would have to be made."""
        if id(value) not in self._known:
            self._known[id(value)] = self._choose(value)
        return self._known[id(value)]

    def _choose(self, value: Instruction) -> Instruction | None:
        if id(value) in self._written or _lies_in_memory(value):
            self._arrays += 1
            return self._emit(Opcode.GATHER, value, [value, self._gather.operands[1]], self._attributes)
        if value.opcode is Opcode.BROADCAST:
            return self._broadcast(value)
        self._operations += 1
        if not is_elementwise(value) or self._operations > _MOST_OPERATIONS:
            return None
        operands = []
        for operand in value.operands:
            chosen = self._chosen(operand) if array_shape(operand).dims else operand
            if chosen is None:
                return None
            operands.append(chosen)
        return self._emit(value.opcode, value, operands, value.attributes)

    def _broadcast(self, value: Instruction) -> Instruction | None:
        """What is the same along the dimensions that are chosen in: no choice is left."""
        attributes = self._attributes
        place = {
            array: indices - (indices > attributes.index_vector_dim)
            for array, indices in zip(
                attributes.operand_batching_dims, attributes.start_indices_batching_dims, strict=True
            )
        }
        dims = value.attributes_as(DimensionsAttributes).dimensions
        if not place.keys() >= set(dims):
            return None
        attributes_of = DimensionsAttributes(tuple(place[d] for d in dims))
        return self._emit(Opcode.BROADCAST, value, [value.operands[0]], attributes_of)

    def _emit(
        self, opcode: Opcode, like: Instruction, operands: list[Instruction], attributes: Attributes
    ) -> Instruction:
        shape = ArrayShape(array_shape(like).element_type, self._dims)
        return self._emitter.emit(opcode, shape, operands, attributes, like=self._gather)


def _lies_in_memory(value: Instruction) -> bool:
    while value.opcode is Opcode.RESHAPE:
        value = value.operands[0]
    return value.opcode in _IN_MEMORY
