"""Products of integer matrices on the host with each level of instruction sets, past the edges of every block, against
NumPy's: exact, and modulo 2^32."""

from __future__ import annotations

import numpy as np
import pytest

from support.instruction_sets import run_without

PROGRAM = """
import sys
import jax, numpy as np
import flagos_backend.frontends.jax
flagos_backend.frontends.jax.initialize()
rng = np.random.default_rng(int(sys.argv[1]))
sizes = [(1, 1, 1), (1, 1100, 67), (67, 1100, 1), (3, 5, 7), (7, 2052, 64), (40, 513, 70), (257, 90, 530), (33, 64, 17)]

def integers(name, *shape):
    info = np.iinfo(name)
    values = rng.integers(info.min, info.max, shape, name, endpoint=True)
    return np.where(rng.random(shape) < 0.3, rng.choice([info.min, info.max], shape), values).astype(name)

def dot(a, b):
    return jax.lax.dot(a, b, preferred_element_type=np.int32)

for pair in ("int8", "int8"), ("uint8", "uint8"), ("int16", "int16"), ("int32", "int32"), ("uint8", "int8"):
    for m, k, n in sizes:
        a, b = integers(pair[0], m, k), integers(pair[1], k, n)
        exact = a.astype(np.int64) @ b.astype(np.int64)
        for transposed in False, True:
            by_columns = jax.jit((lambda a, b: dot(a.T, b)) if transposed else dot)
            by_rows = jax.jit((lambda a, b: dot(a.T, b.T)) if transposed else lambda a, b: dot(a, b.T))
            left = a.T.copy() if transposed else a
            for product in by_columns(left, b), by_rows(left, b.T.copy()):
                np.testing.assert_array_equal(product, exact.astype(np.int32), str((pair, m, k, n, transposed)))
print(jax.default_backend())
"""


@pytest.mark.parametrize("without", ["", "-AVX512_VNNI", "-AVX512F", "-AVX512F,-AVX2"])
def test_products_of_integers(without: str, rng: np.random.Generator) -> None:
    run_without(without, PROGRAM, rng)
