"""How long a one-line JAX program takes in a fresh process, and what importing JAX or PyTorch costs beside flagos.

Processor time counts the whole process, its end included. What takes turns is summarised by its least time: other
processes only add.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from . import report

_FIRST_RESULT = "import jax; print(jax.jit(lambda x: x + 1)(1.0))"
_GOAL_SECONDS = 1.5
# Installed packages are announced in sys.path's folders: without flagos's announcements nobody knows of it.
_HIDE = (
    "import importlib.metadata as m; d = m.Distribution.discover.__func__; "
    "m.Distribution.discover = classmethod(lambda c, **k: (x for x in d(c, **k) if x.metadata['Name'] != 'flagos')); "
)


def seconds(code: str, variables: Mapping[str, str]) -> tuple[float, float]:
    """Processor and wall time of a process that runs ``code``."""
    environment = os.environ | dict(variables)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def least(cases: Sequence[tuple[str, Mapping[str, str]]], rounds: int) -> list[tuple[float, float]]:
    """The least processor and wall time of each case; the first round only fills caches."""
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    for number in range(rounds + 1):
        for kept, (code, variables) in zip(times, cases, strict=True):
            measured = seconds(code, variables)
            if number:
                kept.append(measured)
    return [(min(cpu for cpu, _ in kept), min(wall for _, wall in kept)) for kept in times]


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ours, peer = ({"JAX_PLATFORMS": platform} for platform in (options.device, "cpu"))
    platforms = [("import jax", peer), (_FIRST_RESULT, ours), (_FIRST_RESULT, peer)]
    (floor, floor_wall), (mine, mine_wall), (theirs, theirs_wall) = least(platforms, options.rounds)
    rows = [
        report.Row("first result, processor", "s", floor, mine, theirs, _GOAL_SECONDS / theirs),
        report.Row("first result, wall", "s", floor_wall, mine_wall, theirs_wall),
    ]
    for module in ("jax", "torch"):
        programs = (_HIDE, f"import {module}", f"{_HIDE}import {module}")
        (bare, _), (known, _), (hidden, _) = least([(program, {}) for program in programs], options.rounds)
        rows.append(report.Row(f"import {module}, processor", "s", bare, known, hidden, 1.03))
    report.publish("startup_host", rows, options.save, [f"goal of the first: {_GOAL_SECONDS} s"], "without")
    return 0


if __name__ == "__main__":
    sys.exit(main())
