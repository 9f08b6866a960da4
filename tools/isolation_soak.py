"""Trains, transfers and calls back for some minutes with JAX on a backend in a process of its own, and watches memory.

    PYTHONPATH=. .flagos/venv/bin/python tools/isolation_soak.py [SECONDS] [SEED] [LIFE]

With LIFE the process is killed at random moments, after LIFE seconds on average, and a new one serves a new
client. Prints the resident memory of host and child, their open files and threads, over time. Exits with 1 where
any of them is larger in the last quarter than in the second by more than a twentieth, where a result is wrong, or
where a kill is told as something else.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

os.environ["FLAGOS_ISOLATION"] = "process"

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend as jax_backend

_SAMPLES = 40


@dataclass(frozen=True)
class _Sample:
    host_kib: int
    child_kib: int
    host_files: int
    child_files: int
    host_threads: int
    child_threads: int


def _facts(process: int) -> tuple[int, int, int]:
    """Resident KiB, open files and threads."""
    folder = Path(f"/proc/{process}")
    lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]), len(list((folder / "fd").iterdir())), int(lines["Threads"])


def _sample(child: int) -> _Sample:
    (host_kib, host_files, host_threads), (child_kib, child_files, child_threads) = map(_facts, (os.getpid(), child))
    return _Sample(host_kib, child_kib, host_files, child_files, host_threads, child_threads)


def _double(x: np.ndarray) -> np.ndarray:
    return np.asarray(x) * 2


def _grew(samples: list[_Sample]) -> list[str]:
    """What grew, by the medians of the second and of the last quarter."""
    quarter = len(samples) // 4
    grew = []
    for field in fields(_Sample):
        values = [getattr(sample, field.name) for sample in samples]
        before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        if after > 1.05 * before + 2:
            grew.append(f"{field.name} from {before:g} to {after:g}")
    return grew


def _round(
    device: jax.Device, step: Callable[..., jax.Array], calls: Callable[..., jax.Array], draw: random.Random
) -> None:
    rng = np.random.default_rng(draw.randrange(1 << 30))
    w, x = jax.device_put((rng.random((48, 3), np.float32), rng.random((8, 48), np.float32)), device)
    for _ in range(draw.randrange(1, 40)):
        w = step(w, x)
    if not np.isfinite(np.asarray(w)).all():
        raise AssertionError("training gave no numbers")
    np.testing.assert_array_equal(np.asarray(calls(x)), np.asarray(x) * 2 + 1)
    large = rng.random(draw.choice((1000, 20_000, 500_000)), np.float32)
    np.testing.assert_array_equal(np.asarray(jax.device_put(large, device)), large)


class _Life:
    """A child, from its start to its kill."""

    def __init__(self, seconds: float, draw: random.Random) -> None:
        self.device = jax.devices("flagos")[0]
        self.child = self.device.isolated_process_id
        shape = jax.ShapeDtypeStruct((8, 48), np.float32)  # type: ignore[no-untyped-call]
        self.step = jax.jit(
            lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), donate_argnums=0
        )
        self.calls = jax.jit(lambda x: jax.pure_callback(_double, shape, x) + 1)
        self._killer = (
            threading.Timer(draw.expovariate(1 / seconds), os.kill, (self.child, signal.SIGKILL)) if seconds else None
        )
        if self._killer is not None:
            self._killer.daemon = True
            self._killer.start()

    def is_killed(self, error: Exception) -> bool:
        """Whether `error` says that this child was killed, as it was."""
        if self._killer is None or "was ended by signal 9" not in str(error):
            return False
        self._killer.join()
        return True


def _forget() -> None:
    """Lets go of the client whose child was killed: all arrays, programs and frames that hold it are gone."""
    jax.clear_caches()  # type: ignore[no-untyped-call]
    jax_backend.clear_backends()  # type: ignore[no-untyped-call]
    gc.collect()


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(1 << 30)
    lasts = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    draw = random.Random(seed)
    life: _Life | None = None
    print(f"seed {seed}; {', '.join(field.name for field in fields(_Sample))}", flush=True)
    begin, rounds, kills = time.monotonic(), 0, 0
    samples: list[_Sample] = []
    while (passed := time.monotonic() - begin) < seconds or len(samples) < _SAMPLES // 2:
        life = life or _Life(lasts, draw)
        try:
            _round(life.device, life.step, life.calls, draw)
        except (RuntimeError, ValueError) as error:  # JAX has no class of its own for UNAVAILABLE
            if not life.is_killed(error):
                raise
            kills, life = kills + 1, None
        if life is None:
            _forget()
            continue
        rounds += 1
        if passed >= len(samples) * seconds / _SAMPLES:
            try:
                samples.append(_sample(life.child))
            except (FileNotFoundError, ProcessLookupError, KeyError):  # killed just now: the next round says so
                continue
            print(f"{passed:6.0f} s {rounds:7} rounds {kills:4} kills", *astuple(samples[-1]), flush=True)
    grew = _grew(samples)
    print(f"{rounds} rounds, {kills} kills in {time.monotonic() - begin:.0f} s; grew: {', '.join(grew) or 'nothing'}")
    return 1 if grew else 0


if __name__ == "__main__":
    sys.exit(main())
