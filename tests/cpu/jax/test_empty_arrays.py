"""Factorizations and other library-shaped operations of arrays without elements: JAX's own CPU is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import pytest
from jax import lax

TALL_AND_WIDE = [(3, 0), (0, 3), (0, 3, 2)]
SQUARE = [(0, 0), (0, 3, 3)]
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "lu": (lax.linalg.lu, TALL_AND_WIDE),
    "scipy.linalg.lu": (jax.scipy.linalg.lu, TALL_AND_WIDE),
    "qr": (lambda a: lax.linalg.qr(a, full_matrices=False), TALL_AND_WIDE),
    "full qr": (lambda a: lax.linalg.qr(a, full_matrices=True), TALL_AND_WIDE),
    "svd": (lax.linalg.svd, TALL_AND_WIDE),
    "singular values": (lambda a: lax.linalg.svd(a, compute_uv=False), TALL_AND_WIDE),
    "cholesky": (lax.linalg.cholesky, SQUARE),
    "eigh": (lax.linalg.eigh, SQUARE),
    "eig": (lax.linalg.eig, SQUARE),
    "schur": (lax.linalg.schur, SQUARE),
    "hessenberg": (lax.linalg.hessenberg, SQUARE),
    "solve": (lambda a: jnp.linalg.solve(a, a), SQUARE),
    "determinant": (jnp.linalg.det, SQUARE),
    "fft": (jnp.fft.fft2, [(0, 3), (2, 0, 4)]),
    "sort": (lambda a: lax.sort(a, dimension=0), TALL_AND_WIDE),
    "cumulative sum": (lambda a: lax.cumsum(a, 0), TALL_AND_WIDE),
    "product": (lambda a: jnp.einsum("...ij,...kj->...ik", a, a), TALL_AND_WIDE),
    "update": (lambda a: a.at[np.zeros(0, np.int32)].add(1), TALL_AND_WIDE),
}


@pytest.mark.parametrize(("name", "dtype"), [("scipy.linalg.lu", "float32"), *((name, "complex128") for name in CASES)])
def test_as_on_jaxs_cpu(name: str, dtype: str) -> None:
    function, shapes = CASES[name]
    with jax.enable_x64(True):
        for shape in shapes:
            results = []
            for platform in ("flagos", "cpu"):
                array = jax.device_put(np.zeros(shape, dtype), jax.devices(platform)[0])
                try:
                    results.append(jax.tree.map(np.asarray, jax.tree.leaves(jax.jit(function)(array))))
                except Exception as error:
                    assert "INTERNAL" not in str(error), f"{platform}: {error}"
                    results.append(type(error))
            ours, expected = results
            if isinstance(expected, type):
                assert ours is expected, shape
                continue
            for x, y in zip(ours, expected, strict=True):
                assert (x.shape, x.dtype) == (y.shape, y.dtype)
                np.testing.assert_array_equal(x, y, err_msg=str(shape))
