"""How long each step of a program takes, by a run that is recorded. For ``flagos bench --vs`` and ``flagos viz``."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from flagos_backend.cli import trace_file
from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.running import random_arguments, run_once
from flagos_backend.cli.session import compile_file
from flagos_backend.cli.trace import recording
from flagos_backend.importer.program import import_program


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step, by the number that explanations have for it too, its median, and what the roofline expects, in seconds.
    ``expected`` is 0 where that is unknown. ``source``: the line of the user's program, or ""."""

    number: int
    text: str
    source: str
    seconds: float
    expected: float


def step_times(path: Path, rounds: int, seed: int) -> tuple[StepTime, ...]:
    """The steps of the program of a file, on random arguments, as they first run. Recording takes a little time, too.

    Times are those of the host's work, so that of a program of an accelerator they say nothing. Raises CommandFailed
    for programs that cannot run so, and FlagosStatusError.
    """
    with tempfile.TemporaryDirectory(prefix="flagos-steps-") as folder:
        parts = Path(folder)
        with recording(parts), compile_file(path) as compiled, ExitStack() as stack:
            if len(compiled.executable.describe().devices) != 1:
                raise CommandFailed(f"{path} is a program for several devices; only those for one are measured")
            shapes = [parameter.shape for parameter in import_program(compiled.program).module.entry.parameters]
            arguments = random_arguments(compiled.executable, shapes, seed, stack)
            for _ in range(rounds):
                run_once(compiled.executable, arguments)
        return medians(trace_file.events_of(parts))


def medians(events: Iterable[trace_file.Event]) -> tuple[StepTime, ...]:
    """The steps of what was recorded, as they first ran."""
    times: dict[tuple[int, str, str], list[float]] = {}
    expected: dict[tuple[int, str, str], float] = {}
    for event in events:
        facts = event.get("args", {})
        if event["ph"] == "X" and event["cat"].partition(",")[0] == "step":
            key = facts.get("step", -1), event["name"], facts.get("source", "")
            times.setdefault(key, []).append(event["dur"] / 1e6)
            expected[key] = facts.get("expected_us", 0.0) / 1e6
    return tuple(StepTime(*key, statistics.median(taken), expected[key]) for key, taken in times.items())
