"""Inputs for kernel tests, every element type's special values beside random ones, and comparison in ulp."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from flagos_backend.ir.types import ElementType

E = ElementType

NUMPY_DTYPE: dict[ElementType, np.dtype] = {
    E.PRED: np.dtype(bool),
    **{e: np.dtype(f"int{e.bits}") for e in E if e.is_signed and e.bits >= 8},
    **{e: np.dtype(f"uint{e.bits}") for e in E if e.is_unsigned and e.bits >= 8},
    E.F16: np.dtype(np.float16),
    E.F32: np.dtype(np.float32),
    E.F64: np.dtype(np.float64),
    E.C64: np.dtype(np.complex64),
    E.C128: np.dtype(np.complex128),
    E.BF16: np.dtype(ml_dtypes.bfloat16),
    E.S4: np.dtype(ml_dtypes.int4),
    E.U4: np.dtype(ml_dtypes.uint4),
    E.S2: np.dtype(ml_dtypes.int2),
    E.U2: np.dtype(ml_dtypes.uint2),
    E.F8E5M2: np.dtype(ml_dtypes.float8_e5m2),
    E.F8E4M3: np.dtype(ml_dtypes.float8_e4m3),
    E.F8E3M4: np.dtype(ml_dtypes.float8_e3m4),
    E.F8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    E.F8E4M3B11FNUZ: np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    E.F8E4M3FNUZ: np.dtype(ml_dtypes.float8_e4m3fnuz),
    E.F8E5M2FNUZ: np.dtype(ml_dtypes.float8_e5m2fnuz),
    E.F8E8M0FNU: np.dtype(ml_dtypes.float8_e8m0fnu),
    E.F4E2M1FN: np.dtype(ml_dtypes.float4_e2m1fn),
}
_UNSIGNED_OF_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def special_values(element_type: ElementType) -> np.ndarray:
    """NaN, infinities, zeros of both signs, ends of the range, ones, halves; of integers the ends and what is near."""
    dtype = NUMPY_DTYPE[element_type]
    if element_type is E.PRED:
        return np.array([False, True])
    if element_type.is_complex:
        parts = special_values(element_type.real)
        values = np.empty((len(parts), len(parts)), dtype)
        values.real, values.imag = parts[:, None], parts[None, :]
        return values.ravel()
    if element_type.is_integer:
        bits = element_type.bits
        low = -(1 << (bits - 1)) if element_type.is_signed else 0
        high = low + (1 << bits) - 1
        near = {low, low + 1, high - 1, high, 0, 1, 2, 3, 7, bits - 1, bits, bits + 1, high // 2, high // 2 + 1}
        near |= {-1, -2, -3, -7} if element_type.is_signed else set()
        inside = sorted(v for v in near if low <= v <= high)
        return np.array(inside, np.int64 if element_type.is_signed else np.uint64).astype(dtype)
    if element_type.bits <= 8:
        return np.arange(1 << element_type.bits).astype(np.uint8).view(dtype)
    info = ml_dtypes.finfo(dtype)
    values = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 2, 3, -3, 100.25, -100.25]
    ends = [info.max, info.min, info.tiny, -info.tiny, info.eps, -info.eps]
    return np.concatenate([np.array(values, dtype), np.array(ends, dtype)])


def random_values(element_type: ElementType, count: int, rng: np.random.Generator) -> np.ndarray:
    """Any bits for integers and floats of a byte or less; wider floats over some orders of magnitude."""
    dtype = NUMPY_DTYPE[element_type]
    if element_type is E.PRED:
        return rng.integers(0, 2, count).astype(bool)
    if element_type.is_complex:
        real, imaginary = (random_values(element_type.real, count, rng) for _ in range(2))
        return (real + 1j * imaginary).astype(dtype)
    if element_type.is_integer:
        return (
            rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
            if element_type.bits >= 8
            else (rng.integers(0, 1 << element_type.bits, count).astype(dtype))
        )
    if element_type.bits <= 8:
        return rng.integers(0, 1 << element_type.bits, count).astype(np.uint8).view(dtype)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)).astype(dtype)


def ulp_distance(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between the elements; 0 between NaNs, infinity between NaN and a number.

    Of a float wider than a byte a subnormal counts as zero: stock XLA flushes them on the CPU."""
    if ours.dtype.itemsize > 1:
        tiny = ml_dtypes.finfo(ours.dtype).tiny
        with np.errstate(invalid="ignore"):
            ours, theirs = (np.where(np.abs(x) < tiny, np.zeros_like(x), x) for x in (ours, theirs))
    unsigned = _UNSIGNED_OF_WIDTH[ours.dtype.itemsize]
    top = unsigned(1) << unsigned(ours.dtype.itemsize * 8 - 1)

    def rank(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x).view(unsigned)
        return np.where(bits & top != 0, top - (bits & ~top), top + bits).astype(unsigned)

    a, b = rank(ours), rank(theirs)
    distance = np.where(a > b, a - b, b - a).astype(np.float64)
    nan_ours, nan_theirs = np.isnan(ours), np.isnan(theirs)
    return np.where(nan_ours | nan_theirs, np.where(nan_ours & nan_theirs, 0.0, np.inf), distance)


def complex_distance(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The error in units in the last place of the whole number's magnitude; where a part is not finite, 0 when
    the parts are of one kind (NaN, or infinity of one sign) and infinity otherwise."""
    tiny, epsilon = np.finfo(ours.real.dtype).tiny, np.finfo(ours.real.dtype).eps
    with np.errstate(all="ignore"):
        size = np.maximum(np.maximum(np.abs(theirs.real), np.abs(theirs.imag)), tiny / epsilon)
        error = np.maximum(np.abs(ours.real - theirs.real), np.abs(ours.imag - theirs.imag)) / size / epsilon
    same = np.ones(ours.shape, bool)
    for a, b in ((ours.real, theirs.real), (ours.imag, theirs.imag)):
        same &= np.where(np.isfinite(a) & np.isfinite(b), True, (a == b) | (np.isnan(a) & np.isnan(b)))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    return np.where(finite, error, np.where(same, 0.0, np.inf))


def distance(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """ulp_distance or complex_distance; of integers and PRED 0 where equal and infinity where not."""
    if ours.dtype.kind == "c":
        return complex_distance(ours, theirs)
    if ours.dtype.kind in "biu" or ours.dtype in (ml_dtypes.int2, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.uint4):
        return np.where(ours == theirs, 0.0, np.inf)
    return ulp_distance(ours, theirs)
