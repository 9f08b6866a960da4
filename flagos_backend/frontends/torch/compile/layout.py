"""How a strided tensor lies in memory: as a row-major array and a permutation, at both ends of a program; or, where a
program takes it, as an array within an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagos_backend.ir.strided_view import span


@dataclass(frozen=True, slots=True)
class Layout:
    """A dense tensor: dimension ``order[i]`` of it is dimension i of the row-major array that fills its memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def physical(self) -> tuple[int, ...]:
        return tuple(self.sizes[d] for d in self.order)

    @property
    def is_row_major(self) -> bool:
        return self.order == tuple(range(len(self.sizes)))

    @property
    def inverse(self) -> tuple[int, ...]:
        """Dimension d of the tensor is dimension ``inverse[d]`` of the row-major array."""
        return tuple(self.order.index(d) for d in range(len(self.sizes)))


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor of any strides: dimensions of stride 0 repeat what the others, ``kept``, hold."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def physical(self) -> tuple[int, ...]:
        """The memory from its first to its last element."""
        core = self.core
        return core.physical if core is not None else (span(self.sizes, self.strides),)

    @property
    def core(self) -> Layout | None:
        """How what the kept dimensions hold lies, where that is dense."""
        return _dense([self.sizes[d] for d in self.kept], [self.strides[d] for d in self.kept])

    @property
    def overlaps(self) -> bool:
        """Whether several elements may be in one place, so that memory cannot hold any values that one likes."""
        if any(self.sizes[d] > 1 for d in range(len(self.sizes)) if d not in self.kept):
            return True
        end = 1
        for d in sorted(self.kept, key=lambda d: self.strides[d]):
            if self.strides[d] < end:
                return True
            end = self.strides[d] * (self.sizes[d] - 1) + end
        return False


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def layout_of(sizes: Sequence[int], strides: Sequence[int]) -> Layout:
    """The layout of a tensor; for one that is not dense (expanded, sliced) the row-major layout of a copy of it. A
    tensor without elements is dense, whatever its strides."""
    row_major = tuple(range(len(sizes)))
    if 0 in sizes:
        return Layout(tuple(sizes), tuple(strides), row_major)
    return _dense(sizes, strides) or Layout(tuple(sizes), contiguous_strides(sizes), row_major)


def input_layout_of(sizes: Sequence[int], strides: Sequence[int]) -> Layout | Strided:
    """The layout of a tensor as it is."""
    layout = layout_of(sizes, strides)
    if layout.strides == tuple(strides):
        return layout
    kept = tuple(d for d, size in enumerate(sizes) if size != 1 and strides[d] != 0)
    return Strided(tuple(sizes), tuple(strides), kept)


def _dense(sizes: Sequence[int], strides: Sequence[int]) -> Layout | None:
    sizes, strides = tuple(sizes), tuple(strides)
    wide = [d for d, size in enumerate(sizes) if size != 1]
    by_stride = sorted(wide, key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(by_stride):
        if strides[d] != expected:
            return None
        expected *= sizes[d]
    # Dimensions of size 1 stay where they are; the others take the remaining places in order of their strides.
    rest = iter(by_stride)
    order = tuple(d if size == 1 else next(rest) for d, size in enumerate(sizes))
    return Layout(sizes, strides, order)
