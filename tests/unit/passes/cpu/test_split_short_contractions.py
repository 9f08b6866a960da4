"""Batches of dots of small matrices, against stock XLA on the program as it was."""

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
from flagos_backend.passes.cpu.split_short_contractions import split_short_contractions
from flagos_backend.passes.dot_to_multiply import dot_to_multiply
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, run_module
from support.passes import simplified

SPLIT = {
    "matrices": ("bij,bjk->bik", (9, 3, 3), (9, 3, 5)),
    "by vectors": ("bij,bj->bi", (9, 4, 4), (9, 4)),
    "vectors": ("bj,bjk->bk", (9, 2), (9, 2, 7)),
    "batches in another order": ("bcij,cbkj->bcik", (2, 5, 3, 3), (5, 2, 4, 3)),
    "batch last": ("ijb,jkb->ikb", (3, 3, 16), (3, 3, 16)),
}
WHOLE = {
    "one matrix": ("ij,jk->ik", (3, 3), (3, 3)),
    "a small batch": ("bij,bjk->bik", (7, 3, 3), (7, 3, 3)),
    "many products": ("bij,bjk->bik", (9, 3, 5), (9, 5, 3)),
    "large matrices": ("bij,bjk->bik", (9, 13, 3), (9, 3, 5)),
    "two contracted": ("bijl,bjlk->bik", (9, 3, 2, 2), (9, 2, 2, 3)),
    "nothing to add up": ("bij,bjk->bik", (9, 3, 1), (9, 1, 3)),
    "nothing": ("bij,bjk->bik", (9, 0, 3), (9, 3, 3)),
}


def dots(spec: str, result: Any, *arguments: np.ndarray, tolerance: float | None) -> int:
    """How many dots are left; the results are those of XLA."""
    hlo = hlo_bytes(lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=result), *arguments)
    module = dot_to_multiply(split_short_contractions(simplified(import_module(hlo))))
    verify(module)
    for a, b in zip(run_module(module, arguments), run_on_xla(hlo, arguments), strict=True):
        assert_same(a, b, tolerance)
    return sum(i.opcode is Opcode.DOT for i in module.entry.instructions)


def drawn(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 100, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int32])
@pytest.mark.parametrize("name", SPLIT)
def test_batches_of_small_matrices_are_arithmetic(name: str, dtype: Any, rng: np.random.Generator) -> None:
    spec, lhs, rhs = SPLIT[name]
    tolerance = None if np.dtype(dtype).kind in "iu" else 4 * float(ml_dtypes.finfo(dtype).eps)
    with jax.enable_x64(True):
        assert dots(spec, None, drawn(lhs, dtype, rng), drawn(rhs, dtype, rng), tolerance=tolerance) == 0


@pytest.mark.parametrize("name", WHOLE)
def test_what_a_library_computes_sooner_stays(name: str, rng: np.random.Generator) -> None:
    spec, lhs, rhs = WHOLE[name]
    left = dots(spec, None, drawn(lhs, np.float32, rng), drawn(rhs, np.float32, rng), tolerance=1e-5)
    assert left == (name not in ("nothing to add up", "nothing"))


def test_strange_numbers_go_where_they_belong() -> None:
    x = np.ones((8, 2, 2), np.float32)
    x[0, 0, 0], x[1, 0, 1], x[2, 1, 0] = np.nan, np.inf, -np.inf
    y = np.ones((8, 2, 2), np.float32)
    y[1, 1, 1] = 0.0  # times infinity
    assert dots("bij,bjk->bik", None, x, y, tolerance=None) == 0
