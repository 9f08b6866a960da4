"""Cholesky, LU and triangular solves on the host with each level of instruction sets, past the edges of every block,
judged by what defines them."""

from __future__ import annotations

import numpy as np
import pytest

from support.instruction_sets import run_without

PROGRAM = """
import sys
import jax, numpy as np
import flagos_backend.frontends.jax
flagos_backend.frontends.jax.initialize()
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(int(sys.argv[1]))

def judge(a, b, expected, dtype):
    bound = 4 * (a.shape[1] + 8) * np.finfo(dtype).eps * (abs(a) @ abs(b) + abs(expected))
    assert (abs(a @ b - expected) <= bound).all(), (dtype, expected.shape)

for dtype in "float32", "float64", "complex64", "complex128":
    wide = np.promote_types(dtype, np.float64)
    for n in 5, 16, 23, 40, 150:
        a = rng.standard_normal((n, n)) + (1j * rng.standard_normal((n, n)) if wide.kind == "c" else 0)
        a = a.astype(dtype)
        definite = (a @ a.conj().T / n + np.eye(n)).astype(dtype)
        l = np.asarray(jax.jit(jax.lax.linalg.cholesky)(definite)).astype(wide)
        judge(l, l.conj().T, definite, dtype)
        lu, _, order = (np.asarray(x) for x in jax.jit(jax.lax.linalg.lu)(a))
        lu = lu.astype(wide)
        judge(np.tril(lu, -1) + np.eye(n), np.triu(lu), a[order], dtype)
        triangle = np.tril((a / n + 2 * np.eye(n)).astype(dtype))
        for count in 3, 21, 100:
            b = rng.standard_normal((n, count)).astype(dtype)
            x = jax.jit(lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True))(triangle, b)
            judge(triangle.astype(wide), np.asarray(x).astype(wide), b, dtype)
print(jax.default_backend())
"""


@pytest.mark.parametrize("without", ["", "-AVX512F", "-AVX512F,-AVX2"])
def test_factorisations(without: str, rng: np.random.Generator) -> None:
    run_without(without, PROGRAM, rng)
