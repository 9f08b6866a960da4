"""What a backend in a process of its own costs beside the same in this process: launches, transfers, programs.

Two processes, one for each, measure in turns; on an accelerator the programs are those of `jax_speed` there.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import report
from .dispatch import caller
from .jax_speed import Side
from .programs import Scale, programs

SIZE = 64 * 1024 * 1024
#: Seconds of one item's calls, at least, before the other process's turn.
_TURN = 0.03


def _repeated(call: Callable[[], Any]) -> Callable[[], float]:
    """Seconds of one call, of as many as take a turn."""

    def seconds() -> float:
        calls, began = 0, perf_counter()
        while calls == 0 or perf_counter() - began < _TURN:
            call()
            calls += 1
        return (perf_counter() - began) / calls

    return seconds


def _dispatched(call: Callable[[], jax.Array]) -> Callable[[], float]:
    """Seconds of one launch of 200, which are waited for afterwards."""

    def seconds() -> float:
        began = perf_counter()
        results = [call() for _ in range(200)]
        took = (perf_counter() - began) / len(results)
        jax.block_until_ready(results)
        return took

    return seconds


def _items(patterns: list[str]) -> dict[str, Callable[[], Callable[[], float]]]:
    """What makes each measurement, by its name and unit; a measurement returns seconds."""
    device = jax.devices("flagos")[0]
    host = np.random.default_rng(1).integers(0, 2**31, SIZE // 4, dtype=np.int32)
    target = np.zeros_like(host)

    def to_device() -> Callable[[], float]:
        return _repeated(lambda: jnp.array(host, copy=True, device=device).block_until_ready())

    def from_device() -> Callable[[], float]:
        there = jnp.array(host, copy=True, device=device)
        grown = jax.jit(lambda x: x + 1)

        def seconds() -> float:  # a new array each time: JAX keeps what it has read
            value = grown(there).block_until_ready()
            began = perf_counter()
            np.copyto(target, np.asarray(value))
            return perf_counter() - began

        return seconds

    items: dict[str, Callable[[], Callable[[], float]]] = {
        "launch, dispatched [µs]": lambda: _dispatched(caller("flagos", 1, wait=False)),
        "launch, waited for [µs]": lambda: _repeated(caller("flagos", 1, wait=True)),
        "launch of 16 arguments, dispatched [µs]": lambda: _dispatched(caller("flagos", 16, wait=False)),
        "64 MB to the device [ms]": to_device,
        "64 MB from the device [ms]": from_device,
    }
    for program in programs(Scale.HOST if device.device_kind == "cpu" else Scale.ACCELERATOR):
        if not any(fnmatch.fnmatch(program.name, pattern) for pattern in patterns):
            continue

        def measured(program: Any = program) -> Callable[[], float]:
            side = Side(program, program.function, device, program.arguments(np.random.default_rng(2)))
            calls = max(1, int(_TURN / max(side.seconds(1), 1e-6)))
            return lambda: side.seconds(calls)

        items[f"{program.name} [ms]"] = measured
    return items


def _serve(patterns: list[str]) -> int:
    """Measures what is asked for, by lines: a name makes it the one that is measured, an empty line measures it."""
    items = _items(patterns)
    print(json.dumps(list(items)), flush=True)
    seconds: Callable[[], float] | None = None
    for line in sys.stdin:
        name = line.strip()
        if name:
            seconds = items[name]()
            seconds()
        print(json.dumps(seconds() if seconds is not None else None), flush=True)
    return 0


class _Worker:
    """A process whose backend is in it, or in one of its own."""

    def __init__(self, mode: str, patterns: list[str]) -> None:
        command = [sys.executable, "-m", f"{__package__}.isolation", "--serve", ",".join(patterns)]
        environment = {**os.environ, "FLAGOS_ISOLATION": mode}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.items: list[str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a measuring process ended with {self._process.wait()}")
        return json.loads(line)

    def seconds(self, name: str = "") -> float:
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def _workers(patterns: list[str]) -> Iterator[tuple[_Worker, _Worker]]:
    mine, isolated = _Worker("none", patterns), _Worker("process", patterns)
    try:
        yield mine, isolated
    finally:
        mine.close()
        isolated.close()


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--programs", default="GPT-2*", help="names of jax_speed's, with *, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return _serve(options.serve.split(","))
    rows, ratios = [], []
    goals = {"64 MB": 1.1}
    with _workers(options.programs.split(",")) as (mine, isolated):
        for item in mine.items:
            name, _, unit = item.rstrip("]").rpartition(" [")
            mine.seconds(item)
            isolated.seconds(item)
            pairs = [(mine.seconds(), isolated.seconds()) for _ in range(options.rounds)]
            within, apart = (statistics.median(times) for times in zip(*pairs, strict=True))
            scale = 1e6 if unit == "µs" else 1e3
            goal = next((goals[start] for start in goals if name.startswith(start)), None)
            if unit == "ms" and goal is None:
                ratios.append(within / apart)
                goal = 1.03
            rows.append(report.Row(name, unit, 0.0, apart * scale, within * scale, goal))
            print(f"{name}: {within * scale:.4g} in the process, {apart * scale:.4g} {unit} isolated", flush=True)
    notes = (
        [f"programs: geometric mean of in-process over isolated {statistics.geometric_mean(ratios):.3f}"]
        if ratios
        else []
    )
    report.publish("isolation_cost", rows, options.save, notes, peer="in-process")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
