"""Sums of complex numbers become two of floats: the same sums, in one loop nest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.split_complex_sums import split_complex_sums
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, run_module
from support.passes import simplified

PROGRAMS: dict[str, Any] = {
    "rows": lambda z: z.sum(-1),
    "columns": lambda z: (z * z.conj()).sum(0),
    "all, and one": lambda z: z.sum() + z[0, 0],
    "an initial value": lambda z: jax.lax.reduce(z, np.complex64(2 - 3j), jax.lax.add, (1,)),
    "over one": lambda z: z[:1].sum(0),
    "over none": lambda z: z[:0].sum(0),
}


def sums(hlo: bytes, arguments: tuple[np.ndarray, ...]) -> list[Instruction]:
    """The reduces that are left; the results are XLA's."""
    module = split_complex_sums(simplified(import_module(hlo)))
    verify(module)
    for ours, theirs in zip(run_module(module, arguments), run_on_xla(hlo, arguments), strict=True):
        assert_same(ours, theirs, 1e-6)
    return [i for i in module.entry.instructions if i.opcode is Opcode.REDUCE]


@pytest.mark.parametrize("name", PROGRAMS)
def test_sums(name: str, rng: np.random.Generator) -> None:
    z = (rng.standard_normal((5, 7)) + 1j * rng.standard_normal((5, 7))).astype(np.complex64)
    z.flat[:2] = complex(np.inf, 1), complex(0, np.nan)
    found = sums(hlo_bytes(PROGRAMS[name], z), (z,))
    assert all(reduce.shape.element_type is ElementType.F32 for reduce in found)  # type: ignore[union-attr]


def test_wider_ones_and_products_stay(rng: np.random.Generator) -> None:
    """Loop nests do not compute with the first, and products mix real and imaginary parts."""
    z = rng.standard_normal((3, 4)) + 1j * rng.standard_normal((3, 4))
    for function, argument in ((lambda z: jnp.sum(z, 1), z), (lambda z: jnp.prod(z, 1), z.astype(np.complex64))):
        with jax.enable_x64(True):
            before = simplified(import_module(hlo_bytes(function, argument)))
        assert split_complex_sums(before) is before
