"""PyTorch programs on an accelerator: torch.compile(backend="flagos") against eager and Inductor's modes, in one
process and taking turns."""

from __future__ import annotations

import fnmatch
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from benchmarks import report
from benchmarks.torch_models import Gpt2, LlamaBlock, resnet18
from flagos_backend.torch.compile.backend import flagos

EAGER, OURS = "eager", "flagos"
MODES = ("default", "reduce-overhead", "max-autotune")

# Runs once; what it returns is compared with eager's.
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Program:
    """``make`` builds the program on a device around a compiler of functions and modules, random inputs included.
    ``bytes_moved``, ``flops``: the least there is to do. ``precision``: largest difference from eager's result,
    relative to its largest magnitude."""

    name: str
    make: Callable[[torch.device, Callable[..., Callable[..., torch.Tensor]]], Step]
    bytes_moved: float = 0.0
    flops: float = 0.0
    precision: float = 2e-2


@dataclass(frozen=True)
class Measured:
    """Seconds of one run of each contender, and of its first; or why there are none."""

    name: str
    floor: float
    seconds: dict[str, float]
    first: dict[str, float]
    errors: dict[str, str]

    @property
    def speedup(self) -> float | None:
        """The time of Inductor's best mode over ours: above 1 is faster."""
        peers = [self.seconds[mode] for mode in MODES if mode in self.seconds]
        return min(peers) / self.seconds[OURS] if peers and OURS in self.seconds else None


def _rows(name: str, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], backward: bool) -> Program:
    """A function of bfloat16 arrays; with ``backward`` its gradients, for a random one of its result."""

    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        arrays = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=backward) for shape in shapes]
        gradient, run = torch.randn(shapes[0], device=device, dtype=torch.bfloat16), compiler(function)
        if not backward:
            return lambda: run(*arrays)
        return lambda: torch.autograd.grad(run(*arrays), arrays, gradient)[0]

    whole, rest = math.prod(shapes[0]), sum(map(math.prod, shapes[1:]))
    # Backward as well: the array is read again, with the gradient of the result, and a gradient is written.
    return Program(f"{name} {shapes[0][0]}x{shapes[0][1]}", make, 2.0 * ((5 if backward else 2) * whole + rest))


def _cross_entropy(rows: int, vocabulary: int) -> Program:
    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(vocabulary, (rows,), device=device)
        run = compiler(lambda x, y: functional.cross_entropy(x.float(), y))
        return lambda: torch.autograd.grad(run(logits, labels), [logits])[0]

    return Program(f"cross-entropy and gradient {rows}x{vocabulary}", make, 2.0 * 3 * rows * vocabulary)


def _inference(name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], flops: float) -> Program:
    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        module = model().to(device, torch.bfloat16).eval()
        x, run = torch.randn(shape, device=device, dtype=torch.bfloat16), compiler(module)

        def step() -> torch.Tensor:
            with torch.no_grad():
                return run(x)

        return step

    return Program(name, make, flops=flops)


def _training(name: str, layers: int, batch: int, length: int, width: int, vocabulary: int) -> Program:
    """GPT-2 in bfloat16 with fused AdamW, which runs eagerly for everyone."""

    def make(device: torch.device, compiler: Callable[..., Callable[..., torch.Tensor]]) -> Step:
        torch.manual_seed(0)
        model = Gpt2(layers, width, width // 64, vocabulary).to(device, torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        tokens, run = torch.randint(vocabulary, (batch, length), device=device), compiler(model)

        def step() -> torch.Tensor:
            loss = run(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    weights = 12.0 * layers * width**2 + vocabulary * width
    flops = 6.0 * batch * length * (weights + layers * length * width)
    return Program(f"{name} {batch}x{length}", make, flops=flops)


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight)


def llama_flops(width: int, hidden: int) -> float:
    """Operations of a Llama block's products for one position, attention's scores left out."""
    return 2.0 * (4 * width**2 + 3 * width * hidden)


def programs() -> list[Program]:
    """Kernels, then models."""
    big, width = (16384, 8192), (8192,)
    block = llama_flops(2048, 5632)
    return [
        _rows("gelu times", lambda x, y: functional.gelu(x) * y, big, big, backward=False),
        _rows("softmax", lambda x: x.softmax(-1), big, backward=False),
        _rows("softmax, gradient", lambda x: x.softmax(-1), big, backward=True),
        _rows("layer norm", _norm, big, width, width, backward=False),
        _rows("layer norm, gradient", _norm, big, width, width, backward=True),
        _rows("RMS norm", _rms_norm, big, width, backward=False),
        _cross_entropy(8192, 32000),
        _inference("Llama block prefill 4x2048", lambda: LlamaBlock(2048, 16, 5632), (4, 2048, 2048), 8192 * block),
        _inference("Llama block 1x128", lambda: LlamaBlock(2048, 16, 5632), (1, 128, 2048), 128 * block),
        _training("GPT-2 768 x12 training", 12, 8, 1024, 768, 50304),
        _inference("ResNet-18 inference 64", resnet18, (64, 3, 224, 224), 64 * 3.6e9),
    ]


def _compilers(modes: Sequence[str]) -> dict[str, Callable[..., Callable[..., torch.Tensor]]]:
    found: dict[str, Callable[..., Callable[..., torch.Tensor]]] = {
        OURS: lambda function: torch.compile(function, backend=flagos),
        EAGER: lambda function: function,
    }
    for mode in modes:
        found[mode] = lambda function, mode=mode: torch.compile(function, mode=mode)
    return found


def measure(program: Program, device: torch.device, modes: Sequence[str], peak: tuple[float, float]) -> Measured:
    """One row. A contender that fails, or gives another result than eager, has an error instead of a time."""
    module = torch.get_device_module(device)
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    results: dict[str, torch.Tensor] = {}
    errors: dict[str, str] = {}
    for name, compiler in _compilers(modes).items():
        torch.compiler.reset()
        try:
            step = program.make(device, compiler)
            module.synchronize()
            began = time.perf_counter()
            step()
            module.synchronize()
            first[name] = time.perf_counter() - began
            for _ in range(4):
                results[name] = step().clone()
            steps[name] = step
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    expected = results[EAGER].double()
    for name in [name for name in steps if name != EAGER]:
        apart = float((results[name].double() - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
        if not apart <= program.precision:
            errors[name] = f"differs from eager by {apart:.3g} of the largest magnitude"
            del steps[name]
    floor = max(program.bytes_moved / peak[0], program.flops / peak[1])
    return Measured(program.name, floor, _take_turns(steps, module.synchronize), first, errors)


def _take_turns(steps: dict[str, Step], synchronize: Callable[[], None]) -> dict[str, float]:
    """Median seconds of a step, of ten launched one after the other."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(10):
        for name, step in steps.items():
            synchronize()
            began = time.perf_counter()
            for _ in range(10):
                step()
            synchronize()
            times[name].append((time.perf_counter() - began) / 10)
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak_of(device: torch.device) -> tuple[float, float]:
    """Bytes and operations in a second: of a copy, and of a product of bfloat16."""
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    big, product = x.repeat(4, 1), torch.empty_like(x)
    target = torch.empty_like(big)
    module = torch.get_device_module(device)
    times = _take_turns(
        {"copy": lambda: target.copy_(big), "product": lambda: torch.mm(x, x, out=product)}, module.synchronize
    )
    return 2.0 * big.nbytes / times["copy"], 2.0 * 8192**3 / times["product"]


def _lines(row: Measured, modes: Sequence[str]) -> list[str]:
    names = (OURS, EAGER, *modes)
    cells = "".join(f"{row.seconds[n] * 1e3:17.4g}" if n in row.seconds else f"{'-':>17}" for n in names)
    speedup = f"{row.speedup:9.2f}" if row.speedup else f"{'-':>9}"
    first = "".join(f"{row.first.get(name, math.nan):11.3g}" for name in (OURS, *modes[:1]))
    errors = [f"  {name}: {error}" for name, error in row.errors.items()]
    return [f"{row.name:34}{row.floor * 1e3:9.4g}{cells}{speedup}{first}", *errors]


def render(rows: Sequence[Measured], modes: Sequence[str], source: report.Origin) -> str:
    """Milliseconds of each contender, the speedup over Inductor's best mode, our first call and that of its first."""
    names = (OURS, EAGER, *modes)
    lines = [f"{'ms':34}{'floor':>9}" + "".join(f"{name:>17}" for name in names) + f"{'speedup':>9}{'first s':>11}"]
    lines[0] += "".join(f"{mode + ' s':>11}" for mode in modes[:1])
    lines += [text for row in rows for text in _lines(row, modes)]
    speedups = [row.speedup for row in rows if row.speedup]
    if speedups:
        mean = math.exp(statistics.fmean(map(math.log, speedups)))
        lines.append(f"geometric mean of {len(speedups)} speedups: {mean:.2f}, smallest {min(speedups):.2f}")
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="*", help="a glob on the programs' names")
    parser.add_argument("--modes", default=",".join(MODES), help="Inductor's modes, by commas")
    parser.set_defaults(device="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    modes = [mode for mode in options.modes.split(",") if mode]
    peak = peak_of(device)
    rows = []
    source = report.origin("torch_speed", torch.get_device_module(device).get_device_name())
    for program in programs():
        if fnmatch.fnmatch(program.name, options.only):
            rows.append(measure(program, device, modes, peak))
            print(*_lines(rows[-1], modes), sep="\n", flush=True)
            if options.save:  # compiling takes Inductor minutes: a run that is cut short leaves what it has
                content = asdict(source) | {"rows": [asdict(row) for row in rows]}
                report.keep("torch_speed", render(rows, modes, source), content)
    print(render(rows, modes, source), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
