"""The PyTorch device flagos; PyTorch on the host is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.frontends.torch import autoload

assert autoload.enable() == ""
DEVICE = torch.device("flagos", 0)


@pytest.fixture(autouse=True)
def fresh_random_numbers(rng: np.random.Generator) -> None:
    """PyTorch's random numbers from the run's seed."""
    torch.manual_seed(int(rng.integers(2**31)))


@pytest.fixture
def device() -> torch.device:
    return DEVICE
