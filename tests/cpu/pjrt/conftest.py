"""The adapter over the built backend, in a process with four host devices."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["FLAGOS_NUM_CPU_DEVICES"] = "4"

import pytest

from cpu.pjrt.harness import Client
from plugin_abi import loader
from support.pjrt import FlagosTable, Pjrt

TABLES: list[FlagosTable] = []


@pytest.fixture(scope="session")
def api() -> Pjrt:
    return Pjrt()


@pytest.fixture(scope="session")
def backend() -> loader.Backend:
    result = loader.load()
    assert result.accepted is not None, result.refusals
    return result.accepted


@pytest.fixture(scope="session")
def client(api: Pjrt, backend: loader.Backend) -> Iterator[Client]:
    client = Client(api, backend.address)
    yield client
    client.close()


@pytest.fixture
def table(backend: loader.Backend) -> Iterator[FlagosTable]:
    """A function table of the test's own, whose slots it may replace. It stays: a client may outlive the test."""
    table = FlagosTable(backend.address)
    TABLES.append(table)
    yield table
    table.restore()
