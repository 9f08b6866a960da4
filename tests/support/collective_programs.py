"""Programs of JAX over a row of devices, as functions of its mesh, for devices of one process or of several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec

TYPES = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.float16]

# Where the data of a training step are split, and where its weights: data parallel, tensor parallel, and with weights
# that are gathered when they are used.
SPLITS: list[tuple[Any, Any]] = [(("d",), ()), ((), (None, "d")), (("d",), ("d",))]


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


# Launches of a program, from the third of which on an accelerator may replay it.
_LAUNCHES = 4


def _launched(step: Callable[[jax.Array], Any], x: np.ndarray, mesh: Mesh) -> list[Any]:
    """On the rows of ``x``, each time in another order."""
    return [step(put(np.roll(x, number, axis=0), mesh, "d")) for number in range(_LAUNCHES)]


def collective(name: str, x: np.ndarray, mesh: Mesh) -> list[jax.Array]:
    """One of COLLECTIVES on the rows of ``x``."""
    function, out = COLLECTIVES[name]
    return _launched(mapped(partial(function, mesh), mesh, out), x, mesh)


def many_arrays(x: np.ndarray, mesh: Mesh) -> list[Any]:
    """A sum and a gather of a hundred arrays: more than transports tell their devices in one piece."""

    def step(y: jax.Array) -> list[jax.Array]:
        parts = jnp.split(y, 100, axis=1)
        gathered = [lax.all_gather(part, "d", axis=0, tiled=True) for part in parts]
        return [lax.psum(part * n, "d") + g.sum() for n, (part, g) in enumerate(zip(parts, gathered, strict=True))]

    return _launched(mapped(step, mesh, P()), x, mesh)


def launches(inputs: list[np.ndarray], mesh: Mesh) -> list[jax.Array]:
    """The same program on one input after the other."""
    step = mapped(lambda y: jnp.tanh(lax.psum(jnp.sin(y) @ y.T, "d")) + lax.pmax(y.sum(), "d"), mesh, P())
    return [step(put(x, mesh, "d")) for x in inputs]


def loop(x: np.ndarray, mesh: Mesh) -> list[jax.Array]:
    def iterations(y: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 20, lambda _, c: lax.pmean(jnp.cos(c), "d") + 0.5 * c, y)

    return _launched(mapped(iterations, mesh, P("d")), x, mesh)


def train(x: np.ndarray, w: np.ndarray, data: Any, weights: Any, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Five steps: the weights, and the last loss."""

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w) @ w.T - x)))(w)
        return w - 0.1 * slope, loss

    weight, batch = put(w, mesh, *weights), put(x, mesh, *data)
    for _ in range(5):
        weight, loss = step(weight, batch)
    return weight, loss


def train_spread(x: np.ndarray, weights: list[np.ndarray], mesh: Mesh) -> tuple[list[jax.Array], jax.Array]:
    """Five steps with weights that are spread over the devices along either dimension, by clipped gradients."""

    @partial(jax.jit, donate_argnums=0)
    def step(ws: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(ws: list[jax.Array]) -> jax.Array:
            y = x
            for w in ws:
                y = y + jnp.tanh(y @ w)
            return jnp.mean(jnp.square(y - 1))

        value, slopes = jax.value_and_grad(loss)(ws)
        norm = jnp.sqrt(sum(jnp.square(slope).sum() for slope in slopes))
        return [w - 0.1 * slope / jnp.maximum(norm, 0.01) for w, slope in zip(ws, slopes, strict=True)], value

    spread = [put(w, mesh, *((None, "d") if n % 2 else ("d",))) for n, w in enumerate(weights)]
    batch = put(x, mesh, "d")
    for _ in range(5):
        spread, value = step(spread, batch)
    return spread, value


def assert_agree(ours: Any, theirs: Any) -> None:
    """Each array's parts in this process are the parts of another array, which is whole here."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        whole = np.asarray(b).astype(np.float64)
        assert a.shape == whole.shape
        assert a.dtype == b.dtype
        for shard in a.addressable_shards:
            np.testing.assert_allclose(
                np.asarray(shard.data).astype(np.float64), whole[shard.index], rtol=1e-4, atol=1e-4
            )
