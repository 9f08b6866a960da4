"""Pytest plugin: logs each test's start and outcome as a JSON line, and runs none that a former run has seen.

The folder given has the files seen, chosen (when it exists, nothing else is run) and log. What JAX's tests keep for its
CPU runs on the platform too: the CPU is what it is measured by."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.conformance.pytest_files import NOT_APPLICABLE, OFFSET, STRIDE

_FOLDER = Path(os.environ["FLAGOS_CONFORMANCE_FOLDER"])


def _write(entry: dict[str, object]) -> None:
    with (_FOLDER / "log").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen = set((_FOLDER / "seen").read_text().splitlines())
    if (_FOLDER / "chosen").exists():
        chosen = set((_FOLDER / "chosen").read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in chosen]
    else:
        items[:] = items[int(os.environ.get(OFFSET, "0")) :: int(os.environ.get(STRIDE, "1"))]
    items[:] = [item for item in items if item.nodeid not in seen]
    _count_as_cpu()


def _count_as_cpu() -> None:
    """JAX's tests name the devices they run on, and they know nothing of a platform that comes as a plugin."""
    test_util: Any = sys.modules.get("jax._src.test_util")
    if test_util is not None:
        tags = test_util._get_device_tags
        test_util._get_device_tags = lambda: tags() | {"cpu"}


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"name": nodeid})


_outcomes: dict[str, tuple[str, str, float]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    status, message, seconds = _outcomes.get(report.nodeid, ("passed", "", 0.0))
    if report.failed:
        status, message = "failed", _last_line(report)
    elif report.skipped and status == "passed":
        status, message = "skipped", str(report.longrepr)[-300:]
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if NOT_APPLICABLE in reason:
            status, message = "not applicable", reason.partition(NOT_APPLICABLE)[2]
    _outcomes[report.nodeid] = (status, message, seconds + report.duration)


def pytest_runtest_logfinish(nodeid: str) -> None:
    status, message, seconds = _outcomes.pop(nodeid, ("failed", "no report", 0.0))
    _write({"name": nodeid, "status": status, "message": message, "seconds": round(seconds, 3)})


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash is not None else str(report.longrepr))[:1500]
