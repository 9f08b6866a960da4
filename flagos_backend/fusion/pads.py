"""Pads in the schedule: which ones are regions, and what of their result is filled beside the array that they hold.
Used by fuse.py."""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.fusion.expressions import Expressions
from flagos_backend.ir.attributes import PadAttributes
from flagos_backend.ir.elementwise import is_computed
from flagos_backend.ir.hlo import Instruction
from flagos_backend.loop_ir.indexing import Indices, dims_of
from flagos_backend.loop_ir.region import Region, Store, linear


def is_growing_pad(instruction: Instruction) -> bool:
    """A pad that only adds elements."""
    attributes = instruction.attributes_as(PadAttributes)
    return is_computed(instruction) and min((*attributes.low, *attributes.high), default=0) >= 0


@dataclass(frozen=True, slots=True)
class Border:
    """A part of a pad's result: from ``starts`` on, of sizes ``dims``."""

    starts: tuple[int, ...]
    dims: tuple[int, ...]


def borders_of(pad: Instruction) -> list[Border]:
    """What a pad fills: on the two sides of a dimension, or where that would be more pieces all of the result."""
    attributes, whole = pad.attributes_as(PadAttributes), dims_of(pad)
    sides = list(zip(attributes.low, attributes.high, strict=True))
    padded = [dimension for dimension, (low, high) in enumerate(sides) if low or high]
    if any(attributes.interior) or len(padded) != 1:
        return [Border((0,) * len(whole), whole)]
    (dimension,) = padded
    low, high = sides[dimension]
    found = []
    for start, size in ((0, low), (whole[dimension] - high, high)):
        if size:
            starts = tuple(start if d == dimension else 0 for d in range(len(whole)))
            found.append(Border(starts, tuple(size if d == dimension else n for d, n in enumerate(whole))))
    return found


def part_of_pad(pad: Instruction, part: int, expressions: Expressions, here: Indices) -> Region:
    """What fills border number ``part`` of ``pad``, or behind those what lies between them. ``here``: its point."""
    array, padding = expressions.operands(pad)
    borders, attributes = borders_of(pad), pad.attributes_as(PadAttributes)
    if part == len(borders):
        value = expressions.of(array, here)
        sides = zip(here, attributes.interior, attributes.low, strict=True)
        there = tuple(index.scaled(interior + 1, low) for index, interior, low in sides)
    else:
        value = expressions.of(padding, ())
        there = tuple(index.scaled(1, start) for index, start in zip(here, borders[part].starts, strict=True))
    dims = expressions.choices.dims
    return Region(dims, (Store(pad, value, linear(there, dims_of(pad), len(dims))),))
