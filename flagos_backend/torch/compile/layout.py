"""How a strided tensor lies in memory: as a row-major array and a permutation. Used at both ends of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def layout_of(sizes: Sequence[int], strides: Sequence[int]) -> Layout:
    """The layout of a tensor; for one that is not dense (expanded, sliced) the row-major layout of a copy of it."""
    sizes, strides = tuple(sizes), tuple(strides)
    wide = [d for d, size in enumerate(sizes) if size != 1]
    by_stride = sorted(wide, key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(by_stride):
        if strides[d] != expected:
            return Layout(sizes, contiguous_strides(sizes), tuple(range(len(sizes))))
        expected *= sizes[d]
    # Dimensions of size 1 stay where they are; the others take the remaining places in order of their strides.
    rest = iter(by_stride)
    order = tuple(d if size == 1 else next(rest) for d, size in enumerate(sizes))
    return Layout(sizes, strides, order)
