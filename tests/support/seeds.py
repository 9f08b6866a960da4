"""The seed of a run, and the random numbers that are drawn from it."""

from __future__ import annotations

import os

import numpy as np

SEED_VARIABLE = "FLAGOS_TEST_SEED"


def fresh(name: str) -> np.random.Generator:
    """Random numbers of `name`, different in each run, repeatable through the seed in the report header."""
    return np.random.default_rng([int(os.environ[SEED_VARIABLE]), *name.encode()])
