"""FLAGOS_DEBUG and the loggers of the backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from flagos_backend.process import logs
logs.follow(sys.argv[1])
logger = logging.getLogger("flagos_backend")
for level in (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG):
    logger.log(level, logging.getLevelName(level))
"""
BY_PYTHON = ["ERROR", "WARNING"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("1", ["ERROR", "WARNING"]),
        ("2", ["ERROR", "WARNING", "INFO"]),
        ("3", ["ERROR", "WARNING", "INFO", "DEBUG"]),
        ("4", ["ERROR", "WARNING", "INFO", "DEBUG"]),
    ],
)
def test_a_number_shows_lines_up_to_a_level(value: str, shown: list[str]) -> None:
    assert written(value) == [f"flagos backend: {name}" for name in shown]


@pytest.mark.parametrize("value", ["", "0", "-1", "info"])
def test_anything_else_leaves_them_to_pythons_logging(value: str) -> None:
    assert written(value) == BY_PYTHON


def written(value: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, value], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()
