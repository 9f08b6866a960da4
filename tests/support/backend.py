"""Fixtures: the accepted backend, a context of its own for each test, and the default memory of its first device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plugin_abi import loader
from plugin_abi.host import Context, Memory

__all__ = ["backend", "context", "memory"]


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
    return context.addressable_devices[0].default_memory
