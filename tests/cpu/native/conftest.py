"""The backend library through its table, in a process with three host devices."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["FLAGOS_NUM_CPU_DEVICES"] = "3"

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
