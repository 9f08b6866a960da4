"""torch.compile on host tensors: what a call costs, what compiling costs, and steps against PyTorch's eager mode."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flagos_backend.frontends.torch.compile.backend import flagos

from . import report
from .torch_models import Block, Gpt2, resnet18


def _nothing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """A backend whose graphs return what was computed when they were compiled: the cost of Dynamo itself."""
    outputs = graph(*inputs)
    return lambda *_: outputs


def call_overhead(peer: str) -> report.Row:
    """A tiny function, called."""
    x = torch.zeros(4, 4)
    with torch.no_grad():
        calls = []
        for backend in (_nothing, flagos, peer):

            def tiny(x: torch.Tensor) -> torch.Tensor:
                return x + 1

            run = torch.compile(tiny, backend=backend)
            run(x)
            calls.append(lambda run=run: run(x))
        floor, ours, theirs = report.alternate(calls, rounds=50, calls=100)
    return report.Row(
        f"x + 1 vs {peer}", "µs", floor * 1e6, ours * 1e6, theirs * 1e6, 1.0 if peer == "inductor" else None
    )


def _training_step(model: torch.nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        run(x).sum().backward()

    return step


def block_training() -> report.Row:
    """Forward and backward of GPT-2's block on [1, 128, 768]."""
    model, x = Block(), torch.randn(1, 128, 768)
    compiled = torch.compile(model, backend=flagos)
    steps = [_training_step(model, run, x) for run in (compiled, model)]
    ours, theirs = report.alternate(steps, rounds=15)
    return report.Row("GPT-2 block step vs eager", "ms", 0.0, ours * 1e3, theirs * 1e3, 1.05)


def resnet_inference() -> report.Row:
    """ResNet-18 on [1, 3, 224, 224]."""
    model, images = resnet18().eval(), torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        compiled = torch.compile(model, backend=flagos)
        ours, theirs = report.alternate([lambda: compiled(images), lambda: model(images)], rounds=15)
    return report.Row("ResNet-18 vs eager", "ms", 0.0, ours * 1e3, theirs * 1e3, 1.05)


def small_layers() -> report.Row:
    """24 linear layers of 64 on [8, 64]: what the steps of a program cost beside their work."""
    model, x = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24))), torch.randn(8, 64)
    with torch.no_grad():
        compiled = torch.compile(model, backend=flagos)
        ours, theirs = report.alternate([lambda: compiled(x), lambda: model(x)], rounds=30, calls=20)
    return report.Row("24 small layers vs eager", "µs", 0.0, ours * 1e6, theirs * 1e6, 1.05)


def memory_growth(steps: int) -> str:
    """Resident memory that training steps of GPT-2's block add after the first tenth of them, as a note."""

    def growth(run: Callable[..., torch.Tensor], model: torch.nn.Module) -> float:
        step = _training_step(model, run, torch.randn(1, 64, 768))
        for _ in range(steps // 10):
            step()
        before = _resident_bytes()
        for _ in range(steps - steps // 10):
            step()
        return (_resident_bytes() - before) / 1e6

    model = Block()
    ours, theirs = growth(torch.compile(model, backend=flagos), model), growth(model, model)
    return f"{steps} training steps of the block: resident memory grew by {ours:.1f} MB, in eager by {theirs:.1f} MB"


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def compile_time(layers: int) -> report.Row:
    """From the first call of a GPT-2 to its gradients, nothing cached."""
    tokens = torch.randint(5000, (1, 32))
    seconds = []
    with torch._inductor.config.patch(force_disable_caches=True):
        for backend in (flagos, "inductor"):
            torch._dynamo.reset()
            model = Gpt2(layers)
            began = time.perf_counter()
            torch.compile(model, backend=backend)(tokens).backward()
            seconds.append(time.perf_counter() - began)
    ours, theirs = seconds
    return report.Row(f"compile GPT-2 x{layers} vs inductor", "s", 0.0, ours, theirs, 0.5)


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, default=12, help="layers of the GPT-2 whose compile time is measured")
    parser.add_argument("--steps", type=int, default=500, help="training steps over which memory must not grow")
    parser.add_argument("--inductor", action="store_true", help="measure against Inductor too, which needs g++")
    options = parser.parse_args()
    rows = [call_overhead("aot_eager"), small_layers(), block_training(), resnet_inference()]
    notes = [memory_growth(options.steps)]
    if options.inductor:
        rows += [call_overhead("inductor"), compile_time(options.layers)]
    report.publish("torch_compile", rows, options.save, notes, peer="peer")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
