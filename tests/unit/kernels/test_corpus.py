"""The whole pipeline on the corpus: each program imported, planned, run, and compared with stock XLA."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from conftest import SEED_VARIABLE
from programs import PROGRAMS, run_on_xla
from support.against_xla import run_on_backend
from support.numbers import distance

SEEDS = {"fixed": 0, "fresh": int(os.environ[SEED_VARIABLE])}
# What sums in another order may be off by, relative to the greatest element of the result, by bytes of an element.
RELATIVE = {1: 0.1, 2: 2e-2, 4: 2e-5, 8: 1e-11, 16: 1e-11}
ULP = 64


def without_subnormals(argument: np.ndarray) -> np.ndarray:
    """Zero for what is subnormal in float32: stock XLA reads such numbers as zero on the CPU, and we do not."""
    if argument.dtype.kind == "c":
        result = argument.copy()
        result.real, result.imag = without_subnormals(argument.real), without_subnormals(argument.imag)
        return result
    if (argument.dtype.kind != "f" and argument.dtype != ml_dtypes.bfloat16) or argument.dtype.itemsize < 2:
        return argument
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(argument.astype(np.float64)) < 1e-37, np.zeros_like(argument), argument)


def agrees(ours: np.ndarray, theirs: np.ndarray, exact: bool) -> np.ndarray:
    """Which elements are close enough; of integers and PRED, which are equal."""
    off = distance(ours, theirs)
    if exact or ours.dtype.kind in "biu":
        return off == 0
    wide = np.complex128 if ours.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        a, b = ours.astype(wide), theirs.astype(wide)
        finite = np.abs(b[np.isfinite(b)])
        scale = max(finite.max(initial=0.0), 1.0)  # a result may be nothing but the rounding of larger numbers
        return (off <= ULP) | (np.abs(a - b) <= RELATIVE[ours.real.dtype.itemsize] * scale)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, seed: str) -> None:
    program = PROGRAMS[name]
    arguments = [without_subnormals(np.asarray(a)) for a in program.arguments(SEEDS[seed])]
    ours = run_on_backend(program.hlo("flagos"), arguments)
    theirs = run_on_xla(program.hlo("cpu"), arguments)
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.size == 0:
            continue
        good = agrees(a, b, program.exact)
        places = np.argwhere(~good)
        assert not places.size, (
            f"output {number} at {places[0]}: {a[~good][0]}, XLA {b[~good][0]}; {len(places)} differ"
        )
