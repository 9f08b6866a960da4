"""Memory is shared, not copied: with inner tensors, other libraries by DLPack, JAX arrays on flagos and ABI buffers."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from flagos_backend.frontends.torch.device import buffers
from flagos_backend.frontends.torch.device.errors import BufferRefused

flagos = torch.flagos


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64], ids=str)
def test_inner_tensors(dtype: torch.dtype) -> None:
    host = torch.ones(3, 4, dtype=dtype).t()[1:]
    there = flagos.wrap(host)
    assert there.device.type == "flagos" and there.data_ptr() == host.data_ptr()
    assert (there.shape, there.stride()) == (host.shape, host.stride())
    back = flagos.unwrap(there)
    assert back.device.type == "cpu" and back.data_ptr() == host.data_ptr() and back.stride() == host.stride()
    assert flagos.unwrap(host) is host


def test_memory_lives_as_long_as_any_of_its_tensors(device: torch.device) -> None:
    host = torch.arange(5.0)
    there = flagos.wrap(host)
    del host
    gc.collect()

    assert there.tolist() == [0, 1, 2, 3, 4]
    inner = flagos.unwrap(there)
    before = flagos.memory_allocated()
    del there
    assert inner.sum() == 10
    assert flagos.memory_allocated() == before
    del inner
    assert flagos.memory_allocated() == before - 20


def test_numpy_by_dlpack(device: torch.device) -> None:
    there = torch.arange(6.0, device=device).view(2, 3)
    array = np.from_dlpack(there)
    assert array.ctypes.data == there.data_ptr()
    del there
    gc.collect()
    np.testing.assert_array_equal(array, np.arange(6.0).reshape(2, 3))
    with pytest.raises(BufferError, match="require gradient"):
        np.from_dlpack(torch.ones(2, device=device, requires_grad=True))


def test_from_dlpack(device: torch.device) -> None:
    array = np.arange(4.0)
    there = flagos.from_dlpack(array)
    assert there.device == device and there.data_ptr() == array.ctypes.data
    there.add_(1)
    np.testing.assert_array_equal(array, np.arange(4.0) + 1)
    address = array.ctypes.data
    del array
    gc.collect()
    assert there.data_ptr() == address and there.sum() == 10
    assert torch.from_dlpack(there).device.type == "cpu"


def test_jax_arrays_on_the_device(device: torch.device) -> None:
    jax = pytest.importorskip("jax", reason="needs jax")
    flagos_device = jax.devices("flagos")[0]
    array = jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), flagos_device)
    there = flagos.from_dlpack(array)
    assert there.device == device and there.data_ptr() == array.unsafe_buffer_pointer()
    back = jax.dlpack.from_dlpack(there, device=flagos_device, copy=False)
    assert back.devices() == {flagos_device} and back.unsafe_buffer_pointer() == there.data_ptr()
    del array, there
    gc.collect()
    np.testing.assert_array_equal(np.asarray(back * 2), np.arange(6).reshape(2, 3) * 2)


def test_buffers_of_tensors(device: torch.device) -> None:
    there = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    buffer = buffers.buffer_of(there)
    assert buffer.pointer_address() == there.data_ptr() and buffer.dims == (2, 3)
    held = flagos.memory_allocated()
    address = there.data_ptr()
    del there
    gc.collect()
    assert flagos.memory_allocated() == held
    again = buffers.tensor_of(buffer)
    assert again.data_ptr() == address and again.device == device
    buffer.close()
    assert again.tolist() == [[0, 1, 2], [3, 4, 5]]
    del again, buffer
    gc.collect()
    assert flagos.memory_allocated() == held - 24


def test_what_cannot_be_a_buffer(device: torch.device) -> None:
    with pytest.raises(BufferRefused, match="strides"):
        buffers.buffer_of(torch.ones(2, 3, device=device).t())
    with pytest.raises(BufferRefused, match="complex32"):
        buffers.buffer_of(torch.zeros(2, dtype=torch.complex32, device=device))
    assert buffers.tensor_of(buffers.buffer_of(torch.ones(0, 2, device=device))).shape == (0, 2)


def test_values_are_seen_on_both_sides(device: torch.device) -> None:
    host = torch.zeros(4)
    there = flagos.wrap(host)
    there.copy_(torch.arange(4.0))
    assert_close(host, torch.arange(4.0))
