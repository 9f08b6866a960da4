"""How long an accelerator's program takes until it ran once, in fresh processes: with empty caches, and with what the
process before left there."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from . import report
from .programs import Program, Scale, programs

UNTUNED = {"FLAGOS_AUTOTUNE_SECONDS": "0"}


def first_call(program: Program, platform: str) -> dict[str, float]:
    """Seconds to trace and lower, and to compile and run once."""
    device = jax.devices(platform)[0]
    jax.jit(lambda x: x + 1)(jax.device_put(np.float32(1), device)).block_until_ready()  # starts the device
    arguments = jax.device_put(program.arguments(np.random.default_rng(0)), device)
    jax.block_until_ready(arguments)
    began = time.perf_counter()
    lowered = jax.jit(program.function).lower(*arguments)
    traced = time.perf_counter()
    jax.block_until_ready(lowered.compile()(*arguments))
    return {"lower": traced - began, "first": time.perf_counter() - traced}


def in_fresh_process(program: Program, platform: str, caches: str, variables: Mapping[str, str]) -> dict[str, float]:
    """first_call in a process of its own, with all caches below the directory ``caches``: bytecode too, which an
    installed package has beside its sources."""
    places = {
        "CUDA_CACHE_PATH": "driver",
        "JAX_COMPILATION_CACHE_DIR": "jax",
        "PYTHONPYCACHEPREFIX": "bytecode",
        "TRITON_CACHE_DIR": "triton",
        "XDG_CACHE_HOME": "others",
    }
    environment = os.environ | {name: str(Path(caches, place)) for name, place in places.items()} | dict(variables)
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "benchmarks.first_call", "--child", platform, "--only", program.name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cold_and_warm(program: Program, platform: str, variables: Mapping[str, str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as caches:
        return [in_fresh_process(program, platform, caches, variables) for _ in range(2)]


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--peer", default="cuda", help="XLA's platform of the same accelerator")
    parser.add_argument("--only", default="Llama* prefill*", help="a glob on the programs' names")
    parser.add_argument("--child", metavar="PLATFORM", help="measure once in this process and print JSON")
    options = parser.parse_args()
    chosen = [program for program in programs(Scale.ACCELERATOR) if fnmatch.fnmatch(program.name, options.only)]
    if options.child:
        print(json.dumps(first_call(chosen[0], options.child)))
        return 0
    rows = []
    for program in chosen:
        theirs = cold_and_warm(program, options.peer, {})
        for kind, variables in (("untuned", UNTUNED), ("tuned", {})):
            ours = cold_and_warm(program, options.device, variables)
            for cache, mine, peer in zip(("cold", "warm"), ours, theirs, strict=True):
                # Lowering is jax's own work for any device: no compiler ends sooner than it begins.
                name = f"{program.name}, {kind}, {cache}"
                rows.append(report.Row(name, "s", mine["lower"], mine["first"], peer["first"]))
    report.publish(
        "first_call", rows, options.save, peer=f"XLA {options.peer}", device=jax.devices(options.peer)[0].device_kind
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
