"""The FlagGems suite: each function that FlagOS may call, against ATen, on what PyTorch's operators call it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.conformance.device import of_tensors
from tools.conformance.records import SIMULATED, Device, Record, ResultFile, Status
from tools.conformance.worker_pool import run_in_workers, worker_command

# Where inputs are drawn from unless a run says otherwise.
SEED = 20261123
_UNREACHED = "no input of PyTorch's database calls it"


def case_name(function: str, dtype: Any) -> str:
    """A function by its operator, in a dtype of torch."""
    return f"{function} {str(dtype).removeprefix('torch.')}"


def operator_of(function: str) -> str:
    """The operator, of whatever overload."""
    return function.partition(".")[0]


def prepare_device(device: str) -> None:
    """Makes FlagGems compute on tensors of ``device``; SIMULATED's are the host's, in Triton's interpreter."""
    if device == SIMULATED.kind:
        from flagos_backend.kernels.flaggems.loading import load

        load()


def run(
    out: Path,
    *,
    samples: int,
    only: str,
    stride: int,
    offset: int,
    resume: bool,
    timeout: float,
    device: str = SIMULATED.kind,
    workers: int = 1,
    seed: int = SEED,
    operators: str = "",
) -> ResultFile:
    """Runs the cases whose name contains ``only``, each ``stride``-th of them from number ``offset`` on, with up to
    ``samples`` calls each, in ``workers`` processes at once. ``device``: SIMULATED or a device type of torch.
    ``operators``: whose inputs are taken, those of the database whose name contains this."""
    is_simulated = device == SIMULATED.kind
    about = Device(SIMULATED.kind) if is_simulated else of_tensors(device)
    results = ResultFile(out, "flaggems", "flagos", about, peer="ATen on the CPU", resume=resume)
    environment = {"TRITON_INTERPRET": "1"} if is_simulated else {}
    print(f"inputs drawn from seed {seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="flagos-conformance-") as folder:
        path = str(Path(folder) / "calls")
        cases, unreached = _calls(path, device, seed, samples, operators, environment)
        for name in unreached if not (only or operators) and stride == 1 else ():
            results.add(Record(name, operator_of(name), Status.SKIPPED, _UNREACHED))
        chosen = [case for case in cases if only in case][offset::stride]
        chosen = [case for case in chosen if case not in results.records]
        records = run_in_workers(
            worker_command("tools.conformance.flaggems_worker", path, device),
            chosen,
            [operator_of(case.partition(" ")[0]) for case in chosen],
            timeout=timeout,
            environment=environment,
            workers=workers,
        )
        for number, record in enumerate(records, 1):
            results.add(record)
            if number % 100 == 0:
                print(f"{number} of {len(chosen)}", file=sys.stderr, flush=True)
    return results


def _calls(
    path: str, device: str, seed: int, samples: int, operators: str, environment: dict[str, str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Writes the calls to ``path``; the names of the cases, and the functions that nothing calls."""
    command = worker_command("tools.conformance.flaggems_inputs", path, device, str(seed), str(samples), operators)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment})
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["cases"], answer["unreached"]
