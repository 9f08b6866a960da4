"""The model suite: whole models on flagos, their loss and every gradient against eager PyTorch on the CPU."""

from __future__ import annotations

import enum
import sys
from pathlib import Path

from tools.conformance.results import ResultFile
from tools.conformance.worker_pool import run_in_worker, worker_command


class Way(enum.StrEnum):
    """How a model runs."""

    EAGER = "eager on flagos"
    COMPILED_CPU = "compiled on the CPU"
    COMPILED_FLAGOS = "compiled on flagos"


def run(out: Path, ways: list[Way], *, only: str, resume: bool, timeout: float) -> ResultFile:
    """Runs the models whose name contains ``only``, in each of ``ways``."""
    from tools.conformance.model_zoo import MODELS  # imports torch, which publishing does without

    results = ResultFile(out, "models", "flagos", peer="eager PyTorch on the CPU", resume=resume)
    tests = {f"{name}, {way}": model.library for name, model in MODELS.items() for way in ways if only in name}
    tests = {name: library for name, library in tests.items() if name not in results.records}
    records = run_in_worker(
        worker_command("tools.conformance.model_worker"),
        list(tests),
        list(tests.values()),
        timeout=timeout,
        environment={},
    )
    for record in records:
        results.add(record)
        print(f"{record.name}: {record.status}", file=sys.stderr, flush=True)
    return results
