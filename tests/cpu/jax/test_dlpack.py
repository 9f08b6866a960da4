"""DLPack with torch and NumPy, both ways and without a copy."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)], ids=str)
def test_to_torch(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> None:
    array = jnp.asarray(rng.integers(0, 2, shape)).astype(dtype)
    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert tensor.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(tensor.to(torch.complex64).numpy(), np.asarray(array).astype(np.complex64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_torch(device: jax.Device, dtype: str) -> None:
    tensor = torch.arange(64).reshape(8, 8).to(getattr(torch, dtype))
    array = jnp.from_dlpack(tensor, device=device, copy=False)
    assert array.devices() == {device}
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array + 0), np.asarray(jnp.arange(64).reshape(8, 8).astype(dtype)))


def test_a_tensor_lives_as_long_as_its_array(device: jax.Device) -> None:
    array = jnp.from_dlpack(torch.arange(1024.0), device=device)
    gc.collect()
    np.testing.assert_array_equal(np.asarray(array * 2), np.arange(1024) * 2)


def test_an_array_lives_as_long_as_its_tensor() -> None:
    tensor = torch.from_dlpack(jnp.arange(1024.0) + 1)
    gc.collect()
    jnp.zeros(1024).block_until_ready()
    np.testing.assert_array_equal(tensor.numpy(), np.arange(1024) + 1)


def test_storage_that_torch_holds_is_not_donated() -> None:
    array = jnp.ones(1024) + 0
    tensor = torch.from_dlpack(array)
    jax.jit(lambda x: x * 5, donate_argnums=0)(array).block_until_ready()
    assert torch.equal(tensor, torch.ones(1024))


def test_a_copy_is_a_copy(device: jax.Device) -> None:
    array = jnp.arange(8.0)
    capsule_owner = torch.utils.dlpack.from_dlpack(array.__dlpack__(copy=True))
    assert capsule_owner.data_ptr() != array.unsafe_buffer_pointer()
    tensor = torch.arange(8.0)
    copied = jnp.from_dlpack(tensor, device=device, copy=True)
    tensor += 1
    np.testing.assert_array_equal(np.asarray(copied), np.arange(8))


def test_a_transposed_tensor_is_copied_or_refused(device: jax.Device) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(np.asarray(jnp.from_dlpack(tensor, device=device)), tensor.numpy())
    with pytest.raises(ValueError, match="needs a copy"):
        jnp.from_dlpack(tensor, device=device, copy=False)


def test_numpy_reads_an_array() -> None:
    np.testing.assert_array_equal(np.from_dlpack(jnp.arange(4.0)), np.arange(4))


def test_an_empty_array() -> None:
    assert torch.from_dlpack(jnp.zeros((0, 3))).shape == (0, 3)


def test_the_cpu_s_arrays_go_jax_s_own_way(cpu: jax.Device) -> None:
    array = jax.device_put(np.arange(4.0, dtype=np.float32), cpu)
    assert torch.from_dlpack(array).data_ptr() == array.unsafe_buffer_pointer()
    assert jnp.from_dlpack(torch.arange(3)).devices() == {cpu}


def test_another_device_than_the_host_is_refused() -> None:
    with pytest.raises(BufferError, match="host memory"):
        jnp.ones(2).__dlpack__(dl_device=(2, 0))


def test_a_view_outlives_deletion() -> None:
    array = jnp.arange(1024.0) + 1
    tensor = torch.from_dlpack(array)
    array.delete()
    jnp.zeros(1024).block_until_ready()
    assert torch.equal(tensor, torch.arange(1024.0) + 1)


def test_arrays_are_lent_again_and_again() -> None:
    """What is given back can be donated again."""
    array = jnp.ones(1024) + 0
    pointer = array.unsafe_buffer_pointer()
    for _ in range(3):
        several = [torch.from_dlpack(array) for _ in range(4)]
        assert {tensor.data_ptr() for tensor in several} == {pointer}
        del several
    after = jax.jit(lambda x: x * 5, donate_argnums=0)(array)
    assert after.unsafe_buffer_pointer() == pointer


def test_what_nobody_takes_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.ones(1024) + 0
    pointer = array.unsafe_buffer_pointer()

    def refuse(capsule: object) -> None:
        raise RuntimeError("no such device")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no such device"):
        patch.setattr(torch._C, "_from_dlpack", refuse)
        array.__dlpack__()
    after = jax.jit(lambda x: x * 5, donate_argnums=0)(array)
    assert after.unsafe_buffer_pointer() == pointer


def test_an_element_type_that_dlpack_lacks_is_named() -> None:
    with pytest.raises(BufferError, match="int4"):
        torch.from_dlpack(jnp.ones(2, jnp.int4))
