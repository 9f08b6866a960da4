"""What the other processes of a JAX training see when one of them is killed in the middle of a step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Seconds that a collective waits for a process that is gone, and by which all others have ended.
TIMEOUT: Final = 10
_ENDED: Final = 120
_STEPS: Final = 100_000
# Variables by which a launcher gives a process one accelerator.
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Lost:
    """``seconds[rank]``: from the kill until that process knew, or ended; None: it did neither. ``reasons``: what each
    said, on one line."""

    seconds: list[float | None]
    reasons: list[str]

    @property
    def failed(self) -> bool:
        """Whether a process went on, or waited for longer than it may."""
        return any(taken is None or taken > 3 * TIMEOUT for taken in self.seconds)


def lose_one(count: int) -> Lost:
    """Trains in ``count`` processes of one device each, and kills the last."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{holder.getsockname()[1]}"
        started = [_start(folder, rank, count, coordinator) for rank in range(count)]
        ends: list[float | None] = [None] * count
        deadline = time.monotonic() + _ENDED
        while None in ends and time.monotonic() < deadline:
            for rank, process in enumerate(started):
                if ends[rank] is None and process.poll() is not None:
                    ends[rank] = time.time()
            time.sleep(0.05)
        for process in started:
            process.kill()
            process.wait()
        killed = Path(folder) / "killed"
        logs = [(Path(folder) / f"{rank}.log").read_text(errors="replace") for rank in range(count)]
        if not killed.exists():
            raise RuntimeError(f"no process came to train: {logs[-1][-400:]}")
        at = float(killed.read_text(encoding="utf-8"))
        taken: list[float | None] = []
        reasons = []
        for rank in range(count - 1):
            told = Path(folder) / f"{rank}.json"
            if told.exists():
                said = json.loads(told.read_text(encoding="utf-8"))
                taken.append(said["at"] - at)
                reasons.append(said["error"])
            else:
                end = ends[rank]
                taken.append(end - at if end else None)
                reasons.append(
                    next((line for line in logs[rank].splitlines() if "FLAGOS-50" in line), "no error of ours")
                )
    return Lost(taken, [" ".join(reason.split())[:200] for reason in reasons])


def _start(folder: str, rank: int, count: int, coordinator: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **dict.fromkeys(_VISIBLE, str(rank)),
        "FLAGOS_NUM_CPU_DEVICES": "1",
        "FLAGOS_COLLECTIVE_TIMEOUT": str(TIMEOUT),
        "JAX_PLATFORMS": "flagos,cpu",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.scaling.lost_process", folder, str(rank), str(count), coordinator]
    with (Path(folder) / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _process(folder: Path, rank: int, count: int, coordinator: str) -> None:
    """Trains until it is killed, or until it hears that another was."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.distributed.initialize(coordinator, count, rank)
    mesh = Mesh(np.array(jax.devices("flagos")), ("d",))

    def put(array: np.ndarray, *spec: str) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        slope = jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w) - 1)))(w)
        return w - 0.1 * slope

    def kill() -> None:
        (folder / "killed").write_text(str(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)

    random = np.random.default_rng(0)
    weights = put(random.standard_normal((64, 64)).astype(np.float32))
    batch = put(random.standard_normal((8 * count, 64)).astype(np.float32), "d")
    try:
        for number in range(_STEPS):
            weights = step(weights, batch)
            if number % 10 == 9:
                weights.block_until_ready()
            if rank == count - 1 and number == 50:
                threading.Timer(0.05, kill).start()
    except Exception as error:
        said = json.dumps({"at": time.time(), "error": f"{type(error).__name__}: {error}"})
        partial = folder / f"{rank}.partial"
        partial.write_text(said, encoding="utf-8")
        partial.rename(folder / f"{rank}.json")
        os._exit(1)  # jax.distributed would wait for the lost one


if __name__ == "__main__":
    _process(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
