"""Runs test files of others with pytest, each in its own process, on the platform and, what fails, on the peer too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools.conformance.records import Record, ResultFile, Status
from tools.conformance.worker_pool import worker_command

# Variables of a Side: each STRIDE-th test only, from number OFFSET on.
STRIDE, OFFSET = "FLAGOS_CONFORMANCE_STRIDE", "FLAGOS_CONFORMANCE_OFFSET"
# A plugin's skip whose reason begins with this is of a test that says nothing of us, and not the suite's own.
NOT_APPLICABLE = "not applicable: "
_MAX_RESTARTS = 50
_REGULAR_ENDS = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


@dataclass(frozen=True)
class Side:
    """How files run on one side: the variables that choose it, and pytest's options."""

    environment: Mapping[str, str]
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Peer:
    """What a test must pass on to count. ``name``: the peer's name for one of our tests."""

    title: str
    side: Side
    name: Callable[[str], str] = field(default=lambda name: name)


def run_files(
    results: ResultFile, paths: Sequence[Path], side: Side, peer: Peer | None, *, only: str, timeout: float
) -> ResultFile:
    """Adds records of ``paths``, but those it has any of; tests that the peer fails too are not applicable."""
    for path in paths:
        if any(record.group == path.name for record in results.records.values()):
            continue
        print(path.name, file=sys.stderr, flush=True)
        records = _run_file(path, side, only, timeout)
        others: dict[str, Record] = {}
        failed = [r.name for r in records.values() if r.counts and r.status is not Status.PASSED]
        if failed and peer is not None:
            others = _run_file(path, peer.side, "", timeout, [peer.name(name) for name in failed])
        for test, record in records.items():
            other = others.get(peer.name(test)) if peer is not None else None
            if other is not None and peer is not None and other.status is not Status.PASSED:
                message = f"{peer.title}, {other.status}: {other.message}"[:500]
                record = Record(test, path.name, Status.NOT_APPLICABLE, message)
            results.add(record)
    return results


def _run_file(
    path: Path, side: Side, only: str, timeout: float, chosen: Sequence[str] | None = None
) -> dict[str, Record]:
    """Runs one file, or what is ``chosen`` of it; after a crash or a hang again without the tests that were seen."""
    records: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder:
        if chosen is not None:
            (Path(folder) / "chosen").write_text("\n".join(chosen))
        log = Path(folder) / "log"
        for _ in range(_MAX_RESTARTS):
            log.write_text("")
            (Path(folder) / "seen").write_text("\n".join(records))
            process = _start(path, side, only, folder)
            code, hung = _wait(process, log, timeout)
            current = None
            lines = log.read_text().splitlines()
            for line in lines:
                entry = json.loads(line)
                if "status" in entry:
                    records[entry["name"]] = Record(group=path.name, **{**entry, "status": Status(entry["status"])})
                    current = None
                else:
                    current = entry["name"]
            if code in _REGULAR_ENDS:
                break
            status = Status.HUNG if hung else Status.CRASHED
            name = current or f"{path.name}::between tests"
            records[name] = Record(name, path.name, status, f"pytest ended with {code}")
            if not lines:  # it did not come to the tests: an import failed or hung
                break
    return records


def _start(path: Path, side: Side, only: str, folder: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **side.environment,
        "FLAGOS_CONFORMANCE_FOLDER": folder,
    }
    command = [*worker_command("pytest"), "-q", "-p", "tools.conformance.pytest_log"]
    command += ["-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={path.parent}", *side.options, str(path)]
    command += ["-k", only] if only else []
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _wait(process: subprocess.Popen[bytes], log: Path, timeout: float) -> tuple[int, bool]:
    """The exit code, and whether the process was ended because its log did not grow for ``timeout`` seconds."""
    size = -1
    while True:
        try:
            return process.wait(timeout), False
        except subprocess.TimeoutExpired:
            grown = log.stat().st_size
            if grown == size:
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait(), True
            size = grown
