"""Convolution against stock XLA: random windows, groups and dimension numbers, every rank and type."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.types import ElementType
from support.against_xla import assert_same, check, hlo_of_text, run_on_backend, run_on_xla
from support.convolutions import Convolution, convolution_text, random_convolution
from support.numbers import random_values

E = ElementType
TOLERANCE = {E.F16: 1e-2, E.BF16: 5e-2, E.F32: 1e-5, E.C64: 1e-5, E.F64: 1e-12, E.C128: 1e-12}


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("number", range(12))
def test_random_convolutions(rank: int, number: int, rng: np.random.Generator) -> None:
    c = random_convolution(rank, rng)
    x, w = (rng.standard_normal(dims).astype(np.float32) for dims in (c.lhs, c.rhs))
    check(convolution_text(c, "f32", "f32", "f32"), x, w, tolerance=1e-5)


@pytest.mark.parametrize(
    "element_type", [*TOLERANCE, E.S8, E.U8, E.S16, E.U16, E.S32, E.U32, E.S64, E.U64], ids=lambda t: t.name
)
@pytest.mark.parametrize("number", range(3))
def test_every_type(element_type: ElementType, number: int, rng: np.random.Generator) -> None:
    c = random_convolution(2, rng)
    t = element_type.name.lower()
    x, w = (random_values(element_type, int(np.prod(dims)), rng).reshape(dims) for dims in (c.lhs, c.rhs))
    if element_type in TOLERANCE:
        x, w = ((a / max(float(np.abs(a).max()), 1)).astype(a.dtype) for a in (x, w))
    check(convolution_text(c, t, t, t), x, w, tolerance=TOLERANCE.get(element_type))


@pytest.mark.parametrize("types", [("s8", "s8", "s32"), ("bf16", "bf16", "f32"), ("f16", "f16", "f32")], ids="-".join)
def test_wider_results(types: tuple[str, str, str], rng: np.random.Generator) -> None:
    c = random_convolution(2, rng)
    x, w = (
        random_values(E[t.upper()], int(np.prod(dims)), rng).reshape(dims)
        for t, dims in zip(types, (c.lhs, c.rhs), strict=False)
    )
    if types[0] != "s8":
        x, w = (np.clip(a.astype(np.float32), -4, 4).astype(a.dtype) for a in (x, w))
    check(convolution_text(c, *types), x, w, tolerance=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_cut_at_one_end_and_padded_at_the_other(groups: int, stride: int, rng: np.random.Generator) -> None:
    """Channels last, where XLA's CPU takes in what lies before its array, and is right of one that is cut before."""
    x = rng.standard_normal((2, 6, 6, 3 * groups)).astype(np.float32)
    w = rng.standard_normal((2, 2, 3, 2 * groups)).astype(np.float32)

    def program(x: np.ndarray, padding: str) -> bytes:
        size = (6 - 2) // stride + 1
        attributes = f"dim_labels=b01f_01io->b01f, window={{size=2x2 stride={stride}x{stride} pad={padding}}}"
        attributes += f", feature_group_count={groups}" if groups > 1 else ""
        c = Convolution(x.shape, w.shape, (2, size, size, 2 * groups), attributes)
        return hlo_of_text(convolution_text(c, "f32", "f32", "f32"))

    cut = np.ascontiguousarray(x[:, 1:, 1:])
    (ours,) = run_on_backend(program(x, "-1_1x-1_1"), [x, w])
    (theirs,) = run_on_xla(program(cut, "0_1x0_1"), [cut, w])
    assert_same(ours, theirs, 1e-5)


def test_four_spatial_dimensions_against_numpy(rng: np.random.Generator) -> None:
    """XLA's CPU has no such kernel: the oracle is the definition."""
    x, w = rng.standard_normal((2, 2, 3, 4, 3, 4)), rng.standard_normal((3, 2, 2, 2, 2, 2))
    c = Convolution(x.shape, w.shape, (2, 3, 2, 3, 2, 3), "dim_labels=bf0123_oi0123->bf0123, window={size=2x2x2x2}")
    (ours,) = run_on_backend(hlo_of_text(convolution_text(c, "f64", "f64", "f64")), [x, w])
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2, 2, 2), axis=(2, 3, 4, 5))
    np.testing.assert_allclose(ours, np.einsum("bcijklwxyz,ocwxyz->boijkl", windows, w), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dims", [((0, 2, 5), (3, 2, 2)), ((2, 0, 5), (3, 0, 2))])
def test_without_elements(dims: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    c = Convolution(*dims, (dims[0][0], 3, 4), "dim_labels=bf0_oi0->bf0, window={size=2}")
    check(convolution_text(c, "f32", "f32", "f32"), *(np.ones(d, np.float32) for d in dims))


@pytest.mark.parametrize("order", ["0o1i", "o0i1", "io01", "10oi"])
@pytest.mark.parametrize("operand", ["b01f", "bf01", "0b1f"])
def test_kernels_of_one_element_in_any_order(operand: str, order: str, rng: np.random.Generator) -> None:
    """A dimension of one element has whatever stride its place gives it, which oneDNN must not take at its word."""
    for size in ((1, 2), (2, 1), (1, 1)):
        x_dims = {"b": 2, "f": 6, "0": 4, "1": 5}
        w_dims = {"o": 9, "i": 2, "0": size[0], "1": size[1]}
        counts = [x_dims[d] - n + 1 for d, n in zip("01", size, strict=True)]
        attributes = f"dim_labels={operand}_{order}->b01f, window={{size={size[0]}x{size[1]}}}, feature_group_count=3"
        lhs, rhs = tuple(x_dims[d] for d in operand), tuple(w_dims[d] for d in order)
        c = Convolution(lhs, rhs, (2, *counts, 9), attributes)
        x, w = (rng.standard_normal(dims).astype(np.float32) for dims in (lhs, rhs))
        check(convolution_text(c, "f32", "f32", "f32"), x, w, tolerance=1e-5)
