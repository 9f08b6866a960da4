"""Resolves which donated arguments are used up: those that an output of the same size can take over. The others stay
the caller's, as with XLA, whose optimizer pairs donors and outputs in the same way. Last of the passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce

from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import Shape, TupleShape, leaves


def resolve_donation(module: Module) -> Module:
    free = _sizes(module.entry.root.shape)
    free.subtract(size for alias in module.aliases for size in _sizes(_part(module, alias.output_index)).elements())
    kept = []
    for number in module.donors:
        sizes = _sizes(module.entry.parameters[number].shape)
        if sizes <= free:
            free -= sizes
            kept.append(number)
    return module if len(kept) == len(module.donors) else replace(module, donors=tuple(kept))


def _sizes(shape: Shape) -> Counter[int]:
    """How many arrays there are of each number of bytes."""
    return Counter(leaf.num_bytes for leaf in leaves(shape))


def _part(module: Module, index: tuple[int, ...]) -> Shape:
    return reduce(_element, index, module.entry.root.shape)


def _element(shape: Shape, position: int) -> Shape:
    assert isinstance(shape, TupleShape)  # the verifier has followed the index
    return shape.elements[position]
