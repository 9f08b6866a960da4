"""Operators of eager programs on an accelerator with FlagGems on, beside the same calls without. Products are left out:
FlagGems tries many forms of each, which takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flagos_backend.torch.gems import gems

from . import report

Call = Callable[[torch.Tensor], object]
CALLS: dict[str, Call] = {
    "exp": torch.exp,
    "add": lambda x: x + x,
    "add a number": lambda x: x + 2,
    "mul": lambda x: x * x,
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "sum": lambda x: x.sum(),
}
#: Rows of a square tensor: of which a call is all overhead, and of which it is none.
SIDES = {"4 x 4": 4, "8192 x 8192": 8192}


def seconds(call: Call, x: torch.Tensor) -> float:
    """Of one call: the least of some rounds."""
    module = torch.get_device_module(x.device)
    calls = 100 if x.numel() < 1000 else 5

    def run() -> None:
        for _ in range(calls):
            call(x)
        module.synchronize()

    (taken,) = report.alternate([run], 20, summary=min)
    return taken / calls


def rows_of(names: Sequence[str]) -> list[report.Row]:
    found = []
    for label, side in SIDES.items():
        x = torch.randn(side, side, device="cuda")
        for name in names:
            with gems():
                ours = seconds(CALLS[name], x)
            peer = seconds(CALLS[name], x)
            found.append(report.Row(f"{name} {label}", "µs", 0.0, ours * 1e6, peer * 1e6))
    return found


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    options = report.parser(__doc__).parse_args()
    with torch.no_grad(), gems() as active:
        x = torch.randn(4, 4, device="cuda")
        for call in CALLS.values():
            call(x)
        counted = {name: of for name, of in active.reports().items() if of.flaggems or of.native}
    notes = [f"FlagGems computed {sorted(n for n, r in counted.items() if r.flaggems)}"]
    notes += [f"PyTorch computed {n}: {dict(r.native)}" for n, r in counted.items() if r.native]
    with torch.no_grad():
        rows = rows_of(list(CALLS))
    report.publish("gems_accelerator", rows, options.save, notes, peer="eager", device=torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
