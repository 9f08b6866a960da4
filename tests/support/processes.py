"""Starts one script in several processes that know of each other, as a launcher of distributed programs does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

TESTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Outcomes:
    """``failures[rank]``: for each check that a process made, "" or what went wrong; ``output``: what it wrote."""

    failures: list[dict[str, str]]
    output: list[str]

    def expect(self, check: str, ranks: int) -> None:
        """Fails unless the check passed on every process."""
        for rank in range(ranks):
            failure = self.failures[rank].get(check, "it was not made")
            if failure:
                pytest.fail(f"process {rank}: {failure}\n--- its output:\n{self.output[rank][-4000:]}")


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this host that nobody else is given meanwhile. Who opens it says SO_REUSEPORT, as gRPC does."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run_processes(script: Path, count: int, folder: Path, timeout: float) -> Outcomes:
    """Runs ``script`` as ranks 0 to count - 1, all of them ended after ``timeout`` seconds. Its checks come from
    ``make_checks``. They meet where COORDINATOR says (JAX), or by RENDEZVOUS (torch.distributed's ``init_method``)."""
    with reserved_port() as port:
        started = [_start(script, rank, count, port, folder) for rank in range(count)]
        deadline = time.monotonic() + timeout
        try:
            for process in started:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in started:
                process.kill()
                process.wait()
    return Outcomes(
        [_failures(folder / f"{rank}.jsonl") for rank in range(count)],
        [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(count)],
    )


def _start(script: Path, rank: int, count: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "COORDINATOR": f"127.0.0.1:{port}",
        "RENDEZVOUS": (folder / "rendezvous").as_uri(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])),
    }
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, str(script), str(folder)], env=environment, stdout=log, stderr=log)


def _failures(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(json.loads(line) for line in lines)


def outcomes_fixture(folder: Path, count: int, timeout: float = 240, prefix: str = "") -> Any:
    """The fixture ``outcomes`` of a folder of tests: ``worker.py`` of the folder, run once in ``count`` processes. Both
    names begin with ``prefix``."""

    @pytest.fixture(scope="session", name=f"{prefix}outcomes")
    def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
        return run_processes(folder / f"{prefix}worker.py", count, tmp_path_factory.mktemp("processes"), timeout)

    return outcomes


def make_checks(checks: Sequence[Callable[[], None]]) -> NoReturn:
    """In a process of ``run_processes``: makes the checks in order, or those that FLAGOS_TEST_CHECKS names, notes each
    outcome at once, and ends the process, whatever threads still wait for others."""
    chosen = os.environ.get("FLAGOS_TEST_CHECKS", "").split()
    with (Path(sys.argv[1]) / f"{os.environ['RANK']}.jsonl").open("w") as file:
        for check in checks:
            name = check.__name__
            if chosen and name not in chosen:
                continue
            begin = time.monotonic()
            try:
                check()
                failure = ""
            except Exception:
                failure = traceback.format_exc()
            file.write(json.dumps([name, failure]) + "\n")
            file.flush()
            print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)


def expect_error(call: Callable[[], Any], *patterns: str) -> None:
    """Fails unless ``call`` raises a RuntimeError in whose message every pattern is found."""
    try:
        call()
    except RuntimeError as error:
        for pattern in patterns:
            assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError("there was no error")
