"""Powers whose exponent is half an odd number, and those that only look like it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flagos_backend.codegen.triton.loop_transforms.half_powers import with_roots
from flagos_backend.devices.target import SIMULATED
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.reference.nests import evaluate
from flagos_backend.loop_ir.region import Apply, Load, Region
from programs import hlo_bytes
from support.nests import triton_nests

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1e-45, 1e-38, 3e-30, 1e-19, 1e19, 1e26, 3e38]
HALVES = [-1.5, -0.5, 1.5]


def nest_of(exponent: float, dtype: type = np.float32) -> Region:
    shape = jax.ShapeDtypeStruct((256,), dtype)
    (nest,) = triton_nests(hlo_bytes(lambda x: jax.lax.pow(x, jnp.asarray(exponent, dtype)), shape), SIMULATED)
    return nest


def opcodes(nest: Region) -> set[Opcode]:
    return {e.opcode for e in nest.expressions() if isinstance(e, Apply)}


@pytest.mark.parametrize("exponent", HALVES)
def test_a_power_is_products_of_a_root(exponent: float, rng: np.random.Generator) -> None:
    changed = with_roots(nest_of(exponent))
    assert Opcode.POWER not in opcodes(changed)
    x = np.exp2(rng.uniform(-140, 128, 256)).astype(np.float32)
    x[: len(SPECIAL)] = SPECIAL
    (source,) = {e.source for e in changed.expressions() if isinstance(e, Load)}
    found = evaluate([changed], {source: torch.from_numpy(x)})[changed.stores[0].target].numpy()
    with np.errstate(all="ignore"):
        truth = np.power(x.astype(np.float64), exponent)
        expected = truth.astype(np.float32)
        ulp = np.spacing(np.maximum(np.abs(expected), np.finfo(np.float32).smallest_normal))
    alike = (found == expected) | (np.isnan(found) & np.isnan(expected))
    # At the edge of infinity one of them may be infinite.
    at_edge = np.abs(truth) >= float(np.finfo(np.float32).max) * (1 - 1e-6)
    with np.errstate(all="ignore"):
        near = np.abs(found - truth) <= 6 * ulp
    assert np.all(alike | near | at_edge)
    assert not np.any(np.signbit(found) & ~np.isnan(found))


@pytest.mark.parametrize(("exponent", "dtype"), [(2.5, np.float32), (-1.25, np.float32), (-1.5, np.float64)])
def test_other_powers_stay(exponent: float, dtype: type) -> None:
    with jax.enable_x64(True):
        nest = nest_of(exponent, dtype)
    assert with_roots(nest) is nest and Opcode.POWER in opcodes(nest)
