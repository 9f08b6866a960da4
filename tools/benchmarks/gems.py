"""Operators of eager programs on an accelerator with FlagGems on, beside the same calls without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks import report
from flagos_backend.torch.gems import gems

Call = Callable[[torch.Tensor], object]
CALLS: dict[str, Call] = {
    "exp": torch.exp,
    "add": lambda x: x + x,
    "add a number": lambda x: x + 2,
    "mul": lambda x: x * x,
    "mm": lambda x: torch.mm(x, x),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "sum": lambda x: x.sum(),
}
#: Rows of a square tensor: of which a call is all overhead, and of which it is none.
SIDES = {"4 x 4": 4, "8192 x 8192": 8192}


def seconds(call: Call, x: torch.Tensor) -> tuple[float, float]:
    """Of one call with FlagGems and of one without: the least of rounds that take turns."""
    module = torch.get_device_module(x.device)

    def rounds(calls: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                call(x)
            module.synchronize()

        return run

    calls = 100 if x.numel() < 1000 else 5
    run = rounds(calls)

    def with_gems() -> None:
        with gems():
            run()

    with gems():
        run()  # compiles
    # Turning it on is measured, too, and is taken off again: it costs the same whatever is called.
    empty, ours, peer = report.alternate([_nothing, with_gems, run], 20, summary=min)
    return (ours - empty) / calls, peer / calls


def _nothing() -> None:
    with gems():
        pass


def rows_of(names: Sequence[str]) -> list[report.Row]:
    found = []
    for label, side in SIDES.items():
        x = torch.randn(side, side, device="cuda")
        for name in names:
            ours, peer = seconds(CALLS[name], x)
            found.append(report.Row(f"{name} {label}", "µs", 0.0, ours * 1e6, peer * 1e6))
    return found


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    options = report.parser(__doc__).parse_args()
    with torch.no_grad(), gems() as active:
        x = torch.randn(4, 4, device="cuda")
        for call in CALLS.values():
            call(x)
        counted = {name: report for name, report in active.reports().items() if report.flaggems or report.native}
    notes = [f"FlagGems computed {sorted(n for n, r in counted.items() if r.flaggems)}"]
    notes += [f"PyTorch computed {n}: {dict(r.native)}" for n, r in counted.items() if r.native]
    with torch.no_grad():
        rows = rows_of(list(CALLS))
    report.publish("gems_accelerator", rows, options.save, notes, peer="eager", device=torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
