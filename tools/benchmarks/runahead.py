"""Loops that never wait: what they take, and how far the resident memory grows meanwhile and afterwards."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from . import report

ELEMENTS = 2_000_000
ROUNDS = 3


def resident() -> float:
    """MB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def loops(platform: str) -> Mapping[str, tuple[int, Callable[[int], object]]]:
    """How often, and one step on `platform`, whose result is dropped."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.config.update("jax_default_device", jax.devices(platform)[0])
    scale = jax.jit(lambda x: x * 2 + 1)
    ones = jnp.ones(ELEMENTS)
    host = np.ones(ELEMENTS, np.float32)
    return {
        "f(f(z))": (150, lambda _: scale(scale(ones))),
        "ones + i": (1200, lambda i: ones + i),
        "jnp.ones(n) + i": (150, lambda i: jnp.ones(ELEMENTS) + i),
        "f(device_put(x))": (150, lambda _: scale(jax.device_put(host))),
    }


def measure(platform: str) -> dict[str, tuple[float, float, float]]:
    """Seconds, MB at most and MB left of each loop."""
    import jax

    results = {}
    for name, (steps, step) in loops(platform).items():
        jax.block_until_ready(step(0))
        gc.collect()
        before, most, over = resident(), [0.0], threading.Event()

        def watch(before: float = before, most: list[float] = most, over: threading.Event = over) -> None:
            while not over.wait(0.002):
                most[0] = max(most[0], resident() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        for number in range(steps):
            result = step(number)
        jax.block_until_ready(result)
        seconds = time.perf_counter() - began
        left = resident() - before
        over.set()
        watcher.join()
        results[name] = seconds, max(most[0], left), left
    return results


def child(platform: str) -> dict[str, list[float]]:
    """`measure` in a fresh process: memory that an earlier loop left behind would hide what the next one takes."""
    command = [sys.executable, "-m", "benchmarks.runahead", "--measure", platform]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[float]] = json.loads(answer.splitlines()[-1])
    return found


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--measure", help="one platform only, as JSON: what the processes of this benchmark are")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    rounds = [(child(options.device), child("cpu")) for _ in range(ROUNDS)]
    rows, notes = [], []
    for name in rounds[0][0]:
        (seconds, most, left), (peer_seconds, peer_most, peer_left) = (
            [statistics.median(r[side][name][kind] for r in rounds) for kind in range(3)] for side in (0, 1)
        )
        rows.append(report.Row(f"{name}, time", "ms", 0, seconds * 1e3, peer_seconds * 1e3, 1.0))
        notes.append(
            f"{name}: memory grows by at most {most:.0f} MB ({peer_most:.0f}), and has grown by {left:.0f} MB "
            f"({peer_left:.0f}) when all is done; in parentheses JAX CPU"
        )
    report.publish("runahead", rows, options.save, notes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
