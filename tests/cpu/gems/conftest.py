"""FlagGems for eager programs on the simulated device, in Triton's interpreter; the oracle is float64 PyTorch."""

from __future__ import annotations

import os

os.environ["FLAGOS_DEVICE"] = "simulated"
os.environ["FLAGOS_PREFER"] = "flagos"
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import importlib.util

import pytest
import torch

from flagos_backend.torch import autoload

assert autoload.enable() == ""


@pytest.fixture(autouse=True)
def flag_gems() -> None:
    """tools/test installs it; elsewhere it may be missing."""
    if importlib.util.find_spec("flag_gems") is None and os.environ.get("FLAGOS_TEST_INSTALLED") != "1":
        pytest.skip("FlagGems is not installed: pip install --no-deps flag_gems SQLAlchemy")


@pytest.fixture
def device() -> torch.device:
    return torch.device("flagos", 0)
