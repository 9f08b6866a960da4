"""The whole pipeline on the corpus: each program imported, planned, run, and compared with stock XLA."""

from __future__ import annotations

import os

import numpy as np
import pytest

from programs import PROGRAMS, run_on_xla
from support.against_xla import run_on_backend
from support.agreement import agrees, without_subnormals
from support.seeds import SEED_VARIABLE

SEEDS = {"fixed": 0, "fresh": int(os.environ[SEED_VARIABLE])}


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
