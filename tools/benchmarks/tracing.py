"""What recording a trace costs: processor time of launches on the host, recorded and not, in turns in one process.

Two contexts hold the same program; one of them records. All threads of the process count, so that neighbours on a
loaded machine change little. Prints the least and the median of the rounds of each, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flagos_backend.cli import trace_file
from flagos_backend.cli.program_file import Form, program_of
from flagos_backend.cli.running import random_arguments, run_once
from flagos_backend.cli.session import open_context
from flagos_backend.cli.trace import recording
from flagos_backend.importer.program import import_program
from plugin_abi.host import Buffer, Executable


def add(x: jax.Array, w: jax.Array) -> jax.Array:
    """One short step."""
    return x[:8] + w[:8]


def chain(x: jax.Array, w: jax.Array) -> jax.Array:
    """Many short steps in a row: thirty products, each with a normalization."""
    for _ in range(30):
        x = jnp.tanh(x @ w)
        x = x / x.sum(axis=0)
    return x


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A few steps of some hundred microseconds."""
    scores = jax.nn.softmax(x @ w @ x.T)
    return jnp.tanh(scores @ x @ w)


PROGRAMS = ((add, 8, 2000), (chain, 16, 300), (layer, 256, 60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default: %(default)s)")
    options = parser.parse_args()
    print(f"{'program':10}{'off, least':>12}{'median':>12}{'on, least':>12}{'median':>12}{'on / off':>10}")
    for function, size, launches in PROGRAMS:
        off, on = measured(function, size, launches, options.rounds)
        row = "".join(
            f"{value * 1e6:9.1f} us" for times in (off, on) for value in (min(times), statistics.median(times))
        )
        print(f"{function.__name__:10}{row}{statistics.median(on) / statistics.median(off):10.3f}", flush=True)


def measured(
    function: Callable[..., jax.Array], size: int, launches: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of the processor for a launch in each round, not recorded and recorded."""
    arrays = [np.ones((size, size), np.float32)] * 2
    text = jax.jit(function).lower(*arrays).as_text(debug_info=True)
    program = program_of(text.encode(), Form.MLIR, "a program of this file")
    shapes = [parameter.shape for parameter in import_program(program).module.entry.parameters]
    with tempfile.TemporaryDirectory(prefix="flagos-tracing-") as folder:
        with ExitStack() as stack:
            prepared: list[tuple[Executable, list[Buffer]]] = []
            for records in (False, True):
                with ExitStack() as meanwhile:
                    if records:
                        meanwhile.enter_context(recording(Path(folder)))
                    executable = stack.enter_context(Executable.compile(stack.enter_context(open_context()), program))
                prepared.append((executable, list(random_arguments(executable, shapes, 0, stack))))
            times: tuple[list[float], list[float]] = [], []
            for turn in range(rounds + 1):
                for taken, (executable, arguments) in zip(times, prepared, strict=True):
                    began = time.process_time()
                    for _ in range(launches):
                        run_once(executable, arguments)
                    if turn:  # the first warms up
                        taken.append((time.process_time() - began) / launches)
        recorded = sum(e["ph"] == "X" and e["cat"].startswith("execute") for e in trace_file.events_of(Path(folder)))
        if recorded != launches * (rounds + 1):
            raise SystemExit(f"{recorded} launches were recorded where {launches * (rounds + 1)} ran")
    return times


if __name__ == "__main__":
    main()
