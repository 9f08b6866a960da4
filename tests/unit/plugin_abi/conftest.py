"""Fixtures of the host side's tests: a compiler with a cache, and a place for plugins that tells whether they ran."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugin_abi.log import logger
from unit.plugin_abi.plugins import MARKER_VARIABLE, Plugins, Toolchain


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    return Toolchain(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def plugins(toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    plugins = Plugins(toolchain, tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv(MARKER_VARIABLE, str(plugins.marker))
    return plugins


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the loader logs, from WARNING up."""
    caplog.set_level(logging.WARNING, logger=logger.name)
    return caplog
