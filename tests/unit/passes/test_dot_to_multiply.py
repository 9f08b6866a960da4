"""Dots that add nothing up, against stock XLA on the program as it was."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.dot_to_multiply import dot_to_multiply
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, run_module
from support.passes import simplified

SPECS = {
    "vectors": ("i,j->ij", (5,), (3,)),
    "one contracted": ("ik,kj->ij", (5, 1), (1, 3)),
    "contracted first": ("ki,jk->ij", (1, 5), (3, 1)),
    "two contracted": ("iklj,lkm->ijm", (2, 1, 1, 3), (1, 1, 4)),
    "batch": ("bi,bj->bij", (4, 2), (4, 3)),
    "batches in another order": ("bic,cbj->bcij", (2, 3, 4), (4, 2, 5)),
    "batch between": ("ibk,kjb->bij", (3, 2, 1), (1, 4, 2)),
    "scalars": (",->", (), ()),
    "nothing": ("i,j->ij", (0,), (3,)),
}
TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32]


def dots(spec: str, result: Any, *arguments: np.ndarray) -> int:
    """How many dots are left; the results are those of XLA."""
    hlo = hlo_bytes(lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=result), *arguments)
    module = dot_to_multiply(simplified(import_module(hlo)))
    verify(module)
    for a, b in zip(run_module(module, arguments), run_on_xla(hlo, arguments), strict=True):
        assert_same(a, b, None)
    return sum(i.opcode is Opcode.DOT for i in module.entry.instructions)


def drawn(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Numbers that overflow, vanish and are none, among others."""
    numbers = np.array(rng.standard_normal(shape)) * 10.0 ** rng.integers(-3, 4, shape)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 256, shape).astype(dtype)
    strange = rng.choice([np.nan, np.inf, -np.inf, 0.0, 3e38], shape)
    return np.where(rng.random(shape) < 0.2, strange, numbers).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_dot_that_adds_nothing_up(name: str, dtype: Any, rng: np.random.Generator) -> None:
    spec, lhs, rhs = SPECS[name]
    with jax.enable_x64(True):
        assert dots(spec, None, drawn(lhs, dtype, rng), drawn(rhs, dtype, rng)) == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        *(
            (ml_dtypes.bfloat16, np.float32),
            (np.float16, np.float32),
            (np.float16, np.float64),
            (np.float32, np.float64),
        ),
        *((np.int8, np.int32), (np.uint8, np.int32), (np.uint8, np.uint16), (np.int32, np.uint32)),
    ],
    ids=lambda d: np.dtype(d).name,
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_another_type_of_result(given: Any, wanted: Any, rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        assert dots("bi,bj->bij", wanted, drawn((4, 5), given, rng), drawn((4, 3), given, rng)) == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        *((np.int32, np.float32), (np.int16, np.float16), (np.int8, np.float32), (np.float16, ml_dtypes.bfloat16)),
        *((ml_dtypes.bfloat16, np.float16), (np.complex64, np.complex64)),
    ],
    ids=lambda d: np.dtype(d).name,
)
def test_results_that_no_product_of_elements_has(given: Any, wanted: Any, rng: np.random.Generator) -> None:
    x, y = (rng.integers(2, 12, size).astype(given) for size in (5, 3))
    assert dots("i,j->ij", wanted, x, y) == 1


def test_sums_stay(rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (2, 5, 2)).astype(np.float32)
    assert dots("ik,jk->ij", None, x, y) == 1
