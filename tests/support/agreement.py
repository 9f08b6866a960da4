"""When a value agrees with an oracle of more precision: by type, and without subnormal numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from support.numbers import distance

# What sums in another order may be off by, relative to the greatest element of the result, by bytes of an element.
RELATIVE = {1: 0.1, 2: 2e-2, 4: 2e-5, 8: 1e-11, 16: 1e-11}
ULP = 64


def without_subnormals(argument: np.ndarray) -> np.ndarray:
    """Zero for what is subnormal in float32: stock XLA reads such numbers as zero on the CPU, and we do not."""
    if argument.dtype.kind == "c":
        result = argument.copy()
        result.real, result.imag = without_subnormals(argument.real), without_subnormals(argument.imag)
        return result
    if (argument.dtype.kind != "f" and argument.dtype != ml_dtypes.bfloat16) or argument.dtype.itemsize < 2:
        return argument
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(argument.astype(np.float64)) < 1e-37, np.zeros_like(argument), argument)


def agrees(ours: np.ndarray, theirs: np.ndarray, exact: bool) -> np.ndarray:
    """Which elements are close enough; of integers and PRED, which are equal."""
    off = distance(ours, theirs)
    if exact or ours.dtype.kind in "biu":
        return off == 0
    wide = np.complex128 if ours.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        a, b = ours.astype(wide), theirs.astype(wide)
        finite = np.abs(b[np.isfinite(b)])
        scale = max(finite.max(initial=0.0), 1.0)  # a result may be nothing but the rounding of larger numbers
        return (off <= ULP) | (np.abs(a - b) <= RELATIVE[ours.real.dtype.itemsize] * scale)
