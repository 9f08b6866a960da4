"""Programs that outlive a call: jax.export, serialized executables, and JAX's compile cache across processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

X = np.linspace(0, 1, 8, dtype=np.float32)


def test_export_round_trip(device: jax.Device) -> None:
    exported = jax.export.export(jax.jit(lambda x: jnp.sin(x) * 2), platforms=["flagos"])(X)
    assert exported.platforms == ("flagos",)
    result = jax.export.deserialize(exported.serialize()).call(X)
    assert result.devices() == {device}
    np.testing.assert_allclose(np.asarray(result), np.sin(X) * 2, rtol=1e-6)


def test_export_for_several_platforms_chooses_by_device(device: jax.Device, cpu: jax.Device) -> None:
    def program(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, flagos=lambda x: x + 1, cpu=lambda x: x - 1)

    exported = jax.export.export(jax.jit(program), platforms=["flagos", "cpu"])(X)
    for where, expected in ((device, X + 1), (cpu, X - 1)):
        np.testing.assert_array_equal(np.asarray(exported.call(jax.device_put(X, where))), expected)


def test_export_with_symbolic_dimensions() -> None:
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda x: (jnp.cumsum(x), x.sum() / x.shape[0])))(
        jax.ShapeDtypeStruct((n,), jnp.float32)
    )
    for size in (1, 5, 8):
        total, mean = exported.call(X[:size])
        np.testing.assert_allclose(np.asarray(total), np.cumsum(X[:size]), rtol=1e-6)
        np.testing.assert_allclose(np.asarray(mean), X[:size].mean(), rtol=1e-6)


def test_export_of_a_gradient() -> None:
    exported = jax.export.export(jax.jit(lambda x: jnp.tanh(x).sum()))(X)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    np.testing.assert_allclose(np.asarray(jax.grad(again.call)(X)), 1 - np.tanh(X) ** 2, rtol=1e-5, atol=1e-6)


def test_a_decomposition_is_exported_as_its_custom_call() -> None:
    a = np.diag(np.arange(1, 4, dtype=np.float32))
    exported = jax.export.export(jax.jit(jnp.linalg.eigvalsh))(a)
    np.testing.assert_allclose(np.asarray(jax.export.deserialize(exported.serialize()).call(a)), [1, 2, 3], rtol=1e-6)


def test_serialized_executable(device: jax.Device) -> None:
    compiled = jax.jit(lambda x: jnp.cos(x) + 1).lower(X).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    result = loaded(X)
    assert result.devices() == {device}
    np.testing.assert_array_equal(np.asarray(result), np.asarray(compiled(X)))


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
import flagos_backend.frontends.jax
flagos_backend.frontends.jax.initialize()
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
x = np.linspace(0, 1, 16, dtype=np.float32)
result = jax.jit(lambda x: jnp.tanh(x) * 3)(x)
np.testing.assert_allclose(result, np.tanh(x) * 3, rtol=1e-5)
if sys.argv[2] == "callback":
    jax.jit(lambda x: jax.pure_callback(lambda a: np.asarray(a) + 1, jax.ShapeDtypeStruct((16,), jnp.float32), x))(x)
hits, misses = (sum(event.endswith(end) for event in events) for end in ("cache_hits", "cache_misses"))
print(jax.default_backend(), hits, misses)
"""


def run(folder: Path, what: str = "plain") -> list[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu"}
    command = [sys.executable, "-c", PROGRAM, str(folder), what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_the_compile_cache_works_across_processes(tmp_path: Path) -> None:
    platform, hits, misses = run(tmp_path)
    assert (platform, int(hits)) == ("flagos", 0)
    assert int(misses) > 0
    assert list(tmp_path.iterdir())
    platform, again, _ = run(tmp_path)
    assert (platform, int(again)) == ("flagos", int(misses))


def test_a_damaged_cache_entry_is_compiled_again(tmp_path: Path) -> None:
    run(tmp_path)
    for entry in tmp_path.glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:-20])
    assert run(tmp_path)[0] == "flagos"


def test_programs_with_callbacks_stay_out_of_the_cache(tmp_path: Path) -> None:
    run(tmp_path)
    before = {entry.name for entry in tmp_path.glob("*-cache")}
    run(tmp_path, "callback")
    assert {entry.name for entry in tmp_path.glob("*-cache")} == before


def test_an_executable_with_a_callback_says_so_in_another_process() -> None:
    compiled = (
        jax.jit(lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((8,), jnp.float32), x)).lower(X).compile()
    )
    with pytest.raises(Exception, match=r"callback|pickle|host"):
        loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
        del compiled
        jax.clear_caches()
        loaded(X).block_until_ready()
