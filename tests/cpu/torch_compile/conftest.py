"""torch.compile through the accepted backend; PyTorch eager is the oracle. Tensors are the host's, or those of the
accelerator that FLAGOS_TEST_DEVICE names."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flagos_backend.frontends.torch import autoload
from flagos_backend.frontends.torch.compile import report

#: PyTorch's own device of an accelerator, or none.
ACCELERATOR = {"cpu": None, "simulated": None}.get(os.environ["FLAGOS_DEVICE"], os.environ["FLAGOS_DEVICE"])


@pytest.fixture(autouse=True, scope="session")
def device() -> Iterator[None]:
    """The device is there before anything runs, as where it loads itself: autograd counts devices once."""
    if ACCELERATOR is None:
        reason = autoload.enable()
        assert not reason, reason
    torch.set_default_device(ACCELERATOR)
    yield
    torch.set_default_device(None)


@pytest.fixture(params=["cpu", "flagos"] if ACCELERATOR is None else [ACCELERATOR])
def place(request: pytest.FixtureRequest) -> str:
    """Where the test's tensors are."""
    return str(request.param)


@pytest.fixture(autouse=True)
def fresh_compiler(rng: np.random.Generator) -> Iterator[None]:
    """Nothing compiled before, and PyTorch's random numbers from the run's seed."""
    torch._dynamo.reset()
    report.clear()
    torch.manual_seed(int(rng.integers(2**31)))
    yield
    torch._dynamo.reset()
