"""The LightX2V suite: its transformer blocks and operators on the platform flagos, from a checkout of the caller's."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.conformance.records import HOST, ResultFile
from tools.conformance.worker_pool import run_in_workers, worker_command

#: Tokens and the width of a block; heads are of 16 numbers in the narrow one, and of 128 in that of WAN 1.3B. Stock
#: blocks take no single token.
SIZES = ((2, 64), (48, 64), (390, 64), (48, 1536))
#: Fewer tokens say little of the average error of 8-bit numbers, which is what is allowed.
_FEWEST_QUANTIZED = 48
#: The key of products, by scheme.
KEYS = {"bf16": "flagos", "fp8": "flagos-fp8", "int8": "flagos-int8"}
_KEYS = (*(f"flagos_{name}" for name in ("flash_attn", "rms_norm", "layer_norm", "rope")), *KEYS.values())


def tests() -> dict[str, str]:
    """The group of each test, by name. The words of a name are what the worker's function of the group takes."""
    named = {
        f"block {task} {scheme} {tokens} {width} {way}": "block"
        for task in ("t2v", "i2v")
        for scheme in KEYS
        for tokens, width in SIZES
        if scheme == "bf16" or tokens >= _FEWEST_QUANTIZED
        for way in ("eager", "compiled")
    }
    named |= {f"steps {task} {scheme}": "compiled steps" for task in ("t2v", "i2v") for scheme in KEYS}
    named |= {f"operator {key} {kind}": "operator" for key in _KEYS for kind in ("float32", "bfloat16")}
    named |= {f"weights {kind} {scheme}": "weights" for kind in ("lora", "offload", "disk") for scheme in KEYS}
    named |= {f"parallel {kind} {scheme}": "parallel" for kind in ("ulysses", "ring") for scheme in KEYS}
    named |= {f"registration {key}": "registration" for key in _KEYS}
    named |= {f"registration {what}": "registration" for what in ("twice", "device", "entry_point", "configurations")}
    named |= {f"refusal {key}": "refusal" for key in _KEYS}
    return named


def run(out: Path, checkout: Path, *, only: str, resume: bool, timeout: float) -> ResultFile:
    """Runs the tests whose name contains ``only`` in worker processes that import LightX2V from ``checkout``. Raises
    FileNotFoundError where there is none."""
    if not (checkout / "lightx2v_platform").is_dir():
        raise FileNotFoundError(f"{checkout} is no checkout of LightX2V: it has no folder lightx2v_platform")
    results = ResultFile(out, "lightx2v", "flagos", HOST, peer="LightX2V's own operators on the CPU", resume=resume)
    chosen = {name: group for name, group in tests().items() if only in name and name not in results.records}
    records = run_in_workers(
        worker_command("tools.conformance.lightx2v_worker", str(checkout.resolve())),
        list(chosen),
        list(chosen.values()),
        timeout=timeout,
        environment={"PLATFORM": "flagos", "LIGHTX2V_FL_DEVICE": "cpu", "FLAGOS_TORCH_DEVICE": "0"},
    )
    for record in records:
        results.add(record)
        print(f"{record.name}: {record.status} {record.message}", file=sys.stderr, flush=True)
    return results
