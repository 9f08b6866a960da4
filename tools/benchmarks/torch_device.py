"""Operators on tiny tensors of the PyTorch device, beside the same calls on the host; what import torch costs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import torch

from flagos_backend.frontends.torch.autoload import enable

from . import report

#: Microseconds that a call may cost.
GOAL = 15.0

CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "add": lambda x: x + x,
    "add a number": lambda x: x + 2,
    "add in place": lambda x: x.add_(x),
    "mul": lambda x: x * x,
    "mm": lambda x: torch.mm(x, x),
    "softmax": lambda x: torch.softmax(x, -1),
    "sum": lambda x: x.sum(),
    "view": lambda x: x.view(16),
    "slice": lambda x: x[1:],
    "empty": lambda x: torch.empty(4, 4, device=x.device),
}


def overhead(name: str) -> tuple[report.Row, float]:
    """One operator on [4, 4] tensors; with it, microseconds a call above the host's."""
    call = CALLS[name]
    there, host = torch.ones(4, 4, device="flagos"), torch.ones(4, 4)
    with torch.no_grad():
        ours, peer = report.alternate([lambda: call(there), lambda: call(host)], 60, 100, summary=min)
    return report.Row(name, "µs", 0.0, ours * 1e6, peer * 1e6), (ours - peer) * 1e6


def import_seconds(rounds: int = 5) -> report.Row:
    """Processor time of `import torch` with the device known, and without."""
    code = "import time; t = time.process_time(); import torch; print(time.process_time() - t)"
    times: dict[str, list[float]] = {"1": [], "0": []}
    for _ in range(rounds):
        for known, measured in times.items():
            environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": known}
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
            measured.append(float(done.stdout))
    ours, peer = (min(measured) * 1e3 for measured in times.values())
    return report.Row("import torch (least of 5)", "ms", 0.0, ours, peer)


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    options = report.parser(__doc__).parse_args()
    reason = enable()
    if reason:
        raise SystemExit(reason)
    measured = [overhead(name) for name in CALLS]
    rows = [row for row, _ in measured] + [import_seconds()]
    worst = max(measured, key=lambda pair: pair[1])
    above = f"a call costs at most {worst[1]:.1f} µs above the host's ({worst[0].name}); goal: ≤ {GOAL:g}"
    notes = [above, "least of 60 rounds of 100 calls"]
    report.publish("torch_device", rows, options.save, notes, peer="torch cpu")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
