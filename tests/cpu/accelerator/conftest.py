"""The path of an accelerator over host memory: two simulated devices, and Triton's interpreter for its kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["FLAGOS_DEVICE"] = "simulated"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "2"
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
os.environ["JAX_PLATFORMS"] = "flagos,cpu"

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
