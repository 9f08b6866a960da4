"""Windows at run-time starts as bytecode: where each position of a batch has its indices and its window, in elements.

Used by gather.py and scatter.py; native/cpu/parse_windows.cc reads the bytecode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.ir.attributes import GatherAttributes, IndexNumber, ScatterAttributes
from flagos_backend.ir.types import ArrayShape


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of indices. ``dims``: of each array that holds some: one array for all, or one for each number of an
    index. ``wraps``: of each number, what is added to negative ones."""

    dims: tuple[int, ...]
    wraps: tuple[int, ...]

    def index_shape(self, parts: tuple[ArrayShape, ...], vector_dim: int) -> ArrayShape | None:
        """The shape of the index vectors whose numbers are in ``parts``; None if those do not hold any."""
        kinds = {part.element_type for part in parts}
        if len(kinds) != 1 or any(part.num_elements != prod(self.dims) for part in parts):
            return None
        dims = tuple(len(parts) if len(parts) > 1 and d == vector_dim else size for d, size in enumerate(self.dims))
        return ArrayShape(kinds.pop(), dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedGather(GatherAttributes):
    """Operands: the array, then the arrays of numbers."""

    numbers: Numbers

    def index_shape(self, indices: tuple[ArrayShape, ...]) -> ArrayShape | None:
        return self.numbers.index_shape(indices, self.index_vector_dim)

    def index_number(self, number: int, indices: tuple[tuple[int, ...], ...]) -> IndexNumber:
        operand, component = (1, number) if len(indices) == 1 else (1 + number, 0)
        return IndexNumber(operand, self.numbers.dims, component, self.numbers.wraps[number])


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedScatter(ScatterAttributes):
    """Operands: the array, the arrays of numbers, the updates."""

    numbers: Numbers

    def num_arrays(self, num_operands: int) -> int:
        return 1

    def index_shape(self, indices: tuple[ArrayShape, ...]) -> ArrayShape | None:
        return self.numbers.index_shape(indices, self.index_vector_dim)


@dataclass(frozen=True, slots=True)
class Extent:
    """A dimension: its size, and what a step along it is worth in each of some arrays. ``is_apart``: no index moves
    windows along it, so that different positions on it never share an element."""

    size: int
    strides: tuple[int, ...]
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class Windows:
    """``batch``: strides in the indices, the array, and the other array, which is a gather's result or a scatter's
    updates. ``starts``: of each number of an index the greatest that is valid, its stride in the array, and what is
    added to negative ones. ``window``: strides in the array and the other one."""

    batch: tuple[Extent, ...]
    index_vector_stride: int
    starts: tuple[tuple[int, int, int], ...]
    window: tuple[Extent, ...]

    @property
    def has_run(self) -> bool:
        """Whether elements of a window stand side by side in both arrays."""
        return bool(self.window) and self.window[-1].strides == (1, 1)

    def bytecode(self, array: ArrayShape, indices: ArrayShape) -> tuple[int, ...]:
        bytecode = [
            array.element_type.bytes,
            int(indices.element_type),
            *_bytecode(self.batch),
            self.index_vector_stride,
        ]
        bytecode += [len(self.starts), *(number for start in self.starts for number in start)]
        return (*bytecode, *_bytecode(self.window))


def windows(
    array: ArrayShape,
    indices: ArrayShape,
    other: ArrayShape,
    *,
    index_vector_dim: int,
    wraps: Sequence[int],
    start_dims: Sequence[int],
    batching_dims: Sequence[tuple[int, int]],
    window_sizes: Sequence[int],
    window_dims: Sequence[int],
    dropped_dims: Iterable[int],
) -> Windows | None:
    """Of arrays that stand row by row; None where native code does not take them: sub-byte elements, and nothing at
    all. ``wraps``: see Numbers. ``start_dims``: which dimension of the array each number of an index is for.
    ``batching_dims``: pairs of a dimension of the indices and one of the array. ``window_sizes``: by dimensions of the
    array. ``window_dims``: those of the other array that windows have, but for the array's ``dropped_dims``."""
    if min(array.element_type.bits, indices.element_type.bits) < 8 or 0 in (*array.dims, *other.dims):
        return None
    array_strides, index_strides, other_strides = (_row_major(shape.dims) for shape in (array, indices, other))
    along = dict(batching_dims)
    batch_dims = [d for d in range(len(indices.dims)) if d != index_vector_dim]
    in_other = [d for d in range(len(other.dims)) if d not in window_dims]
    batch = [
        Extent(
            indices.dims[d],
            (index_strides[d], array_strides[along[d]] if d in along else 0, other_strides[o]),
            d in along,
        )
        for d, o in zip(batch_dims, in_other, strict=True)
    ]
    single = prod(extent.size for extent in batch) == 1
    dropped = frozenset(dropped_dims)
    kept = [d for d in range(len(array.dims)) if d not in dropped]
    window = [
        Extent(window_sizes[d], (array_strides[d], other_strides[o]), single or d not in start_dims)
        for d, o in zip(kept, window_dims, strict=True)
    ]
    return Windows(
        _merged(batch),
        index_strides[index_vector_dim] if index_vector_dim < len(indices.dims) else 0,
        tuple((array.dims[d] - window_sizes[d], array_strides[d], w) for d, w in zip(start_dims, wraps, strict=True)),
        _merged(window),
    )


def _row_major(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(dims[d + 1 :]) for d in range(len(dims)))


def _merged(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Without dimensions of one position, and with neighbours as one where all arrays allow it."""
    merged: list[Extent] = []
    for inner in extents:
        if inner.size == 1:
            continue
        outer = merged[-1] if merged else None
        if outer and outer.strides == tuple(inner.size * stride for stride in inner.strides):
            merged[-1] = Extent(outer.size * inner.size, inner.strides, outer.is_apart and inner.is_apart)
        else:
            merged.append(inner)
    return tuple(merged)


def _bytecode(extents: Sequence[Extent]) -> list[int]:
    return [len(extents), *(number for extent in extents for number in (extent.size, *extent.strides))]
