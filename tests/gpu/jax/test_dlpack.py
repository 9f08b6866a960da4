"""DLPack between JAX's arrays on the device and torch's tensors there: one memory, and nobody reads what is not there
yet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

DEVICE = (torch.accelerator.current_accelerator() or torch.device("cpu")).type


def test_one_memory_both_ways(rng: np.random.Generator) -> None:
    x = rng.standard_normal((257, 33)).astype(np.float32)
    tensor = torch.from_numpy(x).to(DEVICE)
    array = jnp.from_dlpack(tensor)
    assert array.devices() == {jax.devices("flagos")[0]}
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = torch.from_dlpack(jax.jit(lambda a: a * 2 + 1)(array))
    assert back.device.type == DEVICE
    np.testing.assert_allclose(back.cpu().numpy(), x * 2 + 1, rtol=1e-6)


def test_the_tensor_s_stream_comes_first(rng: np.random.Generator) -> None:
    """What another stream is still computing is not read before it is there, nor is a result of ours."""
    x = torch.from_numpy(rng.standard_normal((2048, 2048)).astype(np.float32) / 64).to(DEVICE)
    module = torch.get_device_module(DEVICE)
    expected = (x.double() @ x.double() @ x.double() + 1).cpu().numpy()
    step = jax.jit(lambda a: a + 1)
    for _ in range(5):
        module.synchronize()
        with module.stream(module.Stream()):
            array = step(jnp.from_dlpack(x @ x @ x))
            result = torch.from_dlpack(array) * 1.0
        module.synchronize()
        np.testing.assert_allclose(result.cpu().numpy(), expected, rtol=1e-2, atol=1e-2)


def test_memory_that_torch_holds_is_not_written() -> None:
    step = jax.jit(lambda a: a * 5 + 1, donate_argnums=0)
    value = jax.device_put(np.ones(4096, np.float32), jax.devices("flagos")[0])
    for _ in range(4):
        value = step(value)
    tensor = torch.from_dlpack(value)
    before = tensor.clone()
    after = step(value)
    assert torch.equal(tensor, before)
    np.testing.assert_array_equal(np.asarray(after), before.cpu().numpy() * 5 + 1)
