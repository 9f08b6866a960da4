"""DLPack with torch, of the memory of accelerators: both ways and without a copy."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import SingleDeviceSharding

DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64"]


@pytest.fixture(params=[0, 1])
def device(request: pytest.FixtureRequest) -> jax.Device:
    return jax.devices("flagos")[request.param]


def test_a_device_says_what_dlpack_calls_it(device: jax.Device) -> None:
    assert (device.dlpack_device_type, device.dlpack_device_id) == (1, 0)  # simulated: the host's


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)], ids=str)
def test_to_torch(device: jax.Device, rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> None:
    array = jax.device_put(rng.integers(0, 2, shape), device).astype(dtype)
    tensor = torch.from_dlpack(array)
    assert tensor.shape == shape
    assert tensor.dtype == getattr(torch, dtype)
    if array.size:
        assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(tensor.to(torch.complex64).numpy(), np.asarray(array).astype(np.complex64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_torch(device: jax.Device, dtype: str) -> None:
    tensor = torch.arange(64).reshape(8, 8).to(getattr(torch, dtype))
    array = jnp.from_dlpack(tensor, device=device, copy=False)
    assert array.devices() == {device}
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    doubled = jax.jit(lambda x: x + x)(array)
    assert doubled.devices() == {device}
    np.testing.assert_array_equal(np.asarray(doubled), np.asarray(array) + np.asarray(array))


def test_each_lives_as_long_as_the_other(device: jax.Device) -> None:
    array = jnp.from_dlpack(torch.arange(1024.0), device=device)
    gc.collect()
    tensor = torch.from_dlpack(jax.jit(lambda x: x * 2)(array))
    del array
    gc.collect()
    jax.device_put(np.zeros(1024, np.float32), device).block_until_ready()
    assert torch.equal(tensor, torch.arange(1024.0) * 2)


def test_memory_that_torch_holds_is_not_donated(device: jax.Device) -> None:
    """Nor when the launch is one that was made ready for memory of its own."""
    step = jax.jit(lambda x: x * 5 + 1, donate_argnums=0)
    value = jax.device_put(np.ones(1024, np.float32), device)
    for _ in range(4):
        value = step(value)
    tensor = torch.from_dlpack(value)
    before = tensor.clone()
    after = step(value)
    assert torch.equal(tensor, before)
    np.testing.assert_array_equal(np.asarray(after), before.numpy() * 5 + 1)


def test_arrays_of_pinned_memory_are_the_host_s(device: jax.Device) -> None:
    array = jax.device_put(np.arange(6.0, dtype=np.float32), SingleDeviceSharding(device, memory_kind="pinned_host"))
    assert array.__dlpack_device__() == (1, 0)
    assert torch.equal(torch.from_dlpack(array), torch.arange(6.0))


def test_an_array_on_several_devices_is_refused() -> None:
    devices = jax.devices("flagos")
    array = jax.device_put(np.ones(4), jax.NamedSharding(jax.make_mesh((2,), ("d",), devices=devices), jax.P("d")))
    with pytest.raises(BufferError, match="on one device, this one is on 2"):
        array.__dlpack__()


def test_a_device_that_dlpack_has_no_name_for_is_refused(device: jax.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagos_backend.frontends.jax.dlpack.DLPACK_DEVICE", ("no_such_attribute", "nor_this"))
    with pytest.raises(BufferError, match="not available"):
        jax.device_put(np.ones(4), device).__dlpack_device__()
