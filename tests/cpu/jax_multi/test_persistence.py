"""Partitioned programs that outlive a call: export and serialized executables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
X = np.arange(64, dtype=np.float32).reshape(16, 4)


def test_serialized_executable(mesh: Mesh) -> None:
    given = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    compiled = jax.jit(lambda x: jnp.cumsum(x, 0) - x.mean()).lower(given).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    result = loaded(given)
    assert result.sharding.spec == compiled(given).sharding.spec
    np.testing.assert_array_equal(np.asarray(result), np.asarray(compiled(given)))


def test_export(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("a", "b"))
    given = jax.device_put(X, sharding)
    program = jax.jit(lambda x: x @ x.T, in_shardings=sharding, out_shardings=NamedSharding(mesh, P("a")))
    exported = jax.export.export(program, platforms=["flagos"])(given)
    assert exported.nr_devices == 8
    result = jax.jit(jax.export.deserialize(exported.serialize()).call)(given)
    np.testing.assert_allclose(np.asarray(result), X @ X.T)
