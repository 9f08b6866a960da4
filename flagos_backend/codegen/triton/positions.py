"""Where a program's elements are: the text of positions, addresses, masks and shapes of blocks. Part of writer.py.

Sizes and strides stand in the text as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flagos_backend.codegen.triton.tiling import Axis, Loop, Tiling
from flagos_backend.loop_ir.region import Affine, Expression, Index, Load, Reduce, Region

# Past this many elements positions need 64 bits.
_WIDE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Positions:
    """Those of ``region`` as ``tiling`` cuts it. ``are_wide``: they have 64 bits. ``is_at_ends``: of a row whose loop
    leaves its ends out, the ends."""

    region: Region
    tiling: Tiling
    are_wide: bool
    is_at_ends: bool = False

    @classmethod
    def of_region(cls, region: Region, tiling: Tiling, partials: Sequence[int]) -> Positions:
        """``partials``: how many elements each part of each split reduction has."""
        expressions = region.expressions()
        indices = [e.index for e in expressions if isinstance(e, Load)]
        indices += [e.value for e in expressions if isinstance(e, Index)]
        indices += [store.index for store in region.stores]
        reach = [
            abs(i.offset)
            + sum(abs(c) * size for c, size in zip(i.coefficients, region.dims, strict=True))
            + sum(abs(shift.factor) * shift.limit for shift in i.shifts)
            for i in indices
        ]
        reach += [axis.blocks * axis.block for axis in tiling.axes]
        if tiling.looped is not None:  # its counter stops a step past the end
            reach.append(tiling.looped.size + tiling.looped.block * tiling.parts * tiling.unroll)
        reach += [size * tiling.parts for size in partials]
        return cls(region, tiling, max(reach, default=0) > _WIDE)

    def at_ends(self) -> Positions:
        """Those of a row's ends, which are one block and need no loop."""
        assert self.tiling.alignment is not None
        x, r = self.tiling.axes
        ends = replace(r, block=2 * self.tiling.alignment.unit)
        return replace(self, tiling=replace(self.tiling, axes=(x, ends), loop=Loop.NONE), is_at_ends=True)

    # ---- Lines that say where a program is

    def grid(self) -> Iterator[str]:
        """Positions along the axes that the grid walks; the first of them changes fastest from program to program."""
        tiling = self.tiling
        spread = [axis for axis in tiling.axes if axis is not tiling.looped]
        several = [axis for axis in reversed(spread) if axis.blocks > 1]
        rest = "tl.program_id(0)" + (".to(tl.int64)" if self.are_wide else "")
        if len(several) + (tiling.parts > 1) > 1:
            yield f"program = {rest}"
            rest = "program"
        for number, axis in enumerate(several):
            last = number == len(several) - 1 and tiling.parts == 1
            block = rest if last else f"({rest} % {axis.blocks})"
            rest = f"({rest} // {axis.blocks})"
            yield from self._along(axis, f"{block} * {axis.block} + ")
        if tiling.parts > 1:
            yield f"part = {rest}"
        for axis in spread:
            if axis.blocks == 1:
                yield from self._along(axis, "")

    def alignment(self, values: Mapping[Expression, str]) -> Iterator[str]:
        """Of a row's first elements and its last ones, which the loop leaves out, the positions; and the loop's."""
        alignment = self.tiling.alignment
        if alignment is None:
            return
        axis, unit = self.tiling.axes[1], alignment.unit
        yield f"head = -({self.position(alignment.first, values)}) & {unit - 1}"
        yield f"middle = ({axis.size} - head) // {unit} * {unit}"
        yield f"end = {self.offsets(replace(axis, block=2 * unit))}"
        yield f"end_in = tl.where(end < {unit}, end < head, head + middle + end < {axis.size + unit})"
        yield f"end = tl.where(end < {unit}, end, head + middle + end - {unit})"

    def loop(self, axis: Axis) -> str:
        """The head of the loop along ``axis``."""
        first = "tl.full([], 0, tl.int64)" if self.are_wide else "0"
        if self.tiling.parts > 1:
            first = "part" if axis.block == 1 else f"part * {axis.block}"
        bounds = f"{first}, {axis.size}, {axis.block * self.tiling.parts}"
        if self.tiling.stages > 1:
            return f"for start in tl.range({bounds}, num_stages={self.tiling.stages}):"
        if self.tiling.unroll > 1:
            return f"for start in tl.range({bounds}, loop_unroll_factor={self.tiling.unroll}):"
        return f"for start in range({bounds}):"

    def iteration(self, axis: Axis) -> Iterator[str]:
        """Positions in an iteration of that loop."""
        if self.tiling.alignment is None:
            yield from self._along(axis, "start + ")
            return
        yield f"{axis.name} = start + {self.offsets(axis)}"
        yield f"{axis.name}_in = {axis.name} < middle"
        yield f"{axis.name} = head + {axis.name}"

    def _along(self, axis: Axis, first: str) -> Iterator[str]:
        yield f"{axis.name} = {first}{self.offsets(axis)}"
        if axis.is_ragged:
            yield f"{axis.name}_in = {axis.name} < {axis.size}"

    # ---- Text of one block

    def name(self, axis: Axis) -> str:
        """What the positions along ``axis`` are called."""
        return "end" if self.is_at_ends and axis is self.tiling.axes[1] else axis.name

    def offsets(self, axis: Axis) -> str:
        """Positions in a block."""
        expand = ""
        if len(self.tiling.axes) == 2:
            expand = "[:, None]" if axis is self.tiling.axes[0] else "[None, :]"
        return f"tl.arange(0, {axis.block}){expand}" + (".to(tl.int64)" if self.are_wide else "")

    def position(self, index: Affine, values: Mapping[Expression, str]) -> str:
        """``index`` at the block's positions: a block, be it of one element. ``values``: names of what shifts it."""
        kind = f"tl.{'int64' if self.are_wide else 'int32'}"
        if not self.axes_of(index) and not index.shifts:
            return f"tl.full({self.shape([])}, {index.offset}, {kind})"
        terms = [str(index.offset)] if index.offset else []
        for shift in index.shifts:
            start = values[shift.start] + ("" if self.are_wide else f".to({kind})")
            terms.append(start if shift.factor == 1 else f"{start} * {shift.factor}")
        for axis in self.tiling.axes:
            coefficients = [index.coefficients[d] for d in axis.dims]
            for coefficient, divisor, modulus in _terms(axis.sizes, coefficients):
                text = name = self.name(axis)
                if divisor != 1:
                    text = f"{text} // {divisor}"
                if modulus:
                    text = f"{text} % {modulus}"
                if coefficient != 1:
                    text = f"({text}) * {coefficient}" if text != name else f"{text} * {coefficient}"
                terms.append(text)
        return " + ".join(terms)

    def address(self, index: Affine, values: Mapping[Expression, str]) -> str:
        """``index`` as loads and stores take it, with what is known of it."""
        alignment, position = self.tiling.alignment, self.position(index, values)
        if alignment is None or self.is_at_ends or index not in alignment.indices:
            return position
        return f"tl.multiple_of({position}, [1, {alignment.unit}])"

    def mask(self, axes: Iterable[str]) -> str:
        """Which positions along the ``axes`` are within the region; nothing if all are."""
        wanted = set(axes)
        return " & ".join(
            f"{self.name(axis)}_in" for axis in self.tiling.axes if self.is_ragged(axis) and axis.name in wanted
        )

    def is_ragged(self, axis: Axis) -> bool:
        """Whether some positions of a block are outside the region: whatever its size, of a row of which the loop
        leaves out the ends."""
        return axis.is_ragged or (self.tiling.alignment is not None and axis is self.tiling.axes[1])

    def shape(self, varying: Sequence[Axis]) -> str:
        """A block's that varies along those axes."""
        sizes = [str(axis.block if axis in varying else 1) for axis in self.tiling.axes]
        return f"[{', '.join(sizes)}]"

    # ---- Axes

    def axes_of(self, index: Affine) -> list[str]:
        """Along which ``index`` varies."""
        along = self.region.along(index)
        return [axis.name for axis in self.tiling.axes if not along.isdisjoint(axis.dims)]

    def reduced_axis(self, reduction: Reduce) -> Axis:
        """Which ``reduction`` reduces."""
        for axis in self.tiling.axes:
            if set(reduction.dims) & set(axis.dims):
                return axis
        return self.tiling.axes[-1]  # over dimensions of size 1


def _terms(sizes: Sequence[int], coefficients: Sequence[int]) -> list[tuple[int, int, int]]:
    """How an axis position enters an index: (coefficient, divisor, modulus or 0) of each run of dimensions that the
    index steps through evenly, outermost first."""
    terms: list[tuple[int, int, int]] = []
    stride, d = 1, len(sizes) - 1
    while d >= 0:
        first, size = d, sizes[d]
        while first > 0 and coefficients[first - 1] == coefficients[d] * size:
            first -= 1
            size *= sizes[first]
        if coefficients[d]:
            terms.append((coefficients[d], stride, size if first > 0 else 0))
        stride *= size
        d = first - 1
    return terms[::-1]
