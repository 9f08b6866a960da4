"""Fusible operations, eager and through the accepted backend; PyTorch in float64 is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flagos_backend.frontends.torch import autoload
from support.processes import outcomes_fixture

outcomes = outcomes_fixture(Path(__file__).parent, 2)


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    reason = autoload.enable()
    assert not reason, reason


@pytest.fixture(autouse=True)
def fresh_compiler(rng: np.random.Generator) -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(int(rng.integers(2**31)))
    yield
    torch._dynamo.reset()
