"""Floats of a byte or less: every code decodes to ml_dtypes' value, and floats encode to ml_dtypes' codes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference import small_floats
from flagos_backend.kernels.reference.ordering import total_order
from support.against_xla import hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE

TYPES = list(small_floats.FORMATS)


def codes_of(element_type: ElementType) -> np.ndarray:
    return np.arange(1 << element_type.bits).astype(np.uint8)


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_every_code_decodes(element_type: ElementType) -> None:
    codes = codes_of(element_type)
    expected = codes.view(NUMPY_DTYPE[element_type]).astype(np.float32)
    decoded = small_floats.decode(torch.from_numpy(codes), element_type).numpy()
    np.testing.assert_array_equal(decoded, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(decoded[number]), np.signbit(expected[number]))


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_every_value_survives_a_round_trip(element_type: ElementType) -> None:
    codes = codes_of(element_type)
    values = small_floats.decode(torch.from_numpy(codes), element_type)
    again = small_floats.encode(values, element_type).numpy()
    nan = values.isnan().numpy()
    np.testing.assert_array_equal(again[~nan], codes[~nan])


def floats_near_every_threshold(element_type: ElementType, rng: np.random.Generator) -> np.ndarray:
    values = codes_of(element_type).view(NUMPY_DTYPE[element_type]).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    midpoints = (values[:-1].astype(np.float64) + values[1:]) / 2
    with np.errstate(over="ignore"):
        beyond = np.outer([1.01, 1.1, 2.0], values[[0, -1]]).astype(np.float32).ravel()
    exact = np.concatenate([values, midpoints.astype(np.float32), beyond])
    near = [np.nextafter(exact, np.float32(side)) for side in (-np.inf, np.inf)]
    anything = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([exact, *near, anything, np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)])


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_floats_round_to_nearest_even(element_type: ElementType, rng: np.random.Generator) -> None:
    values = floats_near_every_threshold(element_type, rng)
    values = values[~np.isnan(values)]
    with np.errstate(all="ignore"):
        expected = values.astype(NUMPY_DTYPE[element_type]).view(np.uint8)
    encoded = small_floats.encode(torch.from_numpy(values), element_type).numpy()
    np.testing.assert_array_equal(encoded, expected)


@pytest.mark.parametrize("element_type", [t for t in TYPES if t is not ElementType.F4E2M1FN], ids=lambda t: t.name)
def test_nan_stays_nan(element_type: ElementType) -> None:
    encoded = small_floats.encode(torch.tensor([float("nan")]), element_type).numpy()
    assert np.isnan(encoded.view(NUMPY_DTYPE[element_type]).astype(np.float32)).all()


def test_double_rounds_once() -> None:
    # Just above the midpoint of 1 and 1.125; float32 would round it to the midpoint first, and that to even.
    value = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    code = small_floats.encode(value, ElementType.F8E4M3FN).numpy()
    assert code.view(ml_dtypes.float8_e4m3fn).astype(np.float32) == 1.125


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_the_total_order_of_every_two_codes(element_type: ElementType) -> None:
    """By sign, then magnitude, zeros of both signs apart. Where -0 would be, the types without it have a NaN, which
    therefore is below everything, as on stock XLA."""
    codes = codes_of(element_type)
    values = codes.view(NUMPY_DTYPE[element_type]).astype(np.float64)
    signs = np.where(np.signbit(values) & ~np.isnan(values), -1, 1)
    if element_type is not ElementType.F8E8M0FNU:
        signs = np.where(codes >= len(codes) // 2, -1, 1)
    magnitude = np.where(np.isnan(values), np.inf, np.abs(values))
    ranks = list(zip(signs, signs * magnitude, signs * np.isnan(values), strict=True))
    distinct = sorted(set(ranks))
    expected = np.array([distinct.index(rank) for rank in ranks])
    order = total_order(torch.from_numpy(codes), element_type).numpy().astype(np.int64)
    number = ~np.isnan(values)  # NaNs of several codes may be in any order of their own
    either = number[:, None] | number
    np.testing.assert_array_equal(
        np.sign(order[:, None] - order)[either], np.sign(expected[:, None] - expected)[either]
    )


@pytest.mark.parametrize("source", ["s4", "u4"])
def test_a_bitcast_to_four_bits_keeps_only_them(source: str) -> None:
    codes = np.arange(16, dtype=np.uint8)
    integers = codes.astype(ml_dtypes.uint4 if source == "u4" else np.uint8)
    if source == "s4":
        integers = (codes.astype(np.int8) - 16 * (codes >= 8)).astype(ml_dtypes.int4)
    text = f"ENTRY e {{ x = {source}[16] parameter(0) ROOT r = f4e2m1fn[16] bitcast-convert(x) }}"
    (ours,) = run_on_backend(hlo_of_text(text), [integers])
    np.testing.assert_array_equal(ours.view(np.uint8), codes)
