"""A fresh seed for each run, from the shared generator."""

import numpy as np
import pytest


@pytest.fixture
def seed(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 31))
