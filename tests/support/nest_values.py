"""Whether a transform of loop nests keeps their values: bit by bit, or where it may compute in another order or form,
without rounding and within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from flagos_backend.cli.nest_values import arrays_of, compare
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.storage import dtype_of, from_bytes
from flagos_backend.loop_ir.region import Region

E = ElementType
_EPS_F32 = 2.0**-23
# Of what sums and quotients in another order or form may be off by in float64, relative to the greatest element.
_ORDER = 2.0**-40
#: How far apart values may be that are computed without rounding; 0: the values of the types are the same bit by bit.
BOUNDS = {
    "split_at_seams": 0.0,
    "unroll_channels": 0.0,
    "flatten_addresses": 0.0,
    "split_long_reductions": _ORDER,
    "split_two_ended_reductions": _ORDER,
    "transpose_short_reductions": _ORDER,
    "unroll_short_rows": _ORDER,
    "log2": 4 * _EPS_F32,  # log(2), or one over it, is a number of float32
    "logistic": _ORDER,
    "excess_precision": _ORDER,
    "floor_division": 0.0,
    "rotate": 0.0,
    "join_operations": 0.0,
    "half_powers": _ORDER,
    "join_sums": _ORDER,
    "shared_reciprocals": _ORDER,
    "exp_below_maximum": 0.0,
    "unpacked_16_bit_sums": 0.0,
    "straight_quotients": 0.0,
    "near_arguments": 4 * _EPS_F32,  # log(2) is a number of float32
    "select_after_polynomials": 0.0,
}
_SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5])


def arrays(nests: Sequence[Region], rng: np.random.Generator, special: bool = False) -> dict[Instruction, torch.Tensor]:
    """Random elements of everything that ``nests`` load, or store to; ``special``: some are infinite, NaN or zero."""
    return {a: _random(a.shape, rng, special) for a in arrays_of(nests) if isinstance(a.shape, ArrayShape)}


def _random(shape: ArrayShape, rng: np.random.Generator, special: bool) -> torch.Tensor:
    kind, count = shape.element_type, prod(shape.dims)
    if kind.is_complex:
        parts = _random(ArrayShape(kind.real, (2 * count,)), rng, special)
        return torch.view_as_complex(parts.reshape(-1, 2))
    if kind is E.PRED:
        return torch.from_numpy(rng.integers(0, 2, count).astype(bool))
    if kind.is_integer and kind.bits >= 8:
        small = rng.integers(0 if kind.is_unsigned else -9, 10, count)
        bits = np.frombuffer(rng.bytes(8 * count), np.int64)
        return torch.from_numpy(np.where(rng.random(count) < 0.5, small, bits)).to(dtype_of(kind))
    if kind.bits <= 8:
        return from_bytes(rng.bytes(count), ArrayShape(kind, (count,)))
    values = rng.standard_normal(count)
    if special:
        values = np.where(rng.random(count) < 0.2, rng.choice(_SPECIAL, count), values)
    return torch.from_numpy(values).to(dtype_of(kind))


def keeps_values(name: str, before: Sequence[Region], after: Sequence[Region], rng: np.random.Generator) -> bool:
    """Whether ``after``, which the transform ``name`` made, stores what ``before`` does: of plain numbers, and where
    some are special."""
    return all(
        found.is_same or (BOUNDS[name] > 0 and found.exact <= BOUNDS[name])
        for special in (False, True)
        for found in compare(before, after, arrays(before, rng, special)).values()
    )
