"""10,000 jit calls in 8 threads with donation and deletion: exits with 1 unless results are right and memory flat."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from . import report

THREADS = 8
SIZES = (1, 7, 1024, 65536, 262144)
ALLOWED_GROWTH = 2 * 2**20
"""Bytes that the calls may add: 200 a call, less than the handle of one leaked buffer."""

M_ARENA_MAX = -8
"""From glibc's malloc.h."""


@dataclass(frozen=True)
class Outcome:
    """What a run of the calls gave. Bytes and seconds."""

    wrong: int
    resident_before: int
    resident_after: int
    seconds: float

    @property
    def growth(self) -> int:
        """Resident bytes that the calls added."""
        return self.resident_after - self.resident_before


def resident() -> int:
    """Resident bytes of this process, after everything unused was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def double_and_add_one(x: jax.Array) -> jax.Array:
    return x * 2 + 1


def sum_and_difference(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x + y, (x - y).sum()


def one_thread(device: jax.Device, number: int, calls: int, start: threading.Barrier) -> int:
    """Number of wrong results of `calls` calls, which in turn donate the argument, delete it, ignore the result."""
    donating, keeping = jax.jit(double_and_add_one, donate_argnums=0), jax.jit(sum_and_difference)
    rng = np.random.default_rng()
    wrong = 0
    start.wait()
    for call in range(calls):
        host = rng.integers(-1000, 1000, SIZES[(call + number) % len(SIZES)]).astype(np.int32)
        value = jax.device_put(host, device)
        match call % 3:
            case 0:
                result = donating(value)
                wrong += not np.array_equal(np.asarray(result), host * 2 + 1)
            case 1:
                total, difference = keeping(value, value)
                value.delete()
                wrong += not np.array_equal(np.asarray(total), host * 2) or int(difference) != 0
            case _:
                donating(value)
    return wrong


def run(device: jax.Device, calls: int) -> Outcome:
    """Makes `calls` calls from all threads, after as many to warm up."""

    def all_threads() -> int:
        start = threading.Barrier(THREADS)
        with ThreadPoolExecutor(THREADS) as pool:
            per_thread = [pool.submit(one_thread, device, number, calls // THREADS, start) for number in range(THREADS)]
            return sum(future.result() for future in per_thread)

    wrong = all_threads()
    before = resident()
    began = time.perf_counter()
    wrong += all_threads()
    seconds = time.perf_counter() - began
    return Outcome(wrong, before, resident(), seconds)


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    arguments = report.parser(__doc__)
    arguments.add_argument("--calls", type=int, default=10_000)
    arguments.add_argument(
        "--results-only", action="store_true", help="judge no memory: a sanitizer keeps what is freed"
    )
    options = arguments.parse_args()
    # With an arena for each thread, free memory wanders between arenas, and that looks like growth for a long time.
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    ours = run(jax.devices(options.device)[0], options.calls)
    peer = run(jax.devices("cpu")[0], options.calls)
    flat = options.results_only or ours.growth <= ALLOWED_GROWTH
    verdict = "not judged" if options.results_only else "flat" if flat else "NOT FLAT"
    summary = (
        f"{options.calls} calls in {THREADS} threads: {ours.wrong} wrong results; resident memory of "
        f"{ours.resident_before / 1e6:.0f} MB grew by {ours.growth / 1e6:.2f} MB "
        f"(JAX CPU: {peer.growth / 1e6:.2f} MB): {verdict}"
    )
    per_call = 1e6 / options.calls
    row = report.Row("time of a call, checks included", "µs", 0, ours.seconds * per_call, peer.seconds * per_call)
    report.publish("stress", [row], options.save, [summary])
    return 0 if flat and ours.wrong == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
