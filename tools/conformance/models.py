"""The model suite: whole models on flagos, their loss and every gradient against eager PyTorch on the CPU."""

from __future__ import annotations

import enum
import sys
from pathlib import Path

from tools.conformance.device import of_flagos, of_tensors
from tools.conformance.records import HOST, ResultFile
from tools.conformance.worker_pool import run_in_workers, worker_command


class Way(enum.StrEnum):
    """How a model runs."""

    EAGER = "eager on flagos"
    COMPILED_CPU = "compiled on the CPU"
    COMPILED_FLAGOS = "compiled on flagos"
    COMPILED_ACCELERATOR = "compiled on the accelerator"  # on a device of torch, without the device flagos


def ways_on(device: str) -> list[Way]:
    """How models run where tensors are of a device type of torch."""
    if device == HOST.kind:
        return [Way.EAGER, Way.COMPILED_CPU, Way.COMPILED_FLAGOS]
    return [Way.COMPILED_ACCELERATOR]


def run(
    out: Path,
    ways: list[Way] | None = None,
    *,
    only: str,
    resume: bool,
    timeout: float,
    device: str = HOST.kind,
    workers: int = 1,
) -> ResultFile:
    """Runs the models whose name contains ``only``, in each of ``ways``, in ``workers`` processes at once. ``device``:
    the accelerator, a device type of torch."""
    from tools.conformance.model_zoo import MODELS  # imports torch, which publishing does without

    ways = ways or ways_on(device)
    if (Way.COMPILED_ACCELERATOR in ways) is (device == HOST.kind):
        raise ValueError(f"{device} does not go with {', '.join(ways)}")
    # What flagos computes on says where the other ways run.
    about = of_tensors(device) if device != HOST.kind else HOST if ways == [Way.COMPILED_CPU] else of_flagos()
    results = ResultFile(out, "models", "flagos", about, peer="eager PyTorch on the CPU", resume=resume)
    tests = {f"{name}, {way}": model.library for name, model in MODELS.items() for way in ways if only in name}
    tests = {name: library for name, library in tests.items() if name not in results.records}
    records = run_in_workers(
        worker_command("tools.conformance.model_worker", device),
        list(tests),
        list(tests.values()),
        timeout=timeout,
        environment={},
        workers=workers,
    )
    for record in records:
        results.add(record)
        print(f"{record.name}: {record.status}", file=sys.stderr, flush=True)
    return results
