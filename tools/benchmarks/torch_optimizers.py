"""Compiled steps of AdamW, against eager's and Inductor's, taking turns: of few large parameters, and of a GPT-2's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from . import report

LARGE = [(2048, 2048)] * 8
_WIDTH = 512
_LAYER = [(_WIDTH, 3 * _WIDTH), (3 * _WIDTH,), (_WIDTH, _WIDTH), (_WIDTH,), (_WIDTH, 4 * _WIDTH), (4 * _WIDTH,)]
_LAYER += [(4 * _WIDTH, _WIDTH), (_WIDTH,), (_WIDTH,), (_WIDTH,)]
SHAPES: dict[str, Sequence[tuple[int, ...]]] = {
    "AdamW, 8 of 2048 x 2048": LARGE,
    "AdamW, 61 of a GPT-2": [(8000, _WIDTH), *_LAYER * 6],
}
#: What reads and writes every element of a parameter, its gradient and two moments: seven passes of float32.
_BYTES = 7 * 4


def step_of(shapes: Sequence[tuple[int, ...]], device: torch.device, backend: str) -> Callable[[], object]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    compiled = backend != "eager"
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, capturable=compiled and device.type == "cuda")
    step: Callable[[], object] = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
    return step


def measure(shapes: Sequence[tuple[int, ...]], device: torch.device, backends: Sequence[str]) -> dict[str, list[float]]:
    """By backend: median seconds of a step, seconds of the first two, and bytes at the peak where the device counts."""
    module = torch.get_device_module(device)
    figures: dict[str, list[float]] = {}
    steps = {}
    for backend in backends:
        torch.compiler.reset()
        steps[backend] = step_of(shapes, device, backend)
        began = time.perf_counter()
        for _ in range(2):
            steps[backend]()
        module.synchronize()
        first = time.perf_counter() - began
        for _ in range(6):
            steps[backend]()
        peak = 0.0
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            steps[backend]()
            peak = float(torch.cuda.max_memory_allocated() - before)
        figures[backend] = [0.0, first, peak]
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    for _ in range(20):
        for backend, step in steps.items():
            module.synchronize()
            began = time.perf_counter()
            for _ in range(5):
                step()
            module.synchronize()
            times[backend].append((time.perf_counter() - began) / 5)
    for backend in backends:
        figures[backend][0] = statistics.median(times[backend])
    return figures


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    size = 1 << 26
    source, target = torch.randn(size, device=device), torch.empty(size, device=device)
    module = torch.get_device_module(device)
    copies = []
    for _ in range(8):
        module.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        module.synchronize()
        copies.append(time.perf_counter() - began)
    bandwidth = 2 * source.nbytes / min(copies)
    del source, target
    rows, notes = [], []
    for name, shapes in SHAPES.items():
        figures = measure(shapes, device, ("eager", "flagos", "inductor"))
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        floor = elements * _BYTES / bandwidth
        ours = figures["flagos"][0] * 1e3
        rows += [
            report.Row(f"{name}: {p}", "ms", floor * 1e3, ours, figures[p][0] * 1e3) for p in ("eager", "inductor")
        ]
        said = [f"{b} {first:.2f} s, {peak / 1e6:.0f} MB" for b, (_, first, peak) in figures.items()]
        notes.append(f"{name}: first two steps, and memory within one: {'; '.join(said)}")
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    report.publish(
        f"torch_optimizers{'_accelerator' if name else ''}", rows, options.save, notes, peer="torch", device=name
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
