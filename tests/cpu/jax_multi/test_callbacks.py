"""Host callbacks of programs on several devices, beside other programs that meet on the same devices."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

SECONDS = 60.0  # a deadlock lasts for ever; this takes well under one second


def test_programs_with_collectives_start_while_callbacks_run(devices: list[jax.Device]) -> None:
    """While the first program's callback runs on one device, the second program begins there and waits for the other
    device, where the first one waits in a collective."""
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("d",))
    seen: list[float] = []

    def slow(x: np.ndarray) -> None:
        time.sleep(0.02)
        seen.append(float(x.sum()))

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        io_callback(slow, None, x)
        return jnp.cumsum(x)[-1]

    sharding = NamedSharding(mesh, PartitionSpec("d"))
    arguments = [jax.device_put(np.full(8, n, np.float32), sharding) for n in range(8)]
    results: list[float] = []
    worker = threading.Thread(target=lambda: results.extend(map(float, [program(x) for x in arguments])), daemon=True)
    worker.start()
    worker.join(SECONDS)
    assert results == [8.0 * n for n in range(8)]
    jax.effects_barrier()
    assert sorted(seen) == results
