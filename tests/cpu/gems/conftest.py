"""FlagGems for eager programs, on the simulated device in Triton's interpreter, or on the accelerator that
FLAGOS_TEST_DEVICE names; the oracle is float64 PyTorch."""

from __future__ import annotations

import os

os.environ["FLAGOS_DEVICE"] = os.environ.get("FLAGOS_TEST_DEVICE", "simulated")
os.environ["FLAGOS_PREFER"] = "flagos"
os.environ["TRITON_INTERPRET"] = str(int(os.environ["FLAGOS_DEVICE"] == "simulated"))  # read when Triton is imported

import importlib.util

import pytest
import torch

from flagos_backend.torch import autoload

IS_SIMULATED = os.environ["FLAGOS_DEVICE"] == "simulated"
if IS_SIMULATED:
    assert autoload.enable() == ""


@pytest.fixture(autouse=True)
def flag_gems() -> None:
    """tools/test installs it; elsewhere it may be missing."""
    if importlib.util.find_spec("flag_gems") is None and os.environ.get("FLAGOS_TEST_INSTALLED") != "1":
        pytest.skip("FlagGems is not installed: pip install --no-deps flag_gems SQLAlchemy")


@pytest.fixture
def device() -> torch.device:
    return torch.device("flagos" if IS_SIMULATED else os.environ["FLAGOS_DEVICE"], 0)
