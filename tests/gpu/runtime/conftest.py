"""The backend library on this machine's first accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

# tests/conftest.py names the host for the suites that are meant for it.
os.environ["FLAGOS_DEVICE"] = (torch.accelerator.current_accelerator() or torch.device("cpu")).type
os.environ["FLAGOS_PREFER"] = "vendor"  # nothing is measured: these tests are not about kernels

import pytest

from plugin_abi import loader
from plugin_abi.host import Context, Memory


@pytest.fixture(scope="session")
def backend() -> loader.Backend:
    result = loader.load()
    assert result.accepted is not None, result.refusals
    return result.accepted


@pytest.fixture
def context(backend: loader.Backend) -> Iterator[Context]:
    with Context(backend) as context:
        yield context


@pytest.fixture
def memory(context: Context) -> Memory:
    return context.devices[0].default_memory
