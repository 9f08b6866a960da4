"""JAX itself over the adapter: what a user's program does, compared with NumPy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "flagos,cpu")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.experimental import serialize_executable, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import flagos_backend.frontends.jax
from flagos_backend.frontends.jax.registration import client_options
from plugin_abi import loader


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    flagos_backend.frontends.jax.initialize()


@pytest.fixture(scope="module")
def devices() -> list[Any]:
    return jax.devices("flagos")


def test_devices(devices: list[Any]) -> None:
    assert [device.id for device in devices] == [0, 1, 2, 3]
    assert {device.platform for device in devices} == {"flagos"}
    assert {memory.kind for memory in devices[0].addressable_memories()} == {"device", "pinned_host", "unpinned_host"}
    assert devices[0].default_memory().kind == "device"
    stats = devices[0].memory_stats()
    assert stats["bytes_limit"] > 0
    with pytest.raises(RuntimeError):
        jax.devices("flagos")[0].client.device_from_local_hardware_id(17)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "bool", "complex64", "bfloat16", "int4", "uint2"])
def test_arrays_in_and_out(devices: list[Any], rng: np.random.Generator, dtype: str) -> None:
    array = rng.integers(0, 2, (3, 5)).astype(getattr(ml_dtypes, dtype, dtype))
    for view in (array, array.T, array[::-1], array[:0]):
        there = jax.device_put(view, devices[1])
        np.testing.assert_array_equal(np.asarray(there), view)


def test_reading_does_not_copy(devices: list[Any]) -> None:
    array = jax.device_put(np.arange(1024, dtype=np.float32), devices[0])
    assert np.asarray(array).ctypes.data == array.unsafe_buffer_pointer()


def test_zero_copy_keeps_the_host_array(devices: list[Any]) -> None:
    """The device may alias the NumPy array; it must survive as long as the device array."""
    there = jax.device_put(np.arange(1 << 16, dtype=np.float32), devices[0])
    filler = [np.full(1 << 16, -1, np.float32) for _ in range(20)]
    np.testing.assert_array_equal(np.asarray(there), np.arange(1 << 16))
    del filler


def test_jit(devices: list[Any], rng: np.random.Generator) -> None:
    x = rng.normal(size=(8, 8)).astype(np.float32)
    y = jax.jit(lambda a: jnp.tanh(a @ a.T).sum(axis=0))(jax.device_put(x, devices[2]))
    assert y.devices() == {devices[2]}
    np.testing.assert_allclose(np.asarray(y), np.tanh(x @ x.T).sum(axis=0), rtol=1e-4, atol=1e-5)


def test_asynchronous_dispatch_and_pointers(devices: list[Any]) -> None:
    """Asking for the address of an array that is still being computed waits; it neither fails nor hangs."""
    x = jax.device_put(np.eye(64, dtype=np.float32), devices[0])
    y = jax.jit(lambda a: jax.lax.fori_loop(0, 100, lambda _, b: b @ a, a))(x)
    assert y.unsafe_buffer_pointer() != 0
    np.testing.assert_array_equal(np.asarray(y), np.eye(64))


def test_sharded_computation(devices: list[Any], rng: np.random.Generator) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
    x = rng.normal(size=(8, 8)).astype(np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    y = jax.jit(lambda a: a @ a.T)(sharded)
    assert isinstance(y.sharding, NamedSharding)
    assert y.sharding.device_set == set(devices)
    np.testing.assert_allclose(np.asarray(y), x @ x.T, rtol=1e-4, atol=1e-4)
    back = jax.device_put(y, devices[3])
    np.testing.assert_array_equal(np.asarray(back), np.asarray(y))


def test_donation(devices: list[Any]) -> None:
    x = jax.device_put(np.arange(8.0, dtype=np.float32), devices[0])
    y = jax.jit(lambda a: a + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), np.arange(8) + 1)
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        np.asarray(x)


def test_memory_kinds(devices: list[Any]) -> None:
    device, host = (SingleDeviceSharding(devices[0], memory_kind=kind) for kind in ("device", "pinned_host"))
    x = jax.device_put(np.arange(4.0), host)
    assert x.sharding.memory_kind == "pinned_host"
    y = jax.device_put(x, device)
    assert y.sharding.memory_kind == "device"
    z = jax.jit(lambda a: a * 2, out_shardings=host)(y)
    assert z.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(z), np.arange(4.0) * 2)


def test_from_torch(devices: list[Any]) -> None:
    there = jax.dlpack.from_dlpack(torch.arange(6).reshape(2, 3).to(torch.int32), device=devices[0])
    assert there.devices() == {devices[0]}
    np.testing.assert_array_equal(np.asarray(there), np.arange(6).reshape(2, 3))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_to_torch(devices: list[Any]) -> None:
    """The array's memory as a tensor, without a copy, through NumPy."""
    there = jax.device_put(np.arange(6, dtype=np.float32), devices[0])
    tensor = torch.from_numpy(np.asarray(there))
    assert tensor.data_ptr() == there.unsafe_buffer_pointer()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


def test_analysis_of_a_compiled_function(devices: list[Any]) -> None:
    x = jax.device_put(np.zeros((4, 4), np.float32), devices[0])
    compiled = jax.jit(lambda a: a @ a).lower(x).compile()
    assert compiled.cost_analysis()["flops"] >= 2 * 4**3
    assert compiled.memory_analysis().argument_size_in_bytes == 64
    assert "f32[4,4]" in compiled.as_text()


def test_serialized_executable(devices: list[Any]) -> None:
    x = jax.device_put(np.arange(4, dtype=np.float32), devices[0])
    compiled = jax.jit(lambda a: a * 3).lower(x).compile()
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled), backend="flagos", execution_devices=devices[:1]
    )
    np.testing.assert_array_equal(np.asarray(loaded(x)), np.arange(4) * 3)


def test_errors_reach_python(devices: list[Any]) -> None:
    x = jax.device_put(np.zeros(4, np.float32), devices[0])
    compiled = jax.jit(lambda a: a + 1).lower(x).compile()
    with pytest.raises(TypeError):
        compiled(jax.device_put(np.zeros(5, np.float32), devices[0]))
    x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        compiled(x)
    np.testing.assert_array_equal(np.asarray(compiled(np.zeros(4, np.float32))), np.ones(4))


def test_topology(devices: list[Any]) -> None:
    accepted = loader.last_result()
    assert accepted is not None
    assert accepted.accepted is not None
    topology = topologies.get_topology_desc("", platform="flagos", **client_options(accepted.accepted))
    assert len(topology.devices) == len(devices)
    assert {device.platform for device in topology.devices} == {"flagos"}


def test_profile(devices: list[Any], tmp_path: Path) -> None:
    x = jax.device_put(np.eye(16, dtype=np.float32), devices[0])
    function = jax.jit(lambda a: a @ a)
    function(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        function(x).block_until_ready()
    [file] = tmp_path.rglob("*.xplane.pb")
    planes = {plane.name: plane for plane in jax.profiler.ProfileData.from_file(str(file)).planes}
    events = {event.name: dict(event.stats) for line in planes["/device:flagos"].lines for event in line.events}
    [launch] = [stats for name, stats in events.items() if name.startswith("jit_")]
    [product] = [stats for name, stats in events.items() if "dot_general" in name]  # a step of it
    for stats in launch, product:
        assert stats["flops"] == 2 * 16**3
        assert stats["bytes_accessed"] >= 2 * 16 * 16 * 4
        assert Path(__file__).name in stats["source"]
    assert launch["hlo_module"] == product["hlo_module"]
    assert product["provider"]
