"""Reductions of few long rows, as of whole arrays, which are cut into parts that threads share out: against float64 and
NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from cpu.native.harness import run_function
from plugin_abi.host import Context

# Of shape and axes: whether the reduction is cut.
_CASES = [
    ((1 << 18,), (0,), True),
    ((200_003,), (0,), True),
    ((131_071,), (0,), False),
    ((512, 700), (0, 1), True),
    ((3, 150_000), (1,), True),
    ((2, 401, 333), (1, 2), True),
    ((31, 140_000), (1,), True),
    ((33, 140_000), (1,), False),
    ((300, 3, 500), (0, 2), True),
    ((7, 9, 5000), (0, 1, 2), True),
    ((0, 5), (0, 1), False),
]
_PROGRAMS: dict[str, Callable[..., Any]] = {
    "a sum": lambda x, y, axes, np: x.sum(axes),
    "a norm": lambda x, y, axes, np: np.sqrt((x * x).sum(axes)),
    "a product": lambda x, y, axes, np: (x * y).sum(axes) / 2 + 1,
    "two reductions": lambda x, y, axes, np: (x.mean(axes), np.abs(y).sum(axes) * x.sum(axes)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", _PROGRAMS)
@pytest.mark.parametrize(("shape", "axes", "is_cut"), _CASES, ids=str)
def test_sums(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    is_cut: bool,
    name: str,
    dtype: Any,
    context: Context,
    rng: np.random.Generator,
) -> None:
    x, y = (rng.uniform(0.5, 2, shape).astype(dtype) for _ in range(2))
    function = _PROGRAMS[name]
    with jax.enable_x64(True):
        ours, text = run_function(context, lambda x, y: function(x, y, axes, jnp), x, y)
    assert (".part" in text) == is_cut, text
    wide = (x.astype(np.longdouble), y.astype(np.longdouble))
    with np.errstate(all="ignore"):
        expected = jax.tree.leaves(function(*wide, axes, np))
    for result, exact in zip(ours, expected, strict=True):
        np.testing.assert_allclose(result, exact.astype(dtype), rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["max", "min", "sum", "prod"])
def test_special_values(name: str, context: Context, rng: np.random.Generator) -> None:
    """A NaN stays, in its row only, wherever it is."""
    x = np.ones((6, 170_001), np.float32)
    x[1, 170_000], x[2, 3], x[3, 90_000], x[4, 100], x[4, 160_000] = np.nan, np.inf, -np.inf, np.inf, -np.inf
    x[5, rng.integers(170_001)] = -0.0
    (ours,), text = run_function(context, lambda x: getattr(x, name)(1), x)
    assert ".part" in text
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(ours, getattr(x, name)(1))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.int64, np.bool_])
@pytest.mark.parametrize("name", ["max", "min", "sum", "any", "all"])
def test_integers(name: str, dtype: Any, context: Context, rng: np.random.Generator) -> None:
    """Which wrap around."""
    x = rng.integers(-(1 << 40), 1 << 40, 150_007).astype(dtype)
    arguments = {"dtype": x.dtype} if name == "sum" and dtype is not np.bool_ else {}
    with jax.enable_x64(True):
        (ours,), text = run_function(context, lambda x: getattr(x, name)(**arguments), x)
    assert ".part" in text
    np.testing.assert_array_equal(ours, getattr(x, name)(**arguments))


def test_positions_and_how_reductions_begin(context: Context, rng: np.random.Generator) -> None:
    x = rng.integers(0, 3, 200_003).astype(np.int32)

    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        placed = x * jnp.arange(len(x), dtype=jnp.int32)
        return lax.reduce(placed, jnp.int32(5), lax.add, (0,)), placed.max()

    (total, top), text = run_function(context, function, x)
    assert ".part" in text
    placed = x.astype(np.int64) * np.arange(len(x))
    assert total == (placed.sum() + 5).astype(np.int32) and top == placed.max()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: (x.T * y[:, None]).sum(), id="transposed"),
        pytest.param(lambda x, y: (x[::-1, 3:] + 1).max(), id="reversed and cut off"),
        pytest.param(lambda x, y: (x * y).sum(), id="by a row"),
        pytest.param(lambda x, y: jnp.where(jnp.arange(2000) % 3 == 0, x, 0).sum(), id="masked"),
        pytest.param(lambda x, y: jnp.stack([x.max(), (x * y).min()]), id="stacked"),
        pytest.param(lambda x, y: jax.lax.fori_loop(0, 3, lambda i, z: z / (x * z).max() + i, y.sum()), id="in a loop"),
        pytest.param(
            lambda x, y: jax.lax.cond(y[0] > 0, lambda x: x.sum(), lambda x: (x * x).sum(), x), id="in a branch"
        ),
    ],
)
def test_what_is_reduced_and_where(function: Callable[..., Any], context: Context, rng: np.random.Generator) -> None:
    x, y = rng.uniform(0.5, 2, (127, 2000)).astype(np.float32), rng.uniform(0.5, 2, 2000).astype(np.float32)
    (ours,), text = run_function(context, function, x, y)
    assert ".part" in text
    with jax.enable_x64(True):
        wide = (jax.device_put(a.astype(np.float64), jax.devices("cpu")[0]) for a in (x, y))
        exact = function(*wide)
    np.testing.assert_allclose(ours, exact, rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: jax.nn.softmax(x), id="softmax"),
        pytest.param(lambda x: (x - x.mean()) / x.std(), id="standardised"),
        pytest.param(lambda x: jax.nn.logsumexp(x) + x.max(), id="logsumexp"),
    ],
)
def test_reductions_that_need_each_other(
    function: Callable[..., Any], context: Context, rng: np.random.Generator
) -> None:
    x = rng.uniform(-2, 2, 150_001).astype(np.float32)
    (ours,), text = run_function(context, function, x)
    assert ".part" in text
    with jax.enable_x64(True):
        exact = function(jax.device_put(x.astype(np.float64), jax.devices("cpu")[0]))
    np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6)


def test_sums_of_half_floats_are_not_cut(context: Context, rng: np.random.Generator) -> None:
    """Whose parts would be rounded."""
    x = rng.uniform(0.5, 2, 150_000).astype(ml_dtypes.bfloat16)
    (ours,), text = run_function(context, lambda x: lax.reduce(x, jnp.bfloat16(0), lax.add, (0,)), x)
    assert ".part" not in text
    assert ours == x.astype(np.float64).sum().astype(ml_dtypes.bfloat16)
    (ours,), text = run_function(context, lambda x: lax.reduce(x, jnp.bfloat16(-jnp.inf), lax.max, (0,)), x)
    assert ".part" in text and ours == x.max()
