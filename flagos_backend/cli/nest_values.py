"""What loop nests compute, before and after a transform, by the reference interpreter. Part of ``flagos opt``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flagos_backend.cli.running import random_bytes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.nests import evaluate
from flagos_backend.kernels.reference.storage import from_bytes
from flagos_backend.loop_ir.region import Load, Region

#: Of what transforms change without rounding: a constant of float32 in another form, or none.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """Between what two lists of nests leave in an array. ``is_same``: each element has the same bits, or both are NaN.

    ``exact``: 0 where it is the same; else, of the same computed without rounding, the greatest distance of two
    elements, relative to the greatest finite one of the array. Infinite where one is finite and the other not, and
    where integers differ.
    """

    is_same: bool
    exact: float

    def __str__(self) -> str:
        if self.is_same:
            return "the same bits"
        return f"other bits; without rounding {self.exact:.3g} of the greatest element apart"


def arrays_of(nests: Iterable[Region]) -> tuple[Instruction, ...]:
    """Everything that ``nests`` load or store to, each once."""
    found: dict[Instruction, None] = {}
    for nest in nests:
        found |= dict.fromkeys(e.source for e in nest.expressions() if isinstance(e, Load))
        found |= dict.fromkeys(store.target for store in nest.stores)
    return tuple(found)


def random_arrays(nests: Iterable[Region], rng: np.random.Generator) -> dict[Instruction, torch.Tensor]:
    """What they hold before ``nests`` run: what is not stored to shows as well."""
    shapes = {array: array.shape for array in arrays_of(nests)}
    return {
        array: from_bytes(random_bytes(shape, rng), shape)
        for array, shape in shapes.items()
        if isinstance(shape, ArrayShape)
    }


def compare(
    before: Sequence[Region], after: Sequence[Region], arrays: Mapping[Instruction, torch.Tensor]
) -> dict[Instruction, Difference]:
    """By array that ``before`` stores to. Raises NestUndefined."""
    targets = dict.fromkeys(store.target for nest in before for store in nest.stores)
    narrow = [evaluate(nests, arrays) for nests in (before, after)]
    changed = {t for t in targets if not _is_same(*(result[t] for result in narrow))}
    wide = [evaluate(nests, arrays, wide=True) for nests in (before, after)] if changed else []
    return {
        t: Difference(t not in changed, _distance(*(result[t] for result in wide)) if t in changed else 0.0)
        for t in targets
    }


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [x.contiguous().view(torch.uint8).reshape(len(x), -1) for x in (a, b)]
    return bool(((bits[0] == bits[1]).all(-1) | (a.isnan() & b.isnan())).all())


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.is_complex():
        return _distance(torch.view_as_real(a), torch.view_as_real(b))
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else math.inf
    alike = (a == b) | (a.isnan() & b.isnan())
    if bool(alike.all()):
        return 0.0
    apart = (a - b)[~alike].abs()
    greatest = b[b.isfinite()].abs().max() if bool(b.isfinite().any()) else b.new_zeros(())
    if not bool(apart.isfinite().all()) or not greatest:
        return math.inf
    return float((apart / greatest).max())
