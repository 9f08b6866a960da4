"""PyTorch programs on an accelerator, or on the host: torch.compile(backend="flagos") against eager and Inductor's
modes, in one process and taking turns."""

from __future__ import annotations

import fnmatch
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from flagos_backend.frontends.torch.compile.backend import flagos

from . import report
from .programs import Scale
from .torch_programs import Program, Step, programs
from .torch_wild import wild

EAGER, OURS = "eager", "flagos"
# Seconds after which it is another contender's turn; a step on an accelerator takes hundredths of it.
_TURN = 0.2
MODES = ("default", "reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Measured:
    """Seconds of one run of each contender, and of its first; or why there are none. ``peers``: those of them that the
    speedup is over."""

    name: str
    floor: float
    seconds: dict[str, float]
    first: dict[str, float]
    errors: dict[str, str]
    peers: tuple[str, ...] = MODES

    @property
    def speedup(self) -> float | None:
        """The time of the fastest peer over ours: above 1 is faster."""
        peers = [self.seconds[name] for name in self.peers if name in self.seconds]
        return min(peers) / self.seconds[OURS] if peers and OURS in self.seconds else None


def _compilers(modes: Sequence[str]) -> dict[str, Callable[..., Callable[..., torch.Tensor]]]:
    found: dict[str, Callable[..., Callable[..., torch.Tensor]]] = {
        OURS: lambda function: torch.compile(function, backend=flagos),
        EAGER: lambda function: function,
    }
    for mode in modes:
        found[mode] = lambda function, mode=mode: torch.compile(function, mode=mode)
    return found


def measure(
    program: Program, device: torch.device, modes: Sequence[str], peers: tuple[str, ...], peak: tuple[float, float]
) -> Measured:
    """One row. A contender that fails, or gives another result than eager, has an error instead of a time."""
    module = torch.get_device_module(device)
    steps: dict[str, Step] = {}
    first: dict[str, float] = {}
    results: dict[str, list[torch.Tensor]] = {}
    errors: dict[str, str] = {}
    torch.compiler.reset()  # not between contenders: it drops what those before have compiled
    for name, compiler in _compilers(modes).items():
        try:
            step = program.make(device, compiler)
            module.synchronize()
            began = time.perf_counter()
            step()
            module.synchronize()
            first[name] = time.perf_counter() - began
            for _ in range(4):
                results[name] = [result.clone() for result in _tensors(step())]
            steps[name] = step
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
    for name in [name for name in steps if name != EAGER]:
        apart = max(map(_distance, results[name], results[EAGER]))
        if not apart <= program.precision:
            errors[name] = f"differs from eager by {apart:.3g} of the largest magnitude"
            del steps[name]
    floor = max(program.bytes_moved / peak[0], program.flops / peak[1])
    return Measured(program.name, floor, take_turns(steps, module.synchronize), first, errors, peers)


def _tensors(result: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else result


def _distance(mine: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    if mine.shape != expected.shape or mine.dtype != expected.dtype:
        return math.inf
    wide = expected.double()
    return float((mine.double() - wide).abs().max() / wide.abs().max().clamp_min(1e-12))


def take_turns(steps: Mapping[str, Step], synchronize: Callable[[], None]) -> dict[str, float]:
    """Median seconds of a step, of up to ten launched one after the other."""

    def seconds(step: Step, calls: int) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize()
        return (time.perf_counter() - began) / calls

    calls = {name: max(1, min(10, int(_TURN / seconds(step, 1)))) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(10):
        for name, step in steps.items():
            times[name].append(seconds(step, calls[name]))
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak_of(device: torch.device, scale: Scale) -> tuple[float, float]:
    """Bytes and operations in a second: of a copy, and of a product of the programs' type."""
    side, dtype = (8192, torch.bfloat16) if scale is Scale.ACCELERATOR else (1024, torch.float32)
    x = torch.randn(side, side, device=device, dtype=dtype)
    big, product = x.repeat(4, 1), torch.empty_like(x)
    target = torch.empty_like(big)
    module = torch.get_device_module(device)
    times = take_turns(
        {"copy": lambda: target.copy_(big), "product": lambda: torch.mm(x, x, out=product)}, module.synchronize
    )
    return 2.0 * big.nbytes / times["copy"], 2.0 * side**3 / times["product"]


def _lines(row: Measured, modes: Sequence[str]) -> list[str]:
    names = (OURS, EAGER, *modes)
    cells = "".join(f"{row.seconds[n] * 1e3:17.4g}" if n in row.seconds else f"{'-':>17}" for n in names)
    speedup = f"{row.speedup:9.2f}" if row.speedup else f"{'-':>9}"
    first = "".join(f"{row.first.get(name, math.nan):11.3g}" for name in (OURS, *modes[:1]))
    errors = [f"  {name}: {error}" for name, error in row.errors.items()]
    return [f"{row.name:34}{row.floor * 1e3:9.4g}{cells}{speedup}{first}", *errors]


def render(rows: Sequence[Measured], modes: Sequence[str], source: report.Origin) -> str:
    """Milliseconds of each contender, the speedup over the fastest peer, our first call and that of the first mode."""
    names = (OURS, EAGER, *modes)
    lines = [f"{'ms':34}{'floor':>9}" + "".join(f"{name:>17}" for name in names) + f"{'speedup':>9}{'first s':>11}"]
    lines[0] += "".join(f"{mode + ' s':>11}" for mode in modes[:1])
    lines += [text for row in rows for text in _lines(row, modes)]
    speedups = [row.speedup for row in rows if row.speedup]
    if speedups:
        mean = math.exp(statistics.fmean(map(math.log, speedups)))
        tenth = f"{np.quantile(speedups, 0.1):.2f}"
        lines.append(
            f"geometric mean of {len(speedups)} speedups over the best of {', '.join(rows[0].peers)}: {mean:.2f}, "
            f"10th percentile {tenth}, smallest {min(speedups):.2f}"
        )
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="*", help="a glob on the programs' names")
    parser.add_argument("--wild", action="store_true", help="programs as public projects have them, tuned by nobody")
    parser.add_argument("--modes", default=",".join(MODES), help="Inductor's modes, by commas")
    parser.set_defaults(device="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    modes = [mode for mode in options.modes.split(",") if mode]
    scale = Scale.HOST if device.type == "cpu" else Scale.ACCELERATOR
    peers = (EAGER, *MODES) if options.wild else MODES
    peak = peak_of(device, scale)
    rows = []
    name = "" if scale is Scale.HOST else torch.get_device_module(device).get_device_name()
    source = report.origin("torch_speed", name)
    for program in wild() if options.wild else programs(scale):
        if fnmatch.fnmatch(program.name, options.only):
            rows.append(measure(program, device, modes, peers, peak))
            print(*_lines(rows[-1], modes), sep="\n", flush=True)
            if options.save:  # compiling takes Inductor minutes: a run that is cut short leaves what it has
                content = asdict(source) | {"rows": [asdict(row) for row in rows]}
                report.keep(
                    f"torch_speed_{'wild_' if options.wild else ''}{scale.value}", render(rows, modes, source), content
                )
    print(render(rows, modes, source), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
