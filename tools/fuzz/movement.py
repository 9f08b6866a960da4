"""Productions of instructions that move elements: broadcasts, slices, pads, gathers, scatters and their dynamic kin."""

from __future__ import annotations

from math import prod

import numpy as np

from flagos_backend.ir.attributes import (
    DimensionAttributes,
    DimensionsAttributes,
    DynamicSliceAttributes,
    GatherAttributes,
    PadAttributes,
    ScatterAttributes,
    SliceAttributes,
)
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from tools.fuzz.scope import (
    COMMON,
    INTEGERS,
    MAX_ELEMENTS,
    NUMPY_DTYPE,
    SMALL_FLOATS,
    SMALL_INTEGERS,
    Dims,
    Scope,
    dims_of,
    shape_of,
    type_of,
)

E = ElementType
_MOVABLE = (*COMMON, *SMALL_INTEGERS, *SMALL_FLOATS[:2])


def _ranked(scope: Scope, min_rank: int = 1, *, full: bool = False) -> Instruction:
    """A value with dimensions; ``full``: with elements too."""
    return scope.operand(
        _MOVABLE,
        lambda dims: len(dims) >= min_rank and not (full and 0 in dims),
        lambda: tuple(max(size, int(full)) for size in scope.dims(4, min_rank)),
    )


def broadcast(scope: Scope) -> Instruction:
    value = scope.operand(_MOVABLE, lambda dims: prod(dims) <= MAX_ELEMENTS // 4 and len(dims) <= 3)
    dims = list(dims_of(value))
    kept = list(range(len(dims)))
    for _ in range(scope.tape.below(3)):
        at, size = scope.tape.below(len(dims) + 1), scope.size()
        dims.insert(at, size if prod(dims) * size <= MAX_ELEMENTS else 1)
        kept = [d + (d >= at) for d in kept]
    return scope.keep(scope.builder.broadcast(value, dims, kept))


def reshape(scope: Scope) -> Instruction:
    value = scope.operand(_MOVABLE)
    dims = dims_of(value)
    choice = scope.tape.below(5)
    if choice == 0:
        new: Dims = (prod(dims),)
    elif choice == 1 and len(dims) >= 2:
        at = scope.tape.below(len(dims) - 1)
        new = (*dims[:at], dims[at] * dims[at + 1], *dims[at + 2 :])
    elif choice == 2 and len(dims) <= 5:
        at = scope.tape.below(len(dims) + 1)
        new = (*dims[:at], 1, *dims[at:])
    else:
        new = _split(scope, dims)
    return scope.keep(scope.builder.reshape(value, new))


def _split(scope: Scope, dims: Dims) -> Dims:
    """One dimension as two."""
    for at, size in enumerate(dims):
        factors = [f for f in (2, 3, 4, 5, 8) if size and size % f == 0 and size > f]
        if factors and len(dims) <= 5:
            factor = scope.tape.pick(factors)
            return (*dims[:at], factor, size // factor, *dims[at + 1 :])
    return tuple(size for size in dims if size != 1)


def transpose(scope: Scope) -> Instruction:
    value = _ranked(scope, 2)
    return scope.add(Opcode.TRANSPOSE, [value], DimensionsAttributes(tuple(scope.tape.shuffled(shape_of(value).rank))))


def reverse(scope: Scope) -> Instruction:
    value = _ranked(scope)
    return scope.add(Opcode.REVERSE, [value], DimensionsAttributes(tuple(scope.tape.subset(shape_of(value).rank))))


def slice_(scope: Scope) -> Instruction:
    value = _ranked(scope)
    starts, limits, strides = [], [], []
    for size in dims_of(value):
        start = scope.tape.below(size + 1)
        starts.append(start)
        limits.append(size - scope.tape.below(size - start + 1))
        strides.append(scope.tape.pick((1, 1, 2, 3)))
    return scope.add(Opcode.SLICE, [value], SliceAttributes(tuple(starts), tuple(limits), tuple(strides)))


def concatenate(scope: Scope) -> Instruction:
    first = _ranked(scope)
    dims = dims_of(first)
    at = scope.tape.below(len(dims))
    operands = [first]
    for _ in range(scope.tape.below(3)):
        size = scope.size() if scope.tape.below(2) else dims[at]
        operands.append(scope.like(ArrayShape(type_of(first), (*dims[:at], size, *dims[at + 1 :]))))
    return scope.add(Opcode.CONCATENATE, operands, DimensionAttributes(at))


def pad(scope: Scope) -> Instruction:
    value = _ranked(scope)
    low, high, interior = [], [], []
    elements = shape_of(value).num_elements
    for size in dims_of(value):
        before, after, between = (scope.tape.pick((0, 1, 3, -1)) for _ in range(3))
        between = max(between, 0) if size * elements <= MAX_ELEMENTS else 0
        span = size + max(size - 1, 0) * between
        before = max(before, -span)
        after = max(after, -span - before)
        low.append(before)
        high.append(after)
        interior.append(between)
        elements = elements // max(size, 1) * max(span + before + after, 1)
    padding = scope.like(ArrayShape(type_of(value)))
    return scope.add(Opcode.PAD, [value, padding], PadAttributes(tuple(low), tuple(high), tuple(interior)))


def dynamic_slice(scope: Scope) -> Instruction:
    value = _ranked(scope)
    dims = dims_of(value)
    sizes = tuple(scope.tape.below(size + 1) if scope.tape.below(2) else size for size in dims)
    return scope.add(Opcode.DYNAMIC_SLICE, [value, *_starts(scope, dims)], DynamicSliceAttributes(sizes))


def dynamic_update_slice(scope: Scope) -> Instruction:
    value = _ranked(scope)
    dims = dims_of(value)
    sizes = tuple(scope.tape.below(size + 1) if scope.tape.below(2) else size for size in dims)
    update = scope.like(ArrayShape(type_of(value), sizes))
    return scope.add(Opcode.DYNAMIC_UPDATE_SLICE, [value, update, *_starts(scope, dims)])


def _starts(scope: Scope, dims: Dims) -> list[Instruction]:
    """One type for all, as XLA wants it; not an unsigned one, whose upper half XLA's CPU takes for negative."""
    kind = scope.tape.pick((E.S32, E.S64))
    starts = []
    for size in dims:
        start = scope.index(size)
        starts.append(start if type_of(start) is kind else scope.builder.convert(start, kind))
    return starts


def gather(scope: Scope) -> Instruction:
    """Windows at random places: some dimensions are indexed, some of those collapsed, the batch is of any rank."""
    operand = _ranked(scope, full=True)
    dims = dims_of(operand)
    indexed = scope.tape.subset(len(dims)) or [0]
    sizes = [1 if scope.tape.below(2) else 1 + scope.tape.below(size) for size in dims]
    collapsed = [d for d in indexed if sizes[d] == 1 and scope.tape.below(2) == 0]
    batch = scope.dims(2, max_elements=max(MAX_ELEMENTS // max(prod(sizes), 1), 1))
    indices, vector = _indices(scope, batch, [dims[d] for d in indexed])
    window = len(dims) - len(collapsed)
    offset = tuple(sorted(scope.tape.shuffled(len(batch) + window)[:window]))
    attributes = GatherAttributes(offset, tuple(collapsed), tuple(indexed), vector, tuple(sizes))
    return scope.add(Opcode.GATHER, [operand, indices], attributes)


def _indices(scope: Scope, batch: Dims, limits: list[int]) -> tuple[Instruction, int]:
    """Index vectors as a constant or converted from a value; mostly in range. And which dimension holds the vectors."""
    vector = scope.tape.below(len(batch) + 1)
    dims = (*batch[:vector], len(limits), *batch[vector:])
    kind = scope.tape.pick((E.S32, E.S64))
    if scope.tape.chance(3):
        return scope.like(ArrayShape(kind, dims)), vector
    rng = np.random.default_rng(scope.tape.below(1 << 16))
    limit = np.array(limits).reshape([-1 if d == vector else 1 for d in range(len(dims))])
    numbers = np.floor(rng.uniform(-0.1, 1.1, dims) * limit).astype(np.int64)
    return scope.constant(numbers.astype(NUMPY_DTYPE[kind]), kind), vector


def combiner(opcode: Opcode | None, element_type: ElementType) -> Computation:
    """A function of an old and a new scalar; ``opcode`` None keeps the new one."""
    builder = Builder(f"combine_{opcode or 'replace'}")
    old, new = (builder.parameter(ArrayShape(element_type)) for _ in range(2))
    return builder.build(new if opcode is None else builder.add(opcode, [old, new]))


def scatter(scope: Scope) -> Instruction:
    """Updates of whole windows; where windows may meet, the combiner does not depend on the order."""
    operand = scope.operand(
        (*INTEGERS, E.F32, E.F64, E.PRED, E.BF16),
        lambda dims: len(dims) >= 1 and 0 not in dims,
        lambda: tuple(max(size, 1) for size in scope.dims(3, 1)),
    )
    dims, kind = dims_of(operand), type_of(operand)
    indexed = scope.tape.subset(len(dims)) or [0]
    inserted = [d for d in indexed if scope.tape.below(2) == 0]
    window = [1 + scope.tape.below(dims[d]) for d in range(len(dims)) if d not in inserted]
    batch = scope.dims(2, max_elements=max(MAX_ELEMENTS // max(prod(window), 1), 1))
    indices, vector = _indices(scope, batch, [dims[d] for d in indexed])
    places = tuple(sorted(scope.tape.shuffled(len(batch) + len(window))[: len(window)]))
    windows, batches = iter(window), iter(batch)
    shape = tuple(next(windows) if d in places else next(batches) for d in range(len(batch) + len(window)))
    opcodes = (Opcode.OR, Opcode.AND) if kind is E.PRED else (Opcode.ADD, Opcode.MAXIMUM, Opcode.MINIMUM)
    opcode: Opcode | None = scope.tape.pick(opcodes)
    if prod(batch) == 1 and scope.tape.below(2):
        opcode = None
    attributes = ScatterAttributes(places, tuple(inserted), tuple(indexed), vector)
    updates = scope.like(ArrayShape(kind, shape))
    return scope.add(Opcode.SCATTER, [operand, indices, updates], attributes, called=[combiner(opcode, kind)])


def dimension_size(scope: Scope) -> Instruction:
    value = _ranked(scope)
    return scope.add(Opcode.GET_DIMENSION_SIZE, [value], DimensionAttributes(scope.tape.below(shape_of(value).rank)))


PRODUCTIONS = (
    (5, broadcast),
    (5, reshape),
    (4, transpose),
    (4, slice_),
    (3, concatenate),
    (3, pad),
    (2, reverse),
    (3, dynamic_slice),
    (3, dynamic_update_slice),
    (3, gather),
    (3, scatter),
)
