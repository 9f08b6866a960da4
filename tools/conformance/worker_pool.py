"""Runs tests in worker processes, each of which is started again after a crash or a hang."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.conformance.records import Record, Status

_CHECKOUT = str(Path(__file__).resolve().parents[2])
# How many threads torch and flagos compute with on the host.
_THREADS = "OMP_NUM_THREADS"


def worker_command(module: str, *arguments: str) -> list[str]:
    """Runs a module of the tools as a program. The checkout comes last on its path, so that an installed flagos is what
    is measured, and the source tree only where nothing is installed."""
    program = (
        f"import runpy, sys; sys.path.append({_CHECKOUT!r}); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", program, *arguments]


def run_in_workers(
    command: Sequence[str],
    names: Sequence[str],
    groups: Sequence[str],
    *,
    timeout: float,
    environment: Mapping[str, str],
    workers: int = 1,
) -> Iterator[Record]:
    """One record for each of ``names``: as they come, which is in order where there is one worker.

    A worker reads a name a line and answers each with one JSON line {status, message, seconds}, and "last" where it
    takes no more; whatever else it prints goes to its standard error. No answer within ``timeout`` seconds is a hang.
    Several workers share the cores.
    """
    if workers > 1 and _THREADS not in os.environ:
        environment = {_THREADS: str(max(1, (os.cpu_count() or 1) // workers)), **environment}
    tests: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for test in zip(names, groups, strict=True):
        tests.put(test)
    records: queue.SimpleQueue[Record | Exception | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for record in _answers(command, tests, timeout, environment):
                records.put(record)
        except Exception as error:
            records.put(error)
        records.put(None)

    running = min(workers, len(names))
    print(f"{len(names)} tests, worker processes: {running}", file=sys.stderr, flush=True)
    for _ in range(running):
        # A run that is interrupted waits for none of them: without it they have no more to read, and end.
        threading.Thread(target=work, daemon=True).start()
    try:
        while running:
            match records.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case record:
                    yield record
    finally:
        _empty(tests)


def _empty(tests: queue.SimpleQueue[tuple[str, str]]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            tests.get_nowait()


def _answers(
    command: Sequence[str],
    tests: queue.SimpleQueue[tuple[str, str]],
    timeout: float,
    environment: Mapping[str, str],
) -> Iterator[Record]:
    """The records of one worker, and of those that take its place, until no test is left."""
    worker: Worker | None = None
    with contextlib.suppress(queue.Empty):
        while True:
            name, group = tests.get_nowait()
            if worker is None:
                worker = Worker(command, environment)
            answer = worker.ask(name, timeout)
            if answer is None:
                status, message = worker.post_mortem()
                worker = None
                yield Record(name, group, status, message)
                continue
            if answer.get("last"):
                worker.close()
                worker = None
            yield Record(name, group, Status(answer["status"]), answer["message"], answer["seconds"])
    if worker is not None:
        worker.close()


class Worker:
    """A child process that answers each line with a line of JSON."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="flagos-conformance-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._buffer = b""
        self._timed_out = False

    def ask(self, name: str, timeout: float) -> dict[str, Any] | None:
        """The answer to a line; None when it crashed or did not answer in ``timeout`` seconds: see post_mortem."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(name.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._read_line(timeout)
        return None if line is None else json.loads(line)

    def _read_line(self, timeout: float) -> bytes | None:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._timed_out = True
                    return None
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return None
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def post_mortem(self, length: int = 2000) -> tuple[Status, str]:
        """Ends the worker and says how it died, with the last ``length`` characters of what it wrote."""
        if self._timed_out:
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        tail = self._log.read_text(errors="replace")[-length:]
        self._log.unlink(missing_ok=True)
        if self._timed_out:
            return Status.HUNG, f"no answer in time\n{tail}"
        name = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return Status.CRASHED, f"{name}\n{tail}"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.unlink(missing_ok=True)
