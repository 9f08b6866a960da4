"""Whether two programs' results are the same, up to the rounding of their types. Used by versus.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one output. ``largest``: of integers and truth values how many elements differ; of others the largest
    difference, as a part of the peer's largest magnitude, infinite where NaN or infinities are in other places.
    ``allowed``: the square root of the type's epsilon, as sums are added in other orders; 0 of integers."""

    output: int
    type: str
    largest: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.largest <= self.allowed

    def text(self) -> str:
        """One line."""
        if not self.allowed:
            return f"output {self.output}, {self.type}: {self.largest:.0f} elements differ"
        return f"output {self.output}, {self.type}: {self.largest:.2g} of the largest value, {self.allowed:.2g} allowed"


def differences(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> tuple[Difference, ...]:
    """Each output of ours beside the peer's. Raises ValueError where their number, shapes or types differ."""
    pairs = zip(ours, theirs, strict=True)
    return tuple(_difference(number, mine, other) for number, (mine, other) in enumerate(pairs))


def _difference(number: int, mine: np.ndarray, other: np.ndarray) -> Difference:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        raise ValueError(f"output {number} is {mine.dtype}{list(mine.shape)} and {other.dtype}{list(other.shape)}")
    epsilon = _epsilon(mine.dtype)
    if not epsilon:
        return Difference(number, str(mine.dtype), float(np.count_nonzero(mine != other)), 0.0)
    wide = np.complex128 if mine.dtype.kind == "c" else np.float64
    a, b = mine.astype(wide).ravel(), other.astype(wide).ravel()
    finite = np.isfinite(b)
    rest_a, rest_b = a[~finite], b[~finite]
    alike = np.isfinite(a)[finite].all() and np.array_equal(rest_a, rest_b, equal_nan=True)
    largest = 0.0 if alike else float("inf")
    if alike and finite.any():
        scale = float(np.abs(b[finite]).max())
        apart = float(np.abs(a[finite] - b[finite]).max())
        largest = apart / scale if scale else (0.0 if not apart else float("inf"))
    return Difference(number, str(mine.dtype), largest, epsilon**0.5)


def _epsilon(dtype: np.dtype[Any]) -> float:
    """0 of what is no floating-point type."""
    try:
        return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    except ValueError:
        return 0.0
