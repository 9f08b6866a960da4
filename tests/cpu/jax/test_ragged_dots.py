"""Products of ragged groups, their gradients and batches, against JAX's CPU, which has a product for each group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

SIZES = [(5, 10, 4), (0, 24, 0), (0, 0, 0), (8, 8, 8), (20, 1, 9)]
GENERAL = {
    "rows minor": (((0,), (1,)), (1,), (0,), (16, 24), (3, 16, 8)),
    "groups last": (((1,), (0,)), (0,), (2,), (24, 16), (16, 8, 3)),
    "contracting": (((0,), (0,)), (0,), (), (24, 16), (24, 8)),
    "batch": (((2,), (1,)), (0,), (), (24, 4, 16), (24, 16, 8)),
}


def on(device: jax.Device, function: Callable[..., Any], arguments: Any) -> list[np.ndarray]:
    found = jax.tree.leaves(jax.jit(function)(*jax.device_put(arguments, device)))
    return [np.asarray(array).astype(np.result_type(array.dtype, np.float64)) for array in found]


def same(device: jax.Device, function: Callable[..., Any], arguments: Any, tolerance: float = 2e-5) -> None:
    ours, theirs = (on(d, function, arguments) for d in (device, jax.local_devices(backend="cpu")[0]))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max(initial=0.0)))


def drawn(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (rng.standard_normal(shape) * (8 if np.dtype(dtype).kind == "i" else 1)).astype(dtype)


def loss(x: Any, w: Any, sizes: Any) -> Any:
    return (lax.ragged_dot(x, w, sizes) ** 2).sum()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients(device: jax.Device, sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    given = (drawn(rng, 24, 16), drawn(rng, 3, 16, 8), np.array(sizes, np.int32))
    same(device, lax.ragged_dot, given)
    same(device, jax.grad(loss, argnums=(0, 1)), given, 1e-4)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, np.float64, np.int32, np.complex64], ids=lambda d: np.dtype(d).name
)
def test_types(device: jax.Device, dtype: Any, rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        given = (drawn(rng, 24, 16, dtype=dtype), drawn(rng, 3, 16, 8, dtype=dtype), np.array([5, 0, 11], np.int32))
        same(device, lax.ragged_dot, given, 2e-2 if np.dtype(dtype).itemsize == 2 else 2e-5)
        if np.dtype(dtype).itemsize == 2:
            wide = lambda x, w, n: lax.ragged_dot(x, w, n, preferred_element_type=jnp.float32)  # noqa: E731
            same(device, wide, given)


def test_sizes_of_64_bits_and_mixed_operands(device: jax.Device, rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        sizes = np.array([5, 0, 11])
        same(device, lax.ragged_dot, (drawn(rng, 24, 16), drawn(rng, 3, 16, 8), sizes))
        same(device, lax.ragged_dot, (drawn(rng, 24, 16), drawn(rng, 3, 16, 8, dtype=jnp.bfloat16), sizes), 2e-2)


@pytest.mark.parametrize("form", GENERAL)
def test_general_dimensions(device: jax.Device, form: str, rng: np.random.Generator) -> None:
    contracting, ragged, group, lhs, rhs = GENERAL[form]
    batch = ((0,), (0,)) if form == "batch" else ((), ())
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged, group)
    function = lambda x, y, n: lax.ragged_dot_general(x, y, n, numbers)  # noqa: E731
    same(device, function, (drawn(rng, *lhs), drawn(rng, *rhs), np.array([5, 0, 11], np.int32)))


def test_batches(device: jax.Device, rng: np.random.Generator) -> None:
    sizes = np.array([[5, 0, 11], [1, 20, 3]], np.int32)
    given = (drawn(rng, 2, 24, 16), drawn(rng, 2, 3, 16, 8), sizes)
    same(device, jax.vmap(lax.ragged_dot), given)
    same(device, jax.vmap(jax.grad(loss, argnums=(0, 1))), given, 1e-4)


def test_an_algorithm(device: jax.Device, rng: np.random.Generator) -> None:
    function = lambda x, w, n: lax.ragged_dot(x, w, n, precision=lax.DotAlgorithmPreset.F32_F32_F32)  # noqa: E731
    same(device, function, (drawn(rng, 24, 16), drawn(rng, 3, 16, 8), np.array([5, 0, 11], np.int32)))


def test_many_rows_of_many_experts(device: jax.Device, rng: np.random.Generator) -> None:
    """Windows in a loop, as the cost model has them."""
    sizes = rng.multinomial(500, rng.dirichlet(np.ones(16)))
    given = (drawn(rng, 512, 64), drawn(rng, 16, 64, 48), sizes.astype(np.int32))
    same(device, lax.ragged_dot, given)
    same(device, jax.grad(loss, argnums=(0, 1)), given, 1e-4)


def test_it_is_one_instruction(device: jax.Device, rng: np.random.Generator) -> None:
    given = jax.device_put((drawn(rng, 24, 16), drawn(rng, 3, 16, 8), np.array([5, 0, 11], np.int32)), device)
    assert jax.jit(lax.ragged_dot).lower(*given).as_text().count('"chlo.ragged_dot"(') == 1
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given).as_text()
    assert gradient.count('"chlo.ragged_dot"(') == 3


def test_export(device: jax.Device, rng: np.random.Generator) -> None:
    given = (drawn(rng, 24, 16), drawn(rng, 3, 16, 8), np.array([5, 0, 11], np.int32))
    exported = jax.export.export(jax.jit(lax.ragged_dot), platforms=["flagos"])(*given)
    again = jax.export.deserialize(exported.serialize())
    expected = on(jax.local_devices(backend="cpu")[0], lax.ragged_dot, given)[0]
    np.testing.assert_allclose(np.asarray(again.call(*jax.device_put(given, device))), expected, rtol=2e-5, atol=2e-4)
