"""Arrays without elements on an accelerator: JAX's own CPU is the oracle."""

from __future__ import annotations

import jax
import numpy as np

import flagos_backend.frontends.jax
from support import empty_arrays

flagos_backend.frontends.jax.initialize()

SAMPLE = 8


def test_library_shaped_operations(rng: np.random.Generator) -> None:
    names = list(empty_arrays.CASES)
    with jax.enable_x64(True):
        for name in rng.choice(names, SAMPLE, replace=False):
            function, shapes = empty_arrays.CASES[name]
            print(name)
            empty_arrays.check(function, shapes[rng.integers(len(shapes))], "complex64")


def test_transformed(rng: np.random.Generator) -> None:
    cases = empty_arrays.transformed()
    with jax.enable_x64(True):
        for number in rng.choice(len(cases), SAMPLE, replace=False):
            case = cases[number]
            print(case)
            empty_arrays.check(case.function(), case.shape, case.dtype)
