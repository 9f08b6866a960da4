"""Library kernels in Triton's interpreter: before anything imports Triton, which then reads the variable.

The tools set it up, which are no part of the wheel: they come from the checkout, everything else from where it is
installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).resolve().parents[3]))


@pytest.fixture(scope="session")
def flag_gems():
    """FlagGems on host tensors. tools/test installs it; elsewhere it may be missing."""
    if importlib.util.find_spec("flag_gems") is None and os.environ.get("FLAGOS_TEST_INSTALLED") != "1":
        pytest.skip("FlagGems is not installed: pip install --no-deps flag_gems SQLAlchemy")
    from flagos_backend.kernels.flaggems.loading import load

    return load()


@pytest.fixture
def draw(rng):
    """Normal numbers of some dimensions."""
    import torch  # after the variable is set

    return lambda *dims, dtype=torch.float32: torch.from_numpy(rng.standard_normal(dims)).to(dtype)


@pytest.fixture
def index(rng):
    """Integers below a limit, of some dimensions."""
    import torch

    return lambda limit, *dims: torch.from_numpy(rng.integers(0, limit, dims))
