"""Factorizations and other library-shaped operations of arrays without elements: JAX's own CPU is the oracle."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from support import empty_arrays

SAMPLE = 12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("scipy.linalg.lu", "float32"),
        ("svd", "bfloat16"),
        ("singular values", "float16"),
        *((name, "complex128") for name in empty_arrays.CASES),
    ],
)
def test_as_on_jaxs_cpu(name: str, dtype: str) -> None:
    function, shapes = empty_arrays.CASES[name]
    with jax.enable_x64(True):
        for shape in shapes:
            empty_arrays.check(function, shape, dtype)


def test_transformed(rng: np.random.Generator) -> None:
    cases = empty_arrays.transformed()
    with jax.enable_x64(True):
        for number in rng.choice(len(cases), SAMPLE, replace=False):
            case = cases[number]
            print(case)
            empty_arrays.check(case.function(), case.shape, case.dtype)
