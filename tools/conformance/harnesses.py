"""The harness suite: every primitive harness that ships in the jax wheel."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.conformance.results import ResultFile
from tools.conformance.worker_pool import run_in_worker, worker_command


def run(platform: str, out: Path, *, only: str, stride: int, offset: int, resume: bool, timeout: float) -> ResultFile:
    """Runs the harnesses whose name contains ``only``, each ``stride``-th of them from number ``offset`` on."""
    # Imported here: it takes seconds and needs jax, which `table` does not.
    import jax

    jax.config.update("jax_enable_x64", True)  # without it the harnesses of 64-bit types do not exist
    from jax._src.internal_test_util import test_harnesses

    results = ResultFile(out, "harnesses", platform, resume=resume)
    chosen = [h for h in test_harnesses.all_harnesses if only in h.fullname][offset::stride]
    chosen = [h for h in chosen if h.fullname not in results.records]
    platforms = platform if platform == "cpu" else f"{platform},cpu"
    records = run_in_worker(
        worker_command("tools.conformance.harness_worker", platform),
        [h.fullname for h in chosen],
        [h.group_name for h in chosen],
        timeout=timeout,
        environment={"JAX_PLATFORMS": platforms, "PYTHONHASHSEED": "0"},
    )
    for number, record in enumerate(records, 1):
        results.add(record)
        if number % 100 == 0:
            print(f"{number} of {len(chosen)}", file=sys.stderr, flush=True)
    return results
