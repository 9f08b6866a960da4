"""Concatenates, pads and rolls that regions read in place: a region is cut into boxes where they are put together
(loop_ir/boxes.py), if that costs less than to write them and read them back. Used by fuse.py on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from flagos_backend.ir.attributes import DimensionAttributes, PadAttributes
from flagos_backend.ir.elementwise import is_regular
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.boxes import threshold
from flagos_backend.loop_ir.indexing import Indices, dims_of

# Along each dimension, where pieces begin but the first.
Cuts = dict[int, set[int]]
# A region is cut into no more boxes than this: as many as rolls along three dimensions, to both sides, take.
MAX_BOXES = 27
# Nanoseconds: of a loop that is begun; of a tile, and of each operation and array in it; of a row that is brought into
# a tile of several; of a byte that is written, or read, in the caches and beyond the second level.
_PER_LOOP, _PER_TILE, _PER_OPERATION, _PER_ARRAY, _PER_ROW = 60.0, 8.0, 3.0, 4.0, 4.0
_PER_BYTE, _PER_FAR_BYTE = 0.04, 0.1
_NEAR_BYTES = 1 << 20
# Elements of a tile, and of rows that have one of their own.
_TILE, _LONG = 1024, 64


@dataclass(slots=True)
class Reader:
    """A region of ``dims`` that is cut at ``cuts`` so far; along ``reduced`` it cannot be."""

    dims: tuple[int, ...]
    reduced: Collection[int]
    cuts: Cuts

    def boxes(self, cuts: Cuts) -> int:
        return prod(len(points) + 1 for points in cuts.values())

    def cost(self, cuts: Cuts, operations: int) -> float:
        """Nanoseconds of loops and tiles, without what is done for each element, when it is cut at ``cuts``."""
        arrays, points = operations + 2, prod(self.dims)
        tile = _PER_TILE + _PER_OPERATION * operations + _PER_ARRAY * arrays
        row = points
        inner = max((d for d, found in cuts.items() if found), default=None)
        if inner is not None:
            pieces = pairwise((0, *sorted(cuts[inner]), self.dims[inner]))
            row = max(stop - start for start, stop in pieces) * prod(self.dims[inner + 1 :])
        loops = self.boxes(cuts) * (_PER_LOOP + tile)
        if row >= min(_LONG, points):
            return loops + tile * points / min(row, _TILE)
        return loops + tile * points / _TILE + _PER_ROW * arrays * points / row


def can_be_cut(value: Instruction) -> bool:
    """Whether ``value`` has elements, and is put together of boxes."""
    if 0 in dims_of(value) or not is_regular(value):
        return False
    return value.opcode is Opcode.CONCATENATE or not any(value.attributes_as(PadAttributes).interior)


def cut_readers(value: Instruction, uses: Sequence[tuple[Reader, Indices, int]]) -> bool:
    """Cuts all readers of ``value`` if that costs less than a buffer for it. ``uses``: readers, where they read it, and
    how many operations they have."""
    found: dict[int, tuple[Reader, Cuts, int]] = {}
    for reader, indices, operations in uses:
        _, before, _ = found.get(id(reader), (reader, reader.cuts, 0))
        cuts = _with_seams(value, reader, indices, before)
        if cuts is None:
            return False
        found[id(reader)] = reader, cuts, operations
    if not _pays(value, found.values()):
        return False
    for reader, cuts, _ in found.values():
        reader.cuts = cuts
    return True


def _with_seams(value: Instruction, reader: Reader, indices: Indices, before: Cuts) -> Cuts | None:
    """Where ``reader``, which is cut where ``before`` says, is cut if it reads ``value`` at ``indices`` too. None where
    it cannot be, or would be in too many boxes."""
    found = {d: set(points) for d, points in before.items()}
    for dimension, seams in _seams(value):
        for seam in seams:
            place = threshold(indices[dimension], seam, reader.dims)
            if place is None or (place[1] and place[0] in reader.reduced):
                return None
            if place[1]:
                found.setdefault(place[0], set()).add(place[1])
    return found if reader.boxes(found) <= MAX_BOXES else None


def _pays(value: Instruction, readers: Iterable[tuple[Reader, Cuts, int]]) -> bool:
    assert isinstance(value.shape, ArrayShape)
    size = value.shape.num_bytes
    parts = sum(len(seams) + 1 for _, seams in _seams(value))
    buffer = parts * _PER_LOOP + 2 * size * (_PER_BYTE if size <= _NEAR_BYTES else _PER_FAR_BYTE)
    cutting = sum(
        reader.cost(cuts, operations) - reader.cost(reader.cuts, operations) for reader, cuts, operations in readers
    )
    return cutting < buffer


def _seams(value: Instruction) -> list[tuple[int, list[int]]]:
    """The dimensions along which ``value`` is put together, and where."""
    if value.opcode is Opcode.CONCATENATE:
        dimension = value.attributes_as(DimensionAttributes).dimension
        sizes = [dims_of(operand)[dimension] for operand in value.operands]
        return [(dimension, [*accumulate(sizes)][:-1])]
    pad, whole = value.attributes_as(PadAttributes), dims_of(value)
    sides = enumerate(zip(pad.low, pad.high, whole, strict=True))
    return [(d, [n for n in (low, size - high) if 0 < n < size]) for d, (low, high, size) in sides]
