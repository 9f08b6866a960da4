"""torch.compile through the accepted backend; PyTorch eager is the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flagos_backend.frontends.torch import autoload
from flagos_backend.frontends.torch.compile import report


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    """The device is there before anything runs, as where it loads itself: autograd counts devices once."""
    reason = autoload.enable()
    assert not reason, reason


@pytest.fixture(autouse=True)
def fresh_compiler(rng: np.random.Generator) -> Iterator[None]:
    """Nothing compiled before, and PyTorch's random numbers from the run's seed."""
    torch._dynamo.reset()
    report.clear()
    torch.manual_seed(int(rng.integers(2**31)))
    yield
    torch._dynamo.reset()
