"""Accelerators of one process: each has memory of its own, and programs over all of them talk through collectives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
Agree = Callable[[Callable[[Mesh], Any]], Any]

TYPES = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.float16]


def put(array: Any, mesh: Mesh, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def mapped(function: Callable[..., Any], mesh: Mesh, out: Any) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("d"), out_specs=out, check_vma=False))


def ring(mesh: Mesh) -> list[tuple[int, int]]:
    return [(i, (i + 1) % mesh.size) for i in range(mesh.size)]


# What each device does to its part, and how the result is spread.
COLLECTIVES: dict[str, tuple[Callable[[Mesh, jax.Array], Any], Any]] = {
    "psum": (lambda _, y: lax.psum(y, "d"), P()),
    "pmax": (lambda _, y: lax.pmax(y, "d"), P()),
    "all_gather": (lambda _, y: lax.all_gather(y, "d", axis=0, tiled=True), P()),
    "all_gather of columns": (lambda _, y: lax.all_gather(y, "d", axis=1, tiled=True), P()),
    "psum_scatter": (lambda _, y: lax.psum_scatter(y, "d", scatter_dimension=1, tiled=True), P(None, "d")),
    "all_to_all": (lambda _, y: lax.all_to_all(y, "d", 1, 0, tiled=True), P(None, "d")),
    "ppermute": (lambda mesh, y: lax.ppermute(y, "d", ring(mesh)), P("d")),
    "ppermute to some": (lambda _, y: lax.ppermute(y, "d", [(1, 0)]), P("d")),
    "axis_index": (lambda _, y: y * 0 + lax.axis_index("d").astype(y.dtype), P("d")),
}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(agree: Agree, rng: np.random.Generator, name: str, dtype: Any) -> None:
    function, out = COLLECTIVES[name]
    x = rng.integers(0, 4, (48, 96)).astype(dtype)
    agree(lambda mesh: mapped(partial(function, mesh), mesh, out)(put(x, mesh, "d")))


def test_a_maximum_keeps_a_nan(mesh: Mesh, rng: np.random.Generator) -> None:
    """JAX's CPU loses it."""
    x = rng.standard_normal((48, 4)).astype(np.float32)
    x[5, 2] = np.nan
    ours = mapped(lambda y: lax.pmax(y, "d"), mesh, P())(put(x, mesh, "d"))
    np.testing.assert_array_equal(np.asarray(ours), x.reshape(mesh.size, -1, 4).max(0))


def test_launches_repeat_with_other_contents(agree: Agree, rng: np.random.Generator) -> None:
    """From the third launch on, what lies between the collectives is replayed."""
    inputs = [rng.standard_normal((48, 32)).astype(np.float32) for _ in range(6)]

    def several(mesh: Mesh) -> list[jax.Array]:
        step = mapped(lambda y: jnp.tanh(lax.psum(jnp.sin(y) @ y.T, "d")) + lax.pmax(y.sum(), "d"), mesh, P())
        return [step(put(x, mesh, "d")) for x in inputs]

    agree(several)


def test_collectives_in_a_loop(agree: Agree, rng: np.random.Generator) -> None:
    x = rng.standard_normal((48, 8)).astype(np.float32)

    def loop(y: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 20, lambda _, c: lax.pmean(jnp.cos(c), "d") + 0.5 * c, y)

    agree(lambda mesh: mapped(loop, mesh, P("d"))(put(x, mesh, "d")))


@pytest.mark.parametrize(("data", "weights"), [(("d",), ()), ((), (None, "d")), (("d",), ("d",))], ids=str)
def test_training_steps(agree: Agree, rng: np.random.Generator, data: Any, weights: Any) -> None:
    """Data parallel, tensor parallel, and with parameters that are gathered when they are used."""
    x, w = (rng.standard_normal(dims).astype(np.float32) * 0.2 for dims in ((48, 96), (96, 96)))

    def train(mesh: Mesh) -> tuple[jax.Array, jax.Array]:
        @jax.jit
        def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            loss, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w) @ w.T - x)))(w)
            return w - 0.1 * slope, loss

        weight, batch = put(w, mesh, *weights), put(x, mesh, *data)
        for _ in range(5):
            weight, loss = step(weight, batch)
        return weight, loss

    agree(train)


@pytest.mark.parametrize(("here", "there"), [(("d",), (None, "d")), ((), ("d",)), (("d",), ())], ids=str)
def test_arrays_move_between_devices(agree: Agree, rng: np.random.Generator, here: Any, there: Any) -> None:
    x = rng.standard_normal((48, 96)).astype(np.float32)
    agree(lambda mesh: jax.device_put(put(x, mesh, *here), NamedSharding(mesh, P(*there))))
    agree(lambda mesh: jax.jit(lambda y: y + 1, out_shardings=NamedSharding(mesh, P(*there)))(put(x, mesh, *here)))


def test_from_one_device_to_the_next(devices: list[jax.Device], rng: np.random.Generator) -> None:
    x = rng.standard_normal(1000).astype(np.float32)
    value = jax.device_put(x, devices[0])
    for device in [*devices[1:], devices[0]]:
        value = jax.device_put(value * 2, device)
        assert value.devices() == {device}
    np.testing.assert_array_equal(np.asarray(value), x * 2.0 ** len(devices))


def test_devices_work_independently(devices: list[jax.Device], rng: np.random.Generator) -> None:
    """Each by a thread of its own, with a program of its own."""
    inputs = [rng.standard_normal((64, 64)).astype(np.float32) for _ in devices]

    def work(number: int) -> np.ndarray:
        function = jax.jit(lambda x: jnp.tanh(x @ x) * number)
        x = jax.device_put(inputs[number], devices[number])
        results = [np.asarray(function(x)) for _ in range(10)]
        assert all(np.array_equal(results[0], result) for result in results)
        return results[0]

    with ThreadPoolExecutor(len(devices)) as pool:
        for number, result in enumerate(pool.map(work, range(len(devices)))):
            np.testing.assert_allclose(result, np.tanh(inputs[number] @ inputs[number]) * number, rtol=1e-4, atol=1e-4)


def test_a_launch_that_fails_leaves_the_devices_able(mesh: Mesh) -> None:
    """One device's callback raises while the others go on to a collective."""

    def refuse(number: np.ndarray) -> np.ndarray:
        if number == 1:
            raise ValueError("device 1 has had enough")
        return number

    def step(y: jax.Array) -> jax.Array:
        number = lax.axis_index("d")
        answer = jax.pure_callback(refuse, jax.ShapeDtypeStruct((), number.dtype), number)
        return lax.psum(y + answer, "d")

    x = put(np.ones(mesh.size * 2, np.float32), mesh, "d")
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"had enough|Another device of this launch failed"):
            jax.block_until_ready(mapped(step, mesh, P())(x))
        total = mapped(lambda y: lax.psum(y, "d"), mesh, P())(x)
        np.testing.assert_array_equal(np.asarray(total), [mesh.size] * 2)
