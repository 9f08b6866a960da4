"""How long the GPT-2 training step takes to compile, in fresh processes with empty caches."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

import gpt2

from . import report

CONFIG = gpt2.Config(layers=4, width=128, context=128, batch=8)


def compile_once(platform: str) -> dict[str, float]:
    """Seconds to trace and lower, to compile, and to compile again with jax's memory of it cleared."""
    device = jax.devices(platform)[0]
    initialize, step = gpt2.training(CONFIG)
    with jax.default_device(device):
        jax.jit(lambda x: x + 1)(np.float32(1)).block_until_ready()  # starts the device
        state = jax.eval_shape(initialize)
        tokens = jax.ShapeDtypeStruct((CONFIG.batch, CONFIG.context + 1), np.int32)
        times = {}
        for name in ("first", "again"):
            began = time.perf_counter()
            lowered = jax.jit(step, donate_argnums=0).lower(state, tokens)
            times[f"{name}_lower"] = time.perf_counter() - began
            began = time.perf_counter()
            lowered.compile()
            times[f"{name}_compile"] = time.perf_counter() - began
            jax.clear_caches()
    return times


def in_fresh_process(platform: str) -> dict[str, float]:
    """compile_once in a process of its own, with an empty compile cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        command = [sys.executable, "-m", "benchmarks.compile_time", "--child", platform]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    arguments = report.parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--child", metavar="PLATFORM", help="measure once in this process and print JSON")
    options = arguments.parse_args()
    if options.child:
        print(json.dumps(compile_once(options.child)))
        return 0
    platforms = (options.device, "cpu")
    runs = {platform: [in_fresh_process(platform) for _ in range(options.rounds)] for platform in platforms}

    def median(platform: str, name: str) -> float:
        return statistics.median(run[name] for run in runs[platform])

    # Lowering is jax's own work for any device: no compiler ends sooner than it begins.
    floor = median("cpu", "first_lower")
    names = {"first_compile": "GPT-2 step, empty cache", "again_compile": "GPT-2 step, compiled again"}
    rows = [
        report.Row(label, "s", floor, median(options.device, name), median("cpu", name), goal=2.0)
        for name, label in names.items()
    ]
    report.publish("compile_time", rows, options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
