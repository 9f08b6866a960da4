"""One of two processes with one accelerator each. JAX's own CPU, as many devices of this process, is the oracle."""

from __future__ import annotations

import os

# Each process sees one accelerator, as launchers have it; vendors name the variable differently.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = os.environ["RANK"]
os.environ["MUSA_VISIBLE_DEVICES"] = os.environ["RANK"]
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "1"  # of a simulated accelerator
os.environ["JAX_PLATFORMS"] = "flagos,cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from support.collective_programs import (
    COLLECTIVES,
    SPLITS,
    TYPES,
    P,
    assert_agree,
    collective,
    launches,
    loop,
    mapped,
    put,
    train,
)
from support.processes import expect_error, make_checks

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RNG = np.random.default_rng(int(os.environ["FLAGOS_TEST_SEED"]))  # alike in both processes


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("flagos")), ("d",))


def agree(program: Callable[[Mesh], Any]) -> None:
    ours = program(mesh())
    assert_agree(ours, program(Mesh(np.array(jax.local_devices(backend="cpu")), ("d",))))


def devices() -> None:
    found = jax.devices("flagos")
    assert [(device.id, device.process_index) for device in found] == [(rank, rank) for rank in range(WORLD)]
    assert jax.local_devices(backend="flagos") == [found[RANK]]


def collectives() -> None:
    for name in COLLECTIVES:
        for dtype in TYPES:
            agree(partial(collective, name, RNG.integers(0, 4, (48, 96)).astype(dtype)))


def launches_repeat() -> None:
    """From the third launch on, what lies between the collectives is replayed."""
    agree(partial(launches, [RNG.standard_normal((48, 32)).astype(np.float32) for _ in range(6)]))


def a_loop() -> None:
    agree(partial(loop, RNG.standard_normal((48, 8)).astype(np.float32)))


def training_steps() -> None:
    for data, weights in SPLITS:
        x, w = (RNG.standard_normal(dims).astype(np.float32) * 0.2 for dims in ((48, 96), (96, 96)))
        agree(partial(train, x, w, data, weights))


def launches_keep_their_order() -> None:
    """Programs whose inputs come at different times in the two processes, none of them waited for."""
    x = put(np.ones((4, 2), np.float32), mesh(), "d")
    total = mapped(lambda a: a / jax.lax.psum(a.sum(), "d"), mesh(), P("d"))
    slow = jax.jit(lambda a: jax.lax.fori_loop(0, 2000, lambda i, c: c * 1.0 + 0.0, a))
    values = [total((slow(x) if (iteration + RANK) % 2 else x) + iteration) for iteration in range(20)]
    for value in values:
        assert_agree(value, np.full((4, 2), 1 / 8, np.float32))


def a_peer_that_ends() -> None:
    x = put(np.ones((4, 2), np.float32), mesh(), "d")
    total = mapped(lambda a: jax.lax.psum(a, "d"), mesh(), P())
    assert_agree(total(x), np.full((2, 2), 2, np.float32))
    if RANK == 1:
        os._exit(0)
    expect_error(lambda: total(x).block_until_ready(), r"FLAGOS-50[45]", r"among the devices \[0, 1\]")


if __name__ == "__main__":
    # Whoever waits for a process that failed a check does not wait for long.
    os.environ["FLAGOS_COLLECTIVE_TIMEOUT"] = "30"
    jax.distributed.initialize(os.environ["COORDINATOR"], WORLD, RANK)
    # The oracle knows no shorter products.
    jax.config.update("jax_default_matmul_precision", "highest")
    make_checks(
        (
            devices,
            collectives,
            launches_repeat,
            a_loop,
            training_steps,
            launches_keep_their_order,
            a_peer_that_ends,
        )
    )
