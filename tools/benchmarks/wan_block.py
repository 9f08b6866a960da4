"""One block of WAN 1.3B: the operators of the platform flagos, compiled, against LightX2V's stock ones with SDPA, eager
and with Inductor; in one process and taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from flagos_backend.frontends.torch.compile.backend import flagos

from . import report
from .programs.wan_block import OURS, STOCK, Inputs, Operators, Sizes, Weights, block
from .torch_speed import take_turns

#: How far from stock a contender may be.
ALLOWED = {"bf16": 5e-3, "fp8": 2.5e-2, "int8": 1e-2}
_COMPILE: dict[str, Callable[..., Callable[..., torch.Tensor]]] = {
    "eager": lambda function: function,
    "inductor": torch.compile,
    "inductor, max-autotune": lambda function: torch.compile(function, mode="max-autotune-no-cudagraphs"),
    "flagos": lambda function: torch.compile(function, backend=flagos, fullgraph=True),
}


@dataclass(frozen=True)
class Measured:
    """``seconds`` of one block and of the ``first`` call; ``apart``: the norm of the difference from stock, eager, over
    its norm. ``error``: why there are none."""

    operators: str
    scheme: str
    compiler: str
    seconds: float = float("nan")
    first: float = float("nan")
    apart: float = float("nan")
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.operators} {self.scheme}, {self.compiler}"


def contenders(schemes: list[str], compilers: list[str]) -> list[Measured]:
    """Stock first, eager: it is what the others are compared with."""
    stock = [Measured("stock", "bf16", compiler) for compiler in compilers if compiler != "flagos"]
    ours = [Measured("ours", scheme, compiler) for scheme in schemes for compiler in ("eager", "flagos")]
    return stock + ours


def measure(sizes: Sizes, device: torch.device, rows: list[Measured]) -> list[Measured]:
    """Fills in the rows. A contender that fails, or is too far from stock, has an error instead of a time."""
    inputs = Inputs.of(sizes, device)
    module = torch.get_device_module(device)
    weights = {scheme: Weights(sizes, device, scheme) for scheme in {row.scheme for row in rows}}
    room = torch.empty_like(inputs.x)
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    expected: torch.Tensor | None = None
    for number, row in enumerate(rows):
        operators: Operators = STOCK if row.operators == "stock" else OURS
        frequencies = inputs.frequencies if row.operators == "stock" else inputs.cache
        run = _COMPILE[row.compiler](block(operators, weights[row.scheme]))

        def step(run: Callable[..., torch.Tensor] = run, frequencies: torch.Tensor = frequencies) -> torch.Tensor:
            return run(room.copy_(inputs.x), inputs.embedding, inputs.context, frequencies)

        try:
            began = time.perf_counter()
            found = step().double()
            module.synchronize()
            first = time.perf_counter() - began
            expected = found if expected is None else expected
            apart = float((found - expected).norm() / expected.norm())
            if not apart <= ALLOWED[row.scheme]:
                raise ArithmeticError(f"{apart:.3g} apart from stock, and {ALLOWED[row.scheme]} allowed")
            for _ in range(4):
                step()
            steps[row.name] = step
            rows[number] = replace(row, first=first, apart=apart)
        except Exception as error:
            rows[number] = replace(row, error=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    seconds = take_turns(steps, module.synchronize)
    return [replace(row, seconds=seconds[row.name]) if row.name in seconds else row for row in rows]


def render(rows: list[Measured], sizes: Sizes, source: report.Origin) -> str:
    """Milliseconds, and the two ratios that have a goal."""
    lines = [f"{'':40}{'ms':>10}{'TFLOP/s':>10}{'apart':>10}{'first s':>10}"]
    for row in rows:
        rate = sizes.flops / row.seconds / 1e12
        lines.append(f"{row.name:40}{row.seconds * 1e3:10.4g}{rate:10.4g}{row.apart:10.2g}{row.first:10.3g}")
        lines += [f"  {row.error}"] if row.error else []
    best = {
        (operators, scheme): min(times)
        for operators in ("stock", "ours")
        for scheme in ALLOWED
        if (times := [r.seconds for r in rows if (r.operators, r.scheme) == (operators, scheme) and not r.error])
    }
    goals = ((("stock", "bf16"), ("ours", "bf16"), 1.1), (("ours", "bf16"), ("ours", "fp8"), 1.3))
    for slower, faster, goal in goals:
        if slower in best and faster in best:
            ratio = best[slower] / best[faster]
            lines.append(f"{' '.join(slower)} over {' '.join(faster)}: {ratio:.3f} (goal ≥ {goal})")
    lines.append(f"{sizes}")
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.set_defaults(device="cuda")
    parser.add_argument("--schemes", default="bf16,fp8", help="of bf16, fp8 and int8, by commas")
    parser.add_argument("--compilers", default=",".join(_COMPILE), help="of stock: eager, inductor, ...")
    for field in ("tokens", "width", "heads", "inner", "context"):
        parser.add_argument(f"--{field}", type=int, default=getattr(Sizes, field))
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = Sizes(options.tokens, options.width, options.heads, options.inner, options.context)
    compilers = [name for name in _COMPILE if name == "eager" or name in options.compilers]
    with torch.no_grad():
        rows = measure(sizes, device, contenders(options.schemes.split(","), compilers))
    name = "" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    source = report.origin("wan_block", name)
    text = render(rows, sizes, source)
    print(text, end="")
    if options.save:
        report.keep("wan_block", text, asdict(source) | {"sizes": asdict(sizes), "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
