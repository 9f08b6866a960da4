"""Dots of which nothing is left but sums, against stock XLA on the program as it was, and against float64."""

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
from flagos_backend.passes.dot_to_reduce import dot_to_reduce
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, run_module
from support.passes import simplified

SPECS = {
    "vectors": ("i,i->", (70,)),
    "matrices": ("ij,ij->", (7, 11)),
    "rows": ("bd,bd->b", (5, 60)),
    "columns": ("db,db->b", (60, 5)),
    "between": ("bdc,bdc->bc", (3, 20, 4)),
    "batches in another order": ("bcd,bcd->cb", (3, 4, 20)),
    "rows as matrices": ("bid,bdj->bij", (5, 1, 60), (5, 60, 1)),
    "a row and a column": ("id,dj->ij", (1, 60), (60, 1)),
    "free of one, elsewhere": ("dbi,jdb->bij", (60, 5, 1), (1, 60, 5)),
    "nothing": ("i,i->", (0,)),
    "of nothing": ("bd,bd->b", (0, 5)),
}
TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32]


def dots(spec: str, result: Any, *arguments: np.ndarray, tolerance: float | None = None) -> int:
    """How many dots are left; the results are those of XLA."""
    hlo = hlo_bytes(lambda x, y: jnp.einsum(spec, x, y, preferred_element_type=result), *arguments)
    module = dot_to_reduce(simplified(import_module(hlo)))
    verify(module)
    for a, b in zip(run_module(module, arguments), run_on_xla(hlo, arguments), strict=True):
        assert_same(a, b, tolerance)
    return sum(i.opcode is Opcode.DOT for i in module.entry.instructions)


def drawn(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Of floats, sums are exact, in whichever order."""
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 256, shape).astype(dtype)
    return rng.integers(-3, 4, shape).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", SPECS)
def test_a_dot_with_nothing_free(name: str, dtype: Any, rng: np.random.Generator) -> None:
    spec, lhs, *others = SPECS[name]
    (rhs,) = others or [lhs]
    with jax.enable_x64(True):
        assert dots(spec, None, drawn(lhs, dtype, rng), drawn(rhs, dtype, rng)) == 0


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        *((ml_dtypes.bfloat16, np.float32), (np.float16, np.float32), (np.float32, np.float64)),
        *((np.int8, np.int32), (np.uint8, np.int32), (np.uint8, np.uint16), (np.int32, np.uint32)),
    ],
    ids=lambda d: np.dtype(d).name,
)
def test_another_type_of_result(given: Any, wanted: Any, rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        assert dots("bi,bi->b", wanted, drawn((4, 50), given, rng), drawn((4, 50), given, rng)) == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
def test_half_floats_are_rounded_once(dtype: Any, rng: np.random.Generator) -> None:
    x, y = (rng.uniform(0.5, 2, (40, 500)).astype(dtype) for _ in range(2))
    module = dot_to_reduce(simplified(import_module(hlo_bytes(lambda x, y: jnp.einsum("bd,bd->b", x, y), x, y))))
    exact = (x.astype(np.float64) * y.astype(np.float64)).sum(1)
    (ours,) = run_module(module, [x, y])
    # Of a sum in float32 of positive products, each addition off by half a unit: near a tie, either rounding.
    off = x.shape[1] * 2.0**-24 * exact
    assert ((exact - off).astype(dtype) <= ours).all()
    assert (ours <= (exact + off).astype(dtype)).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_special_numbers(number: float, rng: np.random.Generator) -> None:
    x, y = (drawn((4, 9), np.float32, rng) for _ in range(2))
    x[1, 2], y[2, 3], x[3, 4], y[3, 4] = number, number, number, 0
    assert dots("bi,bi->b", None, x, y) == 0


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs", "dtype"),
    [
        pytest.param("ij,ji->", (7, 7), (7, 7), np.float32, id="another order"),
        pytest.param("bi,ib->b", (5, 6), (6, 5), np.float32, id="another order of batches"),
        pytest.param("ij,j->i", (5, 6), (6,), np.float32, id="a matrix and a vector"),
        pytest.param("i,j->ij", (5,), (6,), np.float32, id="nothing added up"),
        pytest.param("i,i->", (5,), (5,), np.complex64, id="complex numbers"),
    ],
)
def test_dots_that_stay(spec: str, lhs: Any, rhs: Any, dtype: Any, rng: np.random.Generator) -> None:
    assert dots(spec, None, drawn(lhs, dtype, rng), drawn(rhs, dtype, rng)) == 1
