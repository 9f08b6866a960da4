"""JAX programs of many steps that cannot be captured as one: what is replayed of them is parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def chain(x: jax.Array) -> jax.Array:
    """Steps that are not fused into one."""
    for _ in range(3):
        x = jnp.sort(jnp.tanh(x) + x, axis=1)
    return x


def called_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    before = chain(x)
    called = jax.pure_callback(lambda x: np.asarray(x) * 3, jax.ShapeDtypeStruct(x.shape, x.dtype), before)
    return chain(called) + before, before


def until_large(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.while_loop(
        lambda state: jnp.abs(state[0]).sum() < 1e3,
        lambda state: (2 * chain(state[0]), state[1] + 1),
        (x, jnp.int32(0)),
    )
