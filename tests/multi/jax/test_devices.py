"""Accelerators of one process: each has memory of its own, and programs over all of them talk through collectives."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

from flagos_backend.runtime.accelerator.recordings import Recordings
from flagos_backend.runtime.accelerator.segments import Division
from support.collective_programs import (
    COLLECTIVES,
    SPLITS,
    TYPES,
    P,
    collective,
    launches,
    loop,
    many_arrays,
    mapped,
    put,
    train,
    train_spread,
)

Agree = Callable[[Callable[[Mesh], Any]], Any]


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(agree: Agree, rng: np.random.Generator, name: str, dtype: Any) -> None:
    agree(partial(collective, name, rng.integers(0, 4, (48, 96)).astype(dtype)))


def test_a_maximum_keeps_a_nan(mesh: Mesh, rng: np.random.Generator) -> None:
    """JAX's CPU loses it."""
    x = rng.standard_normal((48, 4)).astype(np.float32)
    x[5, 2] = np.nan
    ours = mapped(lambda y: lax.pmax(y, "d"), mesh, P())(put(x, mesh, "d"))
    np.testing.assert_array_equal(np.asarray(ours), x.reshape(mesh.size, -1, 4).max(0))


def test_many_arrays_in_one_collective(agree: Agree, rng: np.random.Generator) -> None:
    agree(partial(many_arrays, rng.standard_normal((24, 300)).astype(np.float32)))


def test_launches_repeat_with_other_contents(agree: Agree, rng: np.random.Generator) -> None:
    """From the third launch on they are replayed, or what lies between the collectives is."""
    agree(partial(launches, [rng.standard_normal((48, 32)).astype(np.float32) for _ in range(6)]))


def test_collectives_in_a_loop(agree: Agree, rng: np.random.Generator) -> None:
    agree(partial(loop, rng.standard_normal((48, 8)).astype(np.float32)))


@pytest.mark.parametrize(("data", "weights"), SPLITS, ids=str)
def test_training_steps(agree: Agree, rng: np.random.Generator, data: Any, weights: Any) -> None:
    x, w = (rng.standard_normal(dims).astype(np.float32) * 0.2 for dims in ((48, 96), (96, 96)))
    agree(partial(train, x, w, data, weights))


def test_training_steps_with_weights_spread_over_the_devices(agree: Agree, rng: np.random.Generator) -> None:
    x = rng.standard_normal((48, 48)).astype(np.float32)
    weights = [rng.standard_normal((48, 48)).astype(np.float32) * 0.1 for _ in range(5)]
    agree(partial(train_spread, x, weights))


def test_training_steps_are_recorded_with_their_collectives(
    mesh: Mesh, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[object] = []
    note = Recordings.note

    def noted(self: Recordings, local_ordinal: int, outcome: object) -> None:
        outcomes.append(outcome)
        note(self, local_ordinal, outcome)

    monkeypatch.setattr(Recordings, "note", noted)
    x = rng.standard_normal((48, 48)).astype(np.float32)
    jax.block_until_ready(train_spread(x, [x * 0.1, x * 0.2], mesh))
    unable = "this device has no graphs that can be patched|[a-z]+ is not known to be recorded"
    if reason := re.search(unable, "".join(map(str, outcomes))):
        pytest.skip(reason[0])
    steps = [outcome for outcome in outcomes if isinstance(outcome, Division) and outcome.rendezvous]
    assert len(steps) == mesh.size and all(outcome.whole is not None for outcome in steps), outcomes


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
