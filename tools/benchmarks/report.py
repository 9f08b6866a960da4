"""What every benchmark shares: the command line, alternating measurement, a report that says where it comes from."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Row:
    """One measured quantity. `floor` is what no implementation can beat here; `peer` is the framework itself."""

    name: str
    unit: str
    floor: float
    ours: float
    peer: float
    goal: float | None = None
    """Largest ratio that the project sets itself, if it sets one."""

    @property
    def ratio(self) -> float:
        """Ours over peer: below 1 is faster than the peer."""
        return self.ours / self.peer


@dataclass(frozen=True)
class Origin:
    """Where figures come from."""

    date: str
    command: str
    hardware: str
    versions: dict[str, str]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--device", default="flagos", help="the platform that is measured against cpu")
    result.add_argument("--save", action="store_true", help="write the result into tools/benchmarks/results")
    return result


def hardware() -> str:
    """Processor, cores and memory of this machine."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    models = {line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{', '.join(sorted(models)) or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def versions() -> dict[str, str]:
    """Versions of everything that takes part."""
    found = {"python": platform.python_version(), "glibc": platform.libc_ver()[1]}
    for name in ("jax", "jaxlib", "torch", "numpy", "flax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a benchmark that does not need it runs without
    import flagos_backend

    return found | {"flagos": flagos_backend.__version__}


def origin(name: str, device: str = "") -> Origin:
    """Where the figures of this process come from; ``device``: the accelerator's name, if one was measured."""
    command = shlex.join(["tools/bench", name, *(argument for argument in sys.argv[1:] if argument != "--save")])
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"{device}; {hardware()}" if device else hardware()
    return Origin(date, command, machine, versions())


def render(rows: Sequence[Row], source: Origin, notes: Sequence[str] = (), peer: str = "JAX CPU") -> str:
    """The rows as a table; notes and the rows' origin below."""
    width = max([36, *(len(f"{row.name} [{row.unit}]") + 2 for row in rows)])
    lines = [f"{'':{width}}{'floor':>12}{'ours':>12}{peer:>12}{'ratio':>8}{'goal':>7}"]
    for row in rows:
        goal = "" if row.goal is None else f"≤ {row.goal:g}"
        label = f"{row.name} [{row.unit}]"
        lines.append(f"{label:{width}}{row.floor:12.4g}{row.ours:12.4g}{row.peer:12.4g}{row.ratio:8.2f}{goal:>7}")
    lines += notes
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    return "\n".join(lines) + "\n"


def publish(
    name: str,
    rows: Sequence[Row],
    save: bool,
    notes: Sequence[str] = (),
    peer: str = "JAX CPU",
    device: str = "",
) -> None:
    """Prints the report; with `save`, also writes NAME.txt and NAME.json. `device`: as of origin."""
    source = origin(name.removesuffix("_accelerator"), device)
    text = render(rows, source, notes, peer)
    print(text, end="")
    if save:
        measured = [asdict(row) | {"ratio": row.ratio} for row in rows]
        keep(name, text, asdict(source) | {"rows": measured, "notes": list(notes)})


def keep(name: str, text: str, content: dict[str, Any]) -> None:
    """Writes NAME.txt and NAME.json into the committed results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(text, encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def alternate(
    functions: Sequence[Callable[[], object]],
    rounds: int,
    calls: int = 1,
    summary: Callable[[Sequence[float]], float] = statistics.median,
) -> list[float]:
    """Seconds of one call of each function: the median of the rounds, or another summary of them.

    The functions take turns, so that a machine that slows down slows all of them down.
    """
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for function, measured in zip(functions, times, strict=True):
                began = time.perf_counter()
                for _ in range(calls):
                    function()
                measured.append((time.perf_counter() - began) / calls)
    finally:
        gc.enable()
    return [summary(measured) for measured in times]
