"""What the backend says of the native programs that it makes in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def emitted(caplog: pytest.LogCaptureFixture) -> Callable[[str], str]:
    """The line about the module of a name; StopIteration where it has no native program."""
    caplog.set_level(logging.DEBUG, "flagos_backend")

    def line(name: str) -> str:
        return next(m for m in map(logging.LogRecord.getMessage, caplog.records) if m.startswith(f"emitted {name}:"))

    return line
