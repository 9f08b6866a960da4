"""The harness suite: every primitive harness that ships in the jax wheel."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.conformance.device import of_platform
from tools.conformance.records import HOST, ResultFile
from tools.conformance.worker_pool import run_in_workers, worker_command


def run(
    platform: str, out: Path, *, only: str, stride: int, offset: int, resume: bool, timeout: float, workers: int = 1
) -> ResultFile:
    """Runs the harnesses whose name contains ``only``, each ``stride``-th of them from number ``offset`` on, in
    ``workers`` processes at once."""
    # Imported here: it takes seconds and needs jax, which `table` does not.
    import jax

    jax.config.update("jax_enable_x64", True)  # without it the harnesses of 64-bit types do not exist
    from jax._src.internal_test_util import test_harnesses

    device = of_platform(platform)
    results = ResultFile(out, "harnesses", platform, device, resume=resume)
    chosen = [h for h in test_harnesses.all_harnesses if only in h.fullname][offset::stride]
    chosen = [h for h in chosen if h.fullname not in results.records]
    environment = {"JAX_PLATFORMS": platform if platform == "cpu" else f"{platform},cpu", "PYTHONHASHSEED": "0"}
    if device != HOST:
        # An accelerator rounds what it multiplies to TF32 unless asked not to, which the oracle is no measure for.
        environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    records = run_in_workers(
        worker_command("tools.conformance.harness_worker", platform),
        [h.fullname for h in chosen],
        [h.group_name for h in chosen],
        timeout=timeout,
        environment=environment,
        workers=workers,
    )
    for number, record in enumerate(records, 1):
        results.add(record)
        if number % 100 == 0:
            print(f"{number} of {len(chosen)}", file=sys.stderr, flush=True)
    return results
