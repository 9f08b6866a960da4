"""Points, exact values and errors in units in the last place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import mpmath
import numpy as np

from tools.accuracy.functions import Elementary

Array = np.ndarray[Any, Any]

_DIGITS = 60
_NEIGHBOURS = 40


@dataclass(frozen=True)
class Errors:
    """In units in the last place of the exact value, over points whose exact value is a normal number; ``subnormal``:
    the greatest one over results below that; ``wrong``: points where one is NaN or infinite and the other is not."""

    greatest: float
    mean: float
    subnormal: float
    wrong: int


def points(function: Elementary, dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> tuple[Array, ...]:
    """Arguments: each number of a 16-bit type, else random bit patterns; and neighbours of what is hard."""
    columns = []
    for _ in range(function.arity):
        if dtype.itemsize == 2 and function.arity == 1:
            columns.append(np.arange(1 << 16, dtype=np.uint16).view(dtype))
            continue
        columns.append(np.concatenate([_any_bits(dtype, count, rng), _ordinary(dtype, count, rng)]))
    crowded = [_around(np.asarray(value).astype(dtype)) for value in function.near]
    if crowded:
        near = np.concatenate(crowded)
        columns = [
            np.concatenate([column, near if n == 0 else rng.permutation(near)]) for n, column in enumerate(columns)
        ]
    return tuple(columns)


def _any_bits(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    return rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)


def _ordinary(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Numbers as programs have them, from a thousandth to a hundred."""
    return (rng.standard_normal(count) * 10.0 ** rng.uniform(-3, 2, count)).astype(dtype)


def _around(value: Array) -> Array:
    """The numbers next to ``value`` in its type, on both sides."""
    unsigned = np.dtype(f"u{value.dtype.itemsize}")
    bits = value.view(unsigned).astype(np.int64) if unsigned.itemsize < 8 else value.view(np.int64)
    return (bits + np.arange(-_NEIGHBOURS, _NEIGHBOURS + 1)).astype(unsigned).view(value.dtype)


def exact_values(function: Elementary, arguments: tuple[Array, ...]) -> Array:
    """Rounded to float64 for narrow types; for float64 and complex numbers pairs (high, low) of what mpmath gives."""
    if arguments[0].dtype.itemsize <= 4 and arguments[0].dtype.kind != "c":
        with np.errstate(all="ignore"):
            return np.asarray(function.wide(*(a.astype(np.float64) for a in arguments)))
    with mpmath.workdps(_DIGITS):
        return np.array([_mp_value(function, row) for row in zip(*arguments, strict=True)], object)


def _mp_value(function: Elementary, row: tuple[Any, ...]) -> Any:
    try:
        value = function.exact(*(mpmath.mpmathify(x.item()) for x in row))
    except (ValueError, ZeroDivisionError, OverflowError, mpmath.libmp.NoConvergence):
        return None  # a pole, or outside the domain: what a float gives there is a convention
    return value if row[0].dtype.kind == "c" or not isinstance(value, mpmath.mpc) else None


def errors(ours: Array, exact: Array) -> Errors:
    """The errors of ``ours`` against what exact_values gave."""
    if ours.dtype.kind == "c":
        return _complex_errors(ours, exact)
    if exact.dtype == object:
        return _mp_errors(ours, exact)
    info = ml_dtypes.finfo(ours.dtype)
    wide = ours.astype(np.float64)
    with np.errstate(all="ignore"):
        rounded = exact.astype(ours.dtype).astype(np.float64)
        same = (np.isnan(wide) & np.isnan(rounded)) | (wide == rounded)
        wrong = ~same & ~(np.isfinite(wide) & np.isfinite(rounded))
        size = np.maximum(np.abs(exact), float(info.tiny))
        spacing = 2.0 ** np.floor(np.log2(size)) * float(info.eps)
        units = np.where(same & ~np.isfinite(exact), 0.0, np.abs(wide - exact) / spacing)
    return _summary(units, ~wrong & np.isfinite(rounded), np.abs(exact) >= float(info.tiny), int(wrong.sum()))


def _summary(units: Array, valid: Array, normal: Array, wrong: int) -> Errors:
    counted, small = units[valid & normal], units[valid & ~normal]
    return Errors(
        float(counted.max(initial=0.0)),
        float(counted.mean()) if counted.size else 0.0,
        float(small.max(initial=0.0)),
        wrong,
    )


def _mp_errors(ours: Array, exact: Array) -> Errors:
    """float64 against mpmath numbers."""
    units, normal, valid, wrong = [], [], [], 0
    with mpmath.workdps(_DIGITS):
        for value, true in zip(ours, exact, strict=True):
            if true is None or mpmath.isnan(true) or mpmath.isinf(true):
                continue
            size = abs(true)
            overflows = size >= mpmath.mpf(2) ** 1024 * (1 - mpmath.mpf(2) ** -54)
            if overflows or not np.isfinite(value):
                wrong += overflows == bool(np.isfinite(value))
                continue
            exponent = max(int(mpmath.floor(mpmath.log(size, 2))), -1022) if size else -1022
            units.append(float(abs(mpmath.mpf(float(value)) - true) / mpmath.mpf(2) ** (exponent - 52)))
            normal.append(size >= mpmath.mpf(2) ** -1022)
            valid.append(True)
    return _summary(np.array(units), np.array(valid, bool), np.array(normal, bool), wrong)


def _complex_errors(ours: Array, exact: Array) -> Errors:
    """In units in the last place of the larger part of the exact value."""
    info = np.finfo(ours.real.dtype)
    units, wrong = [], 0
    with mpmath.workdps(_DIGITS):
        for value, true in zip(ours, exact, strict=True):
            if true is None or not mpmath.isfinite(true):
                continue
            size = max(abs(true.real), abs(true.imag))
            if size >= float(info.max) or size < float(info.tiny):
                continue
            if not np.isfinite(value):
                wrong += 1
                continue
            spacing = mpmath.mpf(2) ** int(mpmath.floor(mpmath.log(size, 2))) * float(info.eps)
            part = max(abs(mpmath.mpf(float(value.real)) - true.real), abs(mpmath.mpf(float(value.imag)) - true.imag))
            units.append(float(part / spacing))
    found = np.array(units)
    return _summary(found, np.ones(found.shape, bool), np.ones(found.shape, bool), wrong)
