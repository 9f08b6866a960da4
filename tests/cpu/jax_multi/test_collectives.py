"""Collectives of the devices of one process, which meet on the native side, against XLA's CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flagos_backend.compile.native_collectives import FUNCTIONS, Kind

P = PartitionSpec
Agree = Callable[[Callable[[Mesh], Any]], Any]
HEADER = Path(__file__).resolve().parents[3] / "flagos_backend" / "native" / "collective.h"
# Rows of each device's array, and columns: few, an odd number, and more bytes than participants copy or reduce alone.
COLUMNS = [1, 37, 9001]
TYPES = [np.int8, np.uint16, np.int32, np.uint64, np.float32, np.float64]


def mapped(function: Callable[[jax.Array], Any], mesh: Mesh, out: Any, x: np.ndarray) -> Any:
    """On the rows of ``x``, three times: the devices meet again and again."""
    program = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(("a", "b")), out_specs=out, check_vma=False))
    arrays = [jax.device_put(np.roll(x, n, 0), NamedSharding(mesh, P(("a", "b")))) for n in range(3)]
    return [program(array) for array in arrays]


def draw(rng: np.random.Generator, dtype: Any, rows: int, columns: int) -> np.ndarray:
    """Integers, also as floats, so that no order of additions matters; of whole types all that they hold."""
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, (rows, columns), dtype, endpoint=True)
    return rng.integers(-9, 10, (rows, columns)).astype(dtype)


@pytest.fixture(autouse=True)
def wide_numbers() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("axes", ["a", "b", ("a", "b")])
@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax, lax.pmin])
def test_reductions(reduce: Any, axes: Any, columns: int, agree: Agree, rng: np.random.Generator) -> None:
    dtype = TYPES[int(rng.integers(len(TYPES)))]
    x = draw(rng, dtype, 16, columns)
    agree(lambda mesh: mapped(lambda y: reduce(y, axes), mesh, P(("a", "b")), x))


@pytest.mark.parametrize("dtype", TYPES)
def test_reductions_of_every_type(
    dtype: Any, agree: Agree, emitted: Callable[[str], str], rng: np.random.Generator
) -> None:
    x = draw(rng, dtype, 16, 40)

    def all_of_them(y: jax.Array) -> list[jax.Array]:
        scattered = lax.psum_scatter(y, "b", scatter_dimension=1, tiled=True)
        return [
            lax.psum(y, "a"),
            lax.pmax(y, ("a", "b")),
            lax.pmin(y, "b"),
            lax.all_gather(y, "a", tiled=True),
            scattered,
        ]

    agree(lambda mesh: mapped(all_of_them, mesh, P(("a", "b")), x))
    emitted("jit_all_of_them")


@pytest.mark.parametrize("columns", [4, 148, 9004])
@pytest.mark.parametrize("axes", ["a", "b", ("a", "b")])
def test_arrays_that_are_moved(axes: Any, columns: int, agree: Agree, rng: np.random.Generator) -> None:
    columns *= 2
    x = draw(rng, [np.uint8, np.float16, jnp.bfloat16, np.complex64, np.bool_][int(rng.integers(5))], 64, columns)

    def moves(y: jax.Array) -> list[jax.Array]:
        size = lax.axis_size(axes)
        onward, some = [(n, (n + 1) % size) for n in range(size)], [(size - 1, 0)]
        return [
            *(lax.all_gather(y, axes, axis=d, tiled=True) for d in (0, 1)),
            *(lax.all_to_all(y, axes, d, d, tiled=True) for d in (0, 1)),
            *(lax.ppermute(y, axes, pairs) for pairs in (onward, some)),
        ]

    agree(lambda mesh: mapped(moves, mesh, P(("a", "b")), x))


@pytest.mark.parametrize("columns", COLUMNS)
def test_functions_of_partitioned_programs(columns: int, mesh: Mesh, rng: np.random.Generator) -> None:
    """Products, and what holds for all or any, of rows that are on several devices. NumPy is the oracle: XLA's CPU has
    no such collectives of integers."""
    x = rng.choice([-1, 1, 2, 7], (16, columns), p=[0.1, 0.4, 0.3, 0.2]).astype(np.int32)

    def functions(x: Any, n: Any) -> tuple[Any, ...]:
        bits = n.bitwise_and.reduce(x, 0), n.bitwise_or.reduce(x, 0)
        return n.prod(x, 0, dtype=x.dtype), n.all(x > -1, 0), n.any(x > 6, 0), *bits, n.max(x, 0)

    found = jax.jit(lambda x: functions(x, jnp))(jax.device_put(x, NamedSharding(mesh, P(("a", "b")))))
    for ours, expected in zip(found, functions(x, np), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("columns", COLUMNS)
def test_nan_is_kept(columns: int, mesh: Mesh, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, columns)).astype(np.float32)
    x[rng.integers(0, 8, columns), np.arange(columns)] = np.nan
    for reduce in (lax.pmax, lax.pmin, lax.psum):
        for found in mapped(lambda y, reduce=reduce: reduce(y, ("a", "b")), mesh, P(), x):
            assert np.isnan(found).all()


def test_sums_are_alike_on_every_device(mesh: Mesh, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 30_000)).astype(np.float32)
    for total in mapped(lambda y: lax.psum(y, ("a", "b")), mesh, P(("a", "b")), x):
        parts = np.asarray(total)
        np.testing.assert_array_equal(parts, np.broadcast_to(parts[0], parts.shape))
        np.testing.assert_allclose(parts[0], x.astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)


def test_a_device_that_does_not_come(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "0.5")

    def diverge(y: jax.Array) -> jax.Array:
        first = (lax.axis_index("a") == 0) & (lax.axis_index("b") == 0)
        return lax.cond(first, lambda y: y, lambda y: lax.psum(y, ("a", "b")) + y, y)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"FLAGOS-50[12].*") as error:
        jax.block_until_ready(mapped(diverge, mesh, P(("a", "b")), np.ones((8, 3), np.float32)))
    assert "DEADLINE_EXCEEDED" in str(error.value) or "ABORTED" in str(error.value)
    for total in mapped(lambda y: lax.psum(y, ("a", "b")), mesh, P(), np.ones((8, 3), np.float32)):
        np.testing.assert_array_equal(total, np.full((1, 3), 8, np.float32))


def test_a_device_that_fails(mesh: Mesh) -> None:
    """The others, who wait for it, are told at once."""

    def fail(y: np.ndarray, number: np.ndarray) -> np.ndarray:
        if number == 3:
            raise ValueError("number three fails")
        return y

    def step(y: jax.Array) -> jax.Array:
        number = lax.axis_index("a") * 4 + lax.axis_index("b")
        checked = jax.pure_callback(fail, jax.ShapeDtypeStruct(y.shape, y.dtype), y, number)
        return lax.psum(checked * 2 + jnp.sin(y), ("a", "b"))

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"number three fails|FLAGOS-501"):
        jax.block_until_ready(mapped(step, mesh, P(), np.ones((8, 3), np.float32)))


def test_both_sides_have_the_same_numbers() -> None:
    text = HEADER.read_text()

    def names(enumeration: str) -> list[str]:
        body = re.search(rf"enum {enumeration} : int64_t {{([^}}]*)}}", text)
        assert body
        return [re.sub(r"(?<!^)(?=[A-Z])", "_", name.strip()[1:]).upper() for name in body.group(1).split(",")]

    assert names("Kind") == [kind.name for kind in Kind]
    assert names("Function") == [opcode.name for opcode in FUNCTIONS]
