"""Bandwidth and latency of collectives: those of JAX programs on flagos and on XLA's platform, in one process, and
those of torch.distributed alone, in a process for each device. Sizes and bus bandwidth are counted as nccl-tests does
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

#: The bytes of a collective are those of the larger of what one device gives and gets.
SIZES: Final = tuple(1 << power for power in range(10, 31, 4))
NAMES: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute")
_WARM_UPS: Final = 5
_LONGEST_SECONDS: Final = 300
_LEAST_CALLS, _MOST_CALLS = 3, 200


@dataclass(frozen=True)
class Timed:
    """Seconds of one call of a collective of so many bytes."""

    name: str
    bytes: int
    seconds: float

    def bus_bandwidth(self, devices: int) -> float:
        """Bytes that each link carries in a second, were the devices a ring."""
        share = (devices - 1) / devices
        factor = {"all-reduce": 2 * share, "permute": 1.0}.get(self.name, share)
        return self.bytes / self.seconds * factor


def _seconds_of_one(call: Callable[[int], None], seconds: float) -> float:
    """``call`` makes so many and waits for the last; the least of three rounds within about ``seconds``."""
    call(_WARM_UPS)
    began = time.perf_counter()
    call(_LEAST_CALLS)
    once = (time.perf_counter() - began) / _LEAST_CALLS
    calls = max(_LEAST_CALLS, min(_MOST_CALLS, int(seconds / 3 / once)))
    rounds = []
    for _ in range(3):
        began = time.perf_counter()
        call(calls)
        rounds.append((time.perf_counter() - began) / calls)
    return min(rounds)


def of_jax(devices: Sequence[Any], size: int, seconds: float, wait_for_each: bool) -> list[Timed]:
    """Of float32 arrays over ``devices``. ``wait_for_each``: wait for a call before the next. XLA's devices of one host
    block for ever where more launches than threads meet. Raises RuntimeError where a result is wrong."""
    import jax
    from jax import lax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    count = len(devices)
    mesh = Mesh(np.array(devices), ("d",), axis_types=(AxisType.Auto,))
    spread, whole = PartitionSpec("d"), PartitionSpec()
    onward = [(i, (i + 1) % count) for i in range(count)]
    elements = _elements(size, count)
    # What one device gives, the function, how its result is spread, and what it is of given[device, element].
    known: dict[str, tuple[int, Callable[[jax.Array], jax.Array], Any, Callable[[np.ndarray], np.ndarray]]] = {
        "all-reduce": (elements, lambda y: lax.psum(y, "d"), whole, lambda g: g.sum(0)),
        "all-gather": (elements // count, lambda y: lax.all_gather(y, "d", tiled=True), whole, np.ravel),
        "reduce-scatter": (elements, lambda y: lax.psum_scatter(y, "d", tiled=True), spread, lambda g: g.sum(0)),
        "all-to-all": (
            elements,
            lambda y: lax.all_to_all(y, "d", 0, 0, tiled=True),
            spread,
            lambda g: g.reshape(count, count, -1).transpose(1, 0, 2).ravel(),
        ),
        "permute": (elements, lambda y: lax.ppermute(y, "d", onward), spread, lambda g: np.roll(g, 1, 0).ravel()),
    }
    found = []
    for name, (given, function, out, expected) in known.items():
        mapped = jax.shard_map(function, mesh=mesh, in_specs=spread, out_specs=out, check_vma=False)
        program = jax.jit(mapped)
        numbers = np.broadcast_to(np.arange(1, count + 1, dtype=np.float32)[:, None], (count, given))
        x = jax.device_put(numbers.ravel(), NamedSharding(mesh, spread))
        if not np.array_equal(np.asarray(program(x)), expected(numbers)):
            raise RuntimeError(f"{name} of {size} bytes over {count} devices gives a wrong result")

        def call(times: int, program: Callable[..., jax.Array] = program, x: jax.Array = x) -> None:
            for _ in range(times):
                result = program(x)
                if wait_for_each:
                    result.block_until_ready()
            result.block_until_ready()

        found.append(Timed(name, elements * 4, _seconds_of_one(call, seconds)))
    return found


def _elements(size: int, count: int) -> int:
    """Of float32, a multiple of the number of devices."""
    return max(1, size // 4 // count) * count


def of_torch(backend: str, count: int, sizes: Sequence[int], seconds: float) -> list[Timed]:
    """Of torch.distributed over ``backend`` alone, in ``count`` processes: what the transport itself takes. Collectives
    that the backend does not have are left out. Raises RuntimeError where a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps({"backend": backend, "count": count, "sizes": list(sizes), "seconds": seconds})
        started = []
        for rank in range(count):
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(rank), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.scaling.collectives", folder, str(rank), job]
            with (Path(folder) / f"{rank}.log").open("wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + _LONGEST_SECONDS
        try:
            failed = [rank for rank, process in enumerate(started) if process.wait(max(1, deadline - time.monotonic()))]
        except subprocess.TimeoutExpired:
            failed = [rank for rank, process in enumerate(started) if process.poll() != 0]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failed:
            said = (Path(folder) / f"{failed[0]}.log").read_text(errors="replace")
            raise RuntimeError(f"process {failed[0]} of torch.distributed over {backend} failed: {said[-400:]}")
        # The slowest process says how long a collective takes.
        found = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]
    slowest = [max(rows, key=lambda row: row["seconds"]) for rows in zip(*found, strict=True)]
    return [Timed(**row) for row in slowest]


def _process(folder: str, rank: int, backend: str, count: int, sizes: Sequence[int], seconds: float) -> None:
    """One of the processes of ``of_torch``."""
    import torch
    import torch.distributed as dist

    if backend == "flagcx":
        from flagos_backend.devices import process_groups

        process_groups.backend_for("cuda" if torch.accelerator.is_available() else "cpu")
    dist.init_process_group(
        backend,
        init_method=(Path(folder) / "rendezvous").as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=60),
    )
    accelerator = torch.accelerator.current_accelerator() if backend != "gloo" else None
    device = accelerator or torch.device("cpu")
    found = []
    for size in sizes:
        elements = _elements(size, count)
        x = torch.ones(elements, device=device)
        same, part = torch.empty_like(x), torch.empty(elements // count, device=device)

        def permute(x: torch.Tensor = x, same: torch.Tensor = same) -> None:
            sends = dist.P2POp(dist.isend, x, (rank + 1) % count), dist.P2POp(dist.irecv, same, (rank - 1) % count)
            for work in dist.batch_isend_irecv(list(sends)):
                work.wait()

        calls: dict[str, Callable[[], object]] = {
            "all-reduce": partial(dist.all_reduce, same),
            "all-gather": partial(dist.all_gather_into_tensor, same, part),
            "reduce-scatter": partial(dist.reduce_scatter_tensor, part, x),
            "all-to-all": partial(dist.all_to_all_single, same, x),
            "permute": permute,
        }
        for name in NAMES:

            def several(times: int, call: Callable[[], object] = calls[name]) -> None:
                for _ in range(times):
                    call()
                if accelerator:
                    torch.accelerator.synchronize()

            same.fill_(0)
            try:
                several(1)
            except (RuntimeError, NotImplementedError) as error:
                if "support" not in str(error):
                    raise
                continue
            # All processes make as many calls: the first tells how many.
            chosen: list[float | None] = [None]
            if rank == 0:
                began = time.perf_counter()
            several(_LEAST_CALLS)
            if rank == 0:
                chosen = [(time.perf_counter() - began) / _LEAST_CALLS]
            dist.broadcast_object_list(chosen)
            number = max(_LEAST_CALLS, min(_MOST_CALLS, int(seconds / 3 / max(chosen[0] or 0.0, 1e-6))))
            rounds = []
            for _ in range(3):
                dist.barrier()
                began = time.perf_counter()
                several(number)
                rounds.append((time.perf_counter() - began) / number)
            found.append(asdict(Timed(name, elements * 4, min(rounds))))
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    _process(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))
