"""Functions that flagos computes in its own way, against mpmath."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from jax import lax


def ulps(ours: np.ndarray, exact: list[Any]) -> float:
    """The greatest error in units in the last place of the exact value."""
    eps = float(jnp.finfo(ours.dtype).eps)
    with mpmath.workdps(40):
        return max(
            float(abs(mpmath.mpf(float(y)) - t) / (mpmath.mpf(2) ** mpmath.floor(mpmath.log(abs(t), 2)))) / eps
            for y, t in zip(ours, exact, strict=True)
            if t != 0
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_log_gamma(dtype: str, rng: np.random.Generator) -> None:
    """The zeros at 1 and 2 and their neighbourhoods, the ends of all intervals, and large and tiny arguments."""
    with jax.enable_x64(True):
        kind = jnp.dtype(dtype)
        eps = float(jnp.finfo(kind).eps)
        near = np.array([0.5, 1.0, 1.5, 2.0, 2.5, 7.5, 8.0])[:, None] * (1 + eps * np.arange(-9, 10))
        points = [
            near.ravel(),
            rng.uniform(0, 12, 300),
            10 ** rng.uniform(-4, 3.8 if dtype == "float16" else 4, 100),  # beyond, float16 has no such logarithm
            -(10 ** rng.uniform(-4, -1, 50)),
        ]
        x = np.concatenate(points).astype(kind)
        ours = np.asarray(jax.jit(lax.lgamma)(x))
    with mpmath.workdps(40):
        exact = [mpmath.log(abs(mpmath.gamma(float(v)))) for v in x]
        assert all(y == 0 for y, t in zip(ours, exact, strict=True) if t == 0)
    assert ulps(ours, exact) <= 6


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_gamma_of_negative_numbers(dtype: type, rng: np.random.Generator) -> None:
    """Relative to the summands: between the negative integers there are zeros."""
    with jax.enable_x64(True):
        x = -(rng.integers(0, 60, 400) + rng.uniform(0.05, 0.95, 400)).astype(dtype)
        ours = np.asarray(jax.jit(lax.lgamma)(x)).astype(np.float64)
    exact = np.array([math.lgamma(float(v)) for v in x])
    size = np.array([math.lgamma(-float(v) + 2) for v in x])
    assert float((np.abs(ours - exact) / np.maximum(np.abs(size), 1)).max()) <= 8 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_gamma_of_special_values(dtype: type) -> None:
    big = float(np.finfo(dtype).max)
    with jax.enable_x64(True):
        x = np.array([0.0, -0.0, -1.0, -2.0, -1e30, -big, big, np.inf, -np.inf, np.nan, 1.0, 2.0, 3.0], dtype)
        ours = np.asarray(jax.jit(lax.lgamma)(x))
    expected = np.array([np.inf] * 9 + [np.nan, 0.0, 0.0, np.log(2.0)], dtype)
    np.testing.assert_allclose(ours, expected, rtol=2 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_base_two_logarithm(dtype: str, rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        kind = jnp.dtype(dtype)
        powers = np.arange(-14, 16)
        x = np.concatenate([2.0**powers, 10 ** rng.uniform(-4, 4, 400), 1 + rng.uniform(-0.1, 0.1, 100)]).astype(kind)
        special = np.array([0.0, -1.0, np.inf, np.nan], kind)
        # Of 16 bits the program has two operations, each rounded; one that is exact at powers of two needs the option.
        log2 = jax.jit(jnp.log2, compiler_options={"xla_allow_excess_precision": kind.itemsize == 2})
        ours, at_special = (np.asarray(log2(v)) for v in (x, special))
    np.testing.assert_array_equal(ours[: len(powers)].astype(np.float64), powers)
    np.testing.assert_array_equal(at_special.astype(np.float64), [-np.inf, np.nan, np.inf, np.nan])
    with mpmath.workdps(40):
        exact = [mpmath.log(float(v), 2) for v in x]
    # Accelerators: their vendor's f32 logarithm is within a unit, and ours of f64 has the error of a natural one twice.
    # The host's f64: n + log2(m) and what is added to it are each rounded by half a unit. log(m) less m - 1, at most
    # 0.09 where the result is at least 0.5, has 1.83 roundings of 2^-57 over ln 2, in units of 2^-53: 0.17 more.
    wider = {"float64": 1.17} if os.environ["FLAGOS_DEVICE"] == "cpu" else {"float64": 1.5, "float32": 1.0}
    assert ulps(ours, exact) <= wider.get(dtype, 0.51)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_complementary_error_function(dtype: str, rng: np.random.Generator) -> None:
    """Where it is near 2, near 1, small, and no number above zero any more."""
    with jax.enable_x64(True):
        kind = jnp.dtype(dtype)
        x = np.concatenate([rng.uniform(-6, 9, 400), rng.normal(size=200), 10 ** rng.uniform(-6, 0, 50)]).astype(kind)
        special = np.array([0.0, -0.0, np.inf, -np.inf, 1e4, -1e4, np.nan], kind)
        erfc = jax.jit(lax.erfc)
        ours, at_special = (np.asarray(erfc(v)) for v in (x, special))
    np.testing.assert_array_equal(at_special.astype(np.float64), [1, 1, 0, 2, 0, 2, np.nan])
    with mpmath.workdps(40):
        exact = [mpmath.erfc(float(v)) for v in x]
    normal = [n for n, t in enumerate(exact) if t >= float(jnp.finfo(kind).smallest_normal)]
    # Accelerators' f32 and f64 are their vendor's, or formulas.py's.
    wider = {"float64": 3} if os.environ["FLAGOS_DEVICE"] == "cpu" else {"float64": 8, "float32": 4}
    assert ulps(ours[normal], [exact[n] for n in normal]) <= wider.get(dtype, 0.51)


def test_complementary_error_function_is_one_operation(rng: np.random.Generator) -> None:
    """Also of batches, and in what is differentiated."""
    x = rng.normal(size=(4, 7)).astype(np.float32)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(jax.nn.gelu, in_axes=(0, None))(x, False))

    step = jax.jit(jax.value_and_grad(loss))
    text = step.lower(x).compiler_ir("hlo").as_hlo_text()
    assert text.count("flagos.erfc") == 1
    value, gradient = step(x)
    wide = x.astype(np.float64)
    density = np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    distribution = np.vectorize(math.erfc)(-wide / math.sqrt(2)) / 2
    np.testing.assert_allclose(value, (wide * distribution).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, distribution + wide * density, rtol=1e-5, atol=1e-6)


def test_complementary_error_function_is_exported_for_any_size() -> None:
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lax.erfc), platforms=["flagos"])(jax.ShapeDtypeStruct((n, 3), np.float32))
    x = np.linspace(-2, 2, 15, dtype=np.float32).reshape(5, 3)
    found = jax.export.deserialize(exported.serialize()).call(x)
    np.testing.assert_allclose(found, np.vectorize(math.erfc)(x.astype(np.float64)), rtol=1e-6)
