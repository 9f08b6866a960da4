"""What FLAGOS_TEST_ISOLATION=process leaves out: tests/not_isolated.txt."""

from __future__ import annotations

import functools
import os
from pathlib import Path

FILE = Path(__file__).parents[1] / "not_isolated.txt"


def entries() -> dict[str, str]:
    """The cause of each, by "tests/FOLDER/FILE.py::TEST" or "...::TEST[PARAMETERS]"."""
    lines = [line for line in FILE.read_text().splitlines() if line and not line.startswith("#")]
    causes = {}
    for line in lines:
        name, cause = line.split("  ", 1)
        causes[name] = cause
    return causes


@functools.cache
def _left_out() -> dict[str, str]:
    return entries() if os.environ.get("FLAGOS_TEST_ISOLATION") == "process" else {}


def cause_of(file: Path, test: str) -> str | None:
    """Why a test of `file`, a path within tests/, is left out of this run; None: it is not."""
    name = f"tests/{file}::{test}"
    return _left_out().get(name, _left_out().get(name.partition("[")[0]))
