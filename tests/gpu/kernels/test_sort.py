"""Our sort on the accelerator against NumPy's stable one, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.registry import Run
from programs import hlo_bytes
from support.against_xla import to_storage

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
(TRITON,) = (i for i in implementations_of(str(Opcode.SORT)) if i.provider is Provider.TRITON)


@pytest.mark.parametrize("values", [0, 2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8], ids=lambda d: d.__name__)
@pytest.mark.parametrize("dims", [(3, 16384), (700, 2049), (5000, 512), (40, 300), (20000, 7), (9999, 2)])
def test_sort(dims, dtype, values, rng):
    """Rows that fill a program, that share one, and that end within; ties, zeros of both signs and NaNs."""
    keys = np.trunc(rng.standard_normal(dims) * 50).astype(np.float32)
    keys[rng.random(dims) < 0.01] *= np.nan if dtype in (jnp.float32, jnp.bfloat16) else 1
    others = [rng.integers(-(1 << 31), 1 << 31, dims).astype(t) for t in (np.int32, np.int8)][:values]
    with np.errstate(invalid="ignore"):  # bytes wrap
        arrays = [keys.astype(dtype), *others]
    module = import_module(hlo_bytes(lambda *operands: lax.sort(operands, num_keys=1), *arrays))
    (sort,) = (i for c in module.computations() for i in c.instructions if i.opcode is Opcode.SORT)
    target = TorchAccelerator(DEVICE.type, 0).target
    assert not TRITON.unsupported(sort, target)
    (variant,) = TRITON.variants(sort, target)
    stored = [to_storage(array, operand.shape) for array, operand in zip(arrays, sort.operands, strict=True)]
    found = variant.kernel(Run(), *(tensor.to(DEVICE) for tensor in stored))
    order = np.argsort(arrays[0].astype(np.float32), axis=1, kind="stable")
    for ours, array in zip(found if values else [found], arrays, strict=True):
        assert ours.cpu().view(torch.uint8).numpy().tobytes() == np.take_along_axis(array, order, 1).tobytes()
