"""Kills a backend's own process at random moments of JAX programs: compiles, training steps and transfers.

    PYTHONPATH=. .flagos/venv/bin/python tools/isolation_kills.py [KILLS] [SEED] [SECONDS]

Each client gets a new process, which is killed once; after SECONDS no more are started. Exits with 1 unless each
kill came out as UNAVAILABLE within ten seconds, and no process and no shared memory were left behind; prints what
it counted.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

os.environ["FLAGOS_ISOLATION"] = "process"

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend as jax_backend

#: Longer than this after its kill nothing may wait.
_PATIENCE = 10.0


def _work(device: jax.Device, draw: random.Random) -> None:
    """Compiles, trains and transfers until the process is gone."""
    rng = np.random.default_rng(draw.randrange(1 << 30))
    while True:
        width = draw.randrange(1, 64)
        step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), donate_argnums=0)
        w, x = jax.device_put((rng.random((width, 3), np.float32), rng.random((8, width), np.float32)), device)
        for _ in range(draw.randrange(1, 40)):
            w = step(w, x)
        assert np.isfinite(np.asarray(w)).all()
        large = rng.random(draw.randrange(1, 1_000_000), np.float32)
        np.testing.assert_array_equal(np.asarray(jax.device_put(large, device)), large)


def _shared_memory() -> int:
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(str(link.readlink()))
    return sum(link.startswith("/memfd:flagos") for link in links)


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _kill_once(draw: random.Random) -> str:
    """What was wrong with one kill; "" where nothing was."""
    device = jax.devices("flagos")[0]
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(device.isolated_process_id, signal.SIGKILL)

    killer = threading.Timer(draw.expovariate(1.0), kill)
    killer.start()
    fault = "no error"
    try:
        _work(device, draw)
    except (RuntimeError, ValueError) as error:  # JAX has no class of its own for UNAVAILABLE
        fault = "" if "was ended by signal 9" in str(error) else f"another error: {error}"
    killer.join()
    took = time.monotonic() - killed[0]
    return fault or ("" if took <= _PATIENCE else f"it took {took:.1f} s to be told")


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(1 << 30)
    until = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else math.inf)
    draw, faults, done = random.Random(seed), [], 0
    print(f"seed {seed}", flush=True)
    for number in range(kills):
        if time.monotonic() > until:
            break
        done += 1
        if fault := _kill_once(draw):
            faults.append(f"kill {number}: {fault}")
            print(faults[-1], flush=True)
        jax.clear_caches()  # type: ignore[no-untyped-call]
        jax_backend.clear_backends()  # type: ignore[no-untyped-call]
        if done % 10 == 0:
            print(f"{done} kills, {len(faults)} faults so far", flush=True)
    deadline = time.monotonic() + _PATIENCE
    while (_children() or _shared_memory()) and time.monotonic() < deadline:
        time.sleep(0.1)
    left, memory = len(_children()), _shared_memory()
    print(f"{done} kills, {len(faults)} faults, {left} processes and {memory} segments of shared memory left")
    return 1 if faults or left or memory else 0


if __name__ == "__main__":
    sys.exit(main())
