"""One of two processes with two devices each. NumPy on the whole arrays is the oracle."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "flagos,cpu"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "2"

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support.processes import expect_error, make_checks

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RNG = np.random.default_rng(int(os.environ["FLAGOS_TEST_SEED"]))  # alike in both processes


def mesh() -> Mesh:
    """[process, device]"""
    return Mesh(np.array(jax.devices("flagos")).reshape(WORLD, 2), ("p", "d"))


def sharded(x: np.ndarray, spec: P) -> jax.Array:
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh(), spec), lambda index: x[index])


def assert_is(actual: jax.Array, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """This process's shards are the parts of ``expected`` that they stand for."""
    assert actual.shape == expected.shape
    for shard in actual.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data), expected[shard.index], rtol=tolerance, atol=tolerance)


def on_shards(function: Callable[..., Any], x: np.ndarray, spec: P, out: P) -> jax.Array:
    mapped = jax.shard_map(function, mesh=mesh(), in_specs=spec, out_specs=out, check_vma=False)
    result: jax.Array = jax.jit(mapped)(sharded(x, spec))
    return result


def devices_are_counted_over_all_processes() -> None:
    devices = jax.devices("flagos")
    assert [(device.id, device.process_index) for device in devices] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert jax.local_devices(backend="flagos") == devices[2 * RANK : 2 * RANK + 2]
    assert jax.process_index("flagos") == RANK
    assert jax.process_count("flagos") == WORLD


SPEC = P("p", "d")


def collectives_of_shard_map() -> None:
    """x[process, device] is the block of one device, 4 x 6."""
    x = RNG.standard_normal((2, 2, 4, 6)).astype(np.float32)

    def joined(blocks: np.ndarray) -> np.ndarray:
        return np.block([[blocks[p, d] for d in range(blocks.shape[1])] for p in range(blocks.shape[0])])

    def check(function: Callable[..., Any], expected: np.ndarray, out: P = SPEC) -> None:
        assert_is(on_shards(function, joined(x), SPEC, out), joined(expected))

    check(lambda a: lax.psum(a, ("p", "d")), x.sum((0, 1), keepdims=True), P())
    check(lambda a: lax.psum(a, "p"), x.sum(0, keepdims=True), P(None, "d"))
    check(lambda a: lax.psum(a, "d"), x.sum(1, keepdims=True), P("p"))
    check(lambda a: lax.pmax(a, "p"), x.max(0, keepdims=True), P(None, "d"))
    check(lambda a: lax.pmean(a, ("d", "p")), x.mean((0, 1), keepdims=True), P())
    gathered = np.concatenate([x[0], x[1]], axis=2)[None]
    check(lambda a: lax.all_gather(a, "p", axis=1, tiled=True), gathered, P(None, "d"))
    scattered = x.sum(0).reshape(2, 2, 2, 6).transpose(1, 0, 2, 3)
    check(lambda a: lax.psum_scatter(a, "p", scatter_dimension=0, tiled=True), scattered)
    check(lambda a: lax.ppermute(a, "p", [(0, 1), (1, 0)]), x[::-1])
    line = np.concatenate([np.zeros((1, 4, 6), np.float32), x.reshape(4, 4, 6)[:-1]]).reshape(x.shape)
    check(lambda a: lax.ppermute(a, ("p", "d"), [(0, 1), (1, 2), (2, 3)]), line)
    check(lambda a: lax.ppermute(a, ("p", "d"), [(1, 2)]), np.where(np.arange(4).reshape(2, 2, 1, 1) == 2, line, 0))
    swapped = x.reshape(2, 2, 2, 2, 6).transpose(2, 1, 0, 3, 4).reshape(x.shape)
    check(lambda a: lax.all_to_all(a, "p", 0, 0, tiled=True), swapped)
    check(lambda a: lax.psum(a, "p", axis_index_groups=[[0], [1]]), x)


def collectives_of_every_dtype() -> None:
    for dtype in (np.bool_, np.int8, np.uint16, np.int32, jnp.bfloat16, np.float16, np.complex64, jnp.float8_e4m3fn):
        x = RNG.integers(0, 2, (4, 6)).astype(dtype)
        moved = on_shards(lambda a: lax.ppermute(a, "p", [(0, 1), (1, 0)]), x, P("p"), P("p"))
        for shard in moved.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.roll(x, 2, 0)[shard.index].tobytes()
        if dtype not in (np.bool_, jnp.float8_e4m3fn):
            total = on_shards(lambda a: lax.psum(a, "p"), x, P("p"), P())
            assert total.dtype == dtype
            expected = x[:2].astype(np.complex64) + x[2:].astype(np.complex64)
            for shard in total.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data).astype(np.complex64), expected)


def jit_partitions_over_processes() -> None:
    a, b = (RNG.standard_normal((8, 8)).astype(np.float32) for _ in range(2))

    @partial(jax.jit, out_shardings=NamedSharding(mesh(), P("d", "p")))
    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sort(a @ b.T, axis=0) - jnp.mean(a)

    expected = np.sort(a.astype(np.float64) @ b.T.astype(np.float64), axis=0) - a.mean()
    assert_is(function(sharded(a, P("p", "d")), sharded(b, P("d"))), expected, 1e-4)


def a_train_step_with_sharded_weights() -> None:
    """Data over processes, weights over the devices of each; gradients equal those of one process in float64."""
    x, w, v = (RNG.standard_normal(size).astype(np.float32) for size in ((8, 6), (6, 4), (4, 3)))

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ weights[0]) @ weights[1])

    placed = (sharded(w, P(None, "d")), sharded(v, P("d")))
    value, gradients = jax.jit(jax.value_and_grad(loss))(placed, sharded(x, P("p")))
    hidden = np.tanh(x.astype(np.float64) @ w)
    upstream = np.full((8, 3), 1 / 24)
    assert_is(value, np.asarray((hidden @ v).mean()))
    assert_is(gradients[1], hidden.T @ upstream)
    assert_is(gradients[0], x.T @ ((upstream @ v.T.astype(np.float64)) * (1 - hidden**2)))


def many_launches_keep_their_order() -> None:
    """Programs whose inputs come at different times in the two processes, none of them waited for."""
    x = sharded(np.ones((4, 2), np.float32), P("p", "d"))
    total = jax.jit(lambda a: a / a.sum())
    slow = jax.jit(lambda a: lax.fori_loop(0, 2000, lambda i, c: c * 1.0 + 0.0, a))
    values = []
    for iteration in range(20):
        values.append(total((slow(x) if (iteration + RANK) % 2 else x) + iteration))
    for value in values:
        assert_is(value, np.full((4, 2), 1 / 8), 1e-6)


def a_loop_around_collectives() -> None:
    x = RNG.standard_normal((4, 2)).astype(np.float32)

    def iteration(_: int, a: jax.Array) -> jax.Array:
        return lax.ppermute(lax.psum(a, "d") / 2, "p", [(0, 1), (1, 0)]) + lax.pmax(a, ("p", "d"))

    expected = x.reshape(2, 2, 2, 1).transpose(0, 2, 1, 3).astype(np.float64)
    for _ in range(5):
        halves = np.broadcast_to(expected.sum(1, keepdims=True) / 2, expected.shape)
        expected = halves[::-1] + expected.max((0, 1), keepdims=True)
    got = on_shards(lambda a: lax.fori_loop(0, 5, iteration, a), x, P("p", "d"), P("p", "d"))
    assert_is(got, expected.transpose(0, 2, 1, 3).reshape(4, 2), 1e-3)


def multihost_utilities() -> None:
    multihost_utils.sync_global_devices("here")
    gathered = multihost_utils.process_allgather(np.arange(3) + 10 * RANK)
    np.testing.assert_array_equal(gathered, [[0, 1, 2], [10, 11, 12]])
    assert multihost_utils.broadcast_one_to_all(np.float32(RANK + 5)) == 5


def a_peer_that_ends() -> None:
    x = sharded(np.ones((4, 2), np.float32), P("p", "d"))
    total = jax.jit(lambda a: lax.with_sharding_constraint(a.sum(), NamedSharding(mesh(), P())))
    assert float(total(x)) == 8
    if RANK == 1:
        os._exit(0)
    expect_error(lambda: total(x).block_until_ready(), "FLAGOS-504", r"among the (processes \[0, 1\]|devices \[0, 2\])")


CHECKS = (
    devices_are_counted_over_all_processes,
    collectives_of_shard_map,
    collectives_of_every_dtype,
    jit_partitions_over_processes,
    a_train_step_with_sharded_weights,
    many_launches_keep_their_order,
    a_loop_around_collectives,
    multihost_utilities,
    a_peer_that_ends,
)

if __name__ == "__main__":
    # Whoever waits for a process that failed a check does not wait for long.
    os.environ["FLAGOS_COLLECTIVE_TIMEOUT"] = "60"
    jax.distributed.initialize(os.environ["COORDINATOR"], WORLD, RANK)
    make_checks(CHECKS)
