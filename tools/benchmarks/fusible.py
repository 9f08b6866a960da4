"""What fusible operations cost beside plain modules: a LayerNorm-MLP compiled with its gradients, and eager calls of
single operations with theirs. In one process, taking turns; the least of all rounds counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from flagos_backend.frontends.torch.compile.backend import flagos
from flagos_backend.torch import ops

from . import report

#: Plain modules' time over ours, and microseconds of an eager operation more than a plain module.
RATIO, MORE = 0.98, 10.0
_SMALL = 8


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, forward and backward."""

    name: str
    ours: float
    plain: float


def _pairs(width: int) -> dict[str, tuple[torch.nn.Module, torch.nn.Module]]:
    """Ours and the plain module that computes the same."""
    return {
        "GELU": (ops.GELU(), torch.nn.GELU(approximate="tanh")),
        "SiLU": (ops.SiLU(), torch.nn.SiLU()),
        "LayerNorm": (ops.LayerNorm(width), torch.nn.LayerNorm(width)),
        "RMSNorm": (ops.RMSNorm(width), torch.nn.RMSNorm(width, eps=1e-5)),
        "Linear": (ops.Linear(width, width), torch.nn.Linear(width, width)),
    }


def mlp(kind: str, width: int, inner: int) -> torch.nn.Module:
    """LayerNorm, Linear, GELU, Linear: of plain modules or of ours."""
    if kind == "plain":
        nn = torch.nn
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width)
        )
    return ops.Sequential(ops.LayerNorm(width), ops.Linear(width, inner), ops.GELU(), ops.Linear(inner, width))


def _step(run: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    grad = torch.randn_like(run(x))
    wanted = [x, *module.parameters()]

    def step() -> None:
        torch.autograd.grad(run(x), wanted, grad)

    return step


def least(steps: dict[str, Callable[[], None]], rounds: int, calls: int, wait: Callable[[], None]) -> dict[str, float]:
    """The least seconds of a step over rounds of calls, in turns."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds + 1):
        for name, step in steps.items():
            wait()
            began = time.perf_counter()
            for _ in range(calls):
                step()
            wait()
            best[name] = min(best[name], (time.perf_counter() - began) / calls)
    return best


def measure(device: torch.device, rows: int, width: int, inner: int, dtype: torch.dtype, rounds: int) -> list[Measured]:
    """The compiled MLP first, then single operations and the whole MLP eagerly on small tensors."""
    wait = torch.get_device_module(device).synchronize
    found: list[Measured] = []
    x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    steps = {}
    for kind in ("ours", "plain"):
        module = mlp(kind, width, inner).to(device, dtype)
        steps[kind] = _step(torch.compile(module, backend=flagos, fullgraph=True), module, x)
    found.append(Measured("LayerNorm-MLP, compiled", **least(steps, rounds, 5, wait)))
    small = torch.randn(_SMALL, _SMALL, device=device, requires_grad=True)
    pairs = _pairs(_SMALL)
    pairs["MLP"] = (mlp("ours", _SMALL, _SMALL), mlp("plain", _SMALL, _SMALL))
    for name, (ours, plain) in pairs.items():
        eager = {kind: _step(module.to(device), module, small) for kind, module in (("ours", ours), ("plain", plain))}
        found.append(Measured(f"{name}, eager", **least(eager, rounds * 5, 50, wait)))
    return found


def render(rows: list[Measured], source: report.Origin, sizes: str) -> str:
    """Microseconds, plain over ours, and the difference."""
    lines = [f"{'':28}{'ours µs':>12}{'plain µs':>12}{'plain/ours':>12}{'more µs':>10}"]
    for row in rows:
        more = (row.ours - row.plain) * 1e6
        lines.append(
            f"{row.name:28}{row.ours * 1e6:12.4g}{row.plain * 1e6:12.4g}{row.plain / row.ours:12.3f}{more:10.2f}"
        )
    lines.append(f"goals: compiled plain/ours ≥ {RATIO}, eager ≤ {MORE} µs more an operation (the MLP has 4)")
    lines.append(sizes)
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", help="of the compiled MLP: float32, bfloat16, ...")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    rows = measure(device, options.rows, options.width, options.inner, dtype, options.rounds)
    name = "" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    source = report.origin("fusible", name)
    text = render(rows, source, f"{options.rows} rows, {options.width} → {options.inner}, {options.dtype}")
    print(text, end="")
    if options.save:
        report.keep("fusible", text, asdict(source) | {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
