"""JAX programs on flagos against XLA's own platform for the same hardware, in one process and taking turns."""

from __future__ import annotations

import argparse
import fnmatch
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import report
from .programs import Program, Scale, everyday, programs, wild

# Calls after which a program runs as it does from then on: accelerators replay what has run a few times.
_FIRST_CALLS = 5
# Seconds of calls one after another before the other side's turn: the wait at their end takes tenths of a millisecond.
_LEAST_TURN = 0.05
# Elements that one thread compares at a time.
_PART = 1 << 20
# Arrays whose magnitudes stay below this are zero but for rounding, as the gradient of a bias of attention's keys is.
_NOISE = 1e-12
# How much further from the exact results ours may be than the peer's, where both are mostly rounding: two draws of it.
_DRAW = 1.25


@dataclass(frozen=True)
class Peak:
    """What a side does of simple work in a second: bytes read and written, operations of a product."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Measured:
    """Seconds of one call, the medians, and of the first; instead of times ``error``, when a side failed or the results
    differ."""

    name: str
    floor: float
    ours: float | None = None
    peer: float | None = None
    ours_first: float | None = None
    peer_first: float | None = None
    error: str = ""

    @property
    def speedup(self) -> float | None:
        """The peer's time over ours: above 1 is faster than the peer."""
        return self.peer / self.ours if self.ours and self.peer else None


# Of the arguments: one device for all, or a sharding for each, as a tree that is a prefix of theirs.
Placement = Any


class Side:
    """A program as ``function`` on arguments that are where ``placement`` says. ``results``, on the host: of the first
    call, and of the one after which it runs as it does from then on; ``trees``: for each array of them, which part of
    the results it belongs to. ``first_seconds``: what the first took to trace, compile and run."""

    def __init__(
        self, program: Program, function: Callable[..., Any], placement: Placement, arguments: Sequence[Any]
    ) -> None:
        self._donated = program.donated
        self._arguments = list(jax.device_put(tuple(arguments), placement))
        self._call = jax.jit(function, donate_argnums=program.donated)
        began = time.perf_counter()
        result = jax.block_until_ready(self._call(*self._arguments))
        self.first_seconds = time.perf_counter() - began
        first, self.trees = _on_the_host(result), _trees(result)
        if self._donated:
            self._feed_back(result)
        for _ in range(_FIRST_CALLS - 1):
            result = self._run()
        self.results = first, _on_the_host(result)

    def seconds(self, calls: int) -> float:
        """Seconds of one call, of several launched one after the other and waited for together."""
        began = time.perf_counter()
        for _ in range(calls):
            result = self._run()
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / calls

    def _run(self) -> Any:
        result = self._call(*self._arguments)
        if self._donated:  # what a call used up, the next one finds in its results
            self._feed_back(result)
        return result

    def _feed_back(self, result: Any) -> None:
        """Donated arguments come back as the results of the same structure, in order."""
        left = list(result)
        for number in self._donated:
            structure = jax.tree.structure(self._arguments[number])
            shapes = [leaf.shape for leaf in jax.tree.leaves(self._arguments[number])]
            found = next(
                i
                for i, candidate in enumerate(left)
                if jax.tree.structure(candidate) == structure  # type: ignore[operator]
                and [leaf.shape for leaf in jax.tree.leaves(candidate)] == shapes
            )
            self._arguments[number] = left.pop(found)


def _on_the_host(result: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def _trees(result: Any) -> list[str]:
    """For each array its place among the results, the fields on the way to it, and its own name: ``1.mu.kernel``."""

    def name(path: tuple[Any, ...]) -> str:
        fields = [key.name for key in path[1:] if isinstance(key, jax.tree_util.GetAttrKey)]
        names = [str(key.key) for key in path[-1:] if isinstance(key, jax.tree_util.DictKey)]
        return ".".join([jax.tree_util.keystr(path[:1], simple=True), *fields, *names])

    return [name(path) for path, _ in jax.tree_util.tree_flatten_with_path(result)[0]]


def _disagreement(program: Program, ours: Side, peer: Side, exact: Callable[[], list[np.ndarray]]) -> str:
    """Why the sides do not compute the same, or nothing. ``exact``: the first results in higher precision."""
    if not program.donated:
        (first, later), (expected, expected_later) = ours.results, peer.results
        pairs = [(first, expected)]
        if not (_are_same(first, later) and _are_same(expected, expected_later)):
            pairs.append((later, expected_later))
        return next(filter(None, (difference(mine, theirs, program.precision) for mine, theirs in pairs)), "")
    # Of a step all arrays of one name count as one vector: a gradient that is zero but for rounding, as that of a bias
    # before a softmax, is noise alone. Later steps begin from what each side made of the first, so that only all of it
    # together can be compared.
    (first, later), (expected, expected_later) = ours.results, peer.results
    apart = _relative_distance(later, expected_later)
    if not apart <= program.precision:
        return f"after {_FIRST_CALLS} steps the results differ by {apart:.2g}"
    distances = _distances(ours.trees, first, expected)
    far = [tree for tree, distance in distances.items() if not distance <= program.precision]
    if not far:
        return ""
    # Steps in 16 bits round so much that two of them are further apart than either is from the truth: then ours has to
    # be as near to that as the peer's, but for the luck of a draw, or within the bound.
    truth = exact()
    mine, theirs = _distances(ours.trees, first, truth), _distances(ours.trees, expected, truth)
    for tree in far:
        if not mine[tree] <= max(_DRAW * theirs[tree], program.precision):
            return f"{tree} of the results is {mine[tree]:.2g} from the exact ones, the peer's {theirs[tree]:.2g}"
    return ""


def _distances(trees: Sequence[str], ours: Sequence[np.ndarray], peer: Sequence[np.ndarray]) -> dict[str, float]:
    """That of the arrays of each tree."""
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {tree: [] for tree in sorted(set(trees))}
    for tree, mine, theirs in zip(trees, ours, peer, strict=True):
        pairs[tree].append((mine, theirs))
    return {tree: _relative_distance(*zip(*found, strict=True)) for tree, found in pairs.items()}


def _exact(program: Program, placement: Placement, arguments: Sequence[Any]) -> list[np.ndarray]:
    """The results of one call on wider arguments, with products that do not round them."""
    wide = jax.tree.map(lambda a: np.asarray(a, np.float32) if a.dtype == jnp.bfloat16 else a, tuple(arguments))
    with jax.default_matmul_precision("highest"):
        return _on_the_host(jax.jit(program.function)(*jax.device_put(wide, placement)))


def _relative_distance(ours: Sequence[np.ndarray], peer: Sequence[np.ndarray]) -> float:
    """Of two lists of arrays as vectors, relative to the length of the second."""
    with ThreadPoolExecutor() as pool:
        apart = sum(pool.map(lambda a, b: float(np.square(a.astype(np.float64) - b).sum()), ours, peer))
        whole = sum(pool.map(lambda b: float(np.square(b.astype(np.float64)).sum()), peer))
    return math.sqrt(apart / whole) if whole else math.inf if apart else 0.0


def difference(ours: Sequence[np.ndarray], peer: Sequence[np.ndarray], precision: float) -> str:
    """What is wrong with our results, or nothing."""
    for number, (mine, theirs) in enumerate(zip(ours, peer, strict=True)):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"result {number} is {mine.dtype}{mine.shape}, not {theirs.dtype}{theirs.shape}"
        parts = max(1, mine.size // _PART)
        with ThreadPoolExecutor() as pool:
            pairs = zip(np.array_split(mine.reshape(-1), parts), np.array_split(theirs.reshape(-1), parts), strict=True)
            compared = list(pool.map(lambda pair: _compare(*pair), pairs))
        if not all(same for same, _, _ in compared):
            return f"result {number} has its NaNs elsewhere"
        worst, scale = max(worst for _, worst, _ in compared), max(scale for _, _, scale in compared)
        if worst > precision * max(scale, _NOISE):
            return f"result {number} differs by {worst:.3g}, at magnitudes up to {scale:.3g}"
    return ""


def _are_same(first: Sequence[np.ndarray], later: Sequence[np.ndarray]) -> bool:
    """Bit for bit."""
    pairs = zip(first, later, strict=True)
    return all(np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)) for a, b in pairs)


def drop_programs() -> None:
    """Gives back what programs keep of the device on both sides."""
    jax.clear_caches()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _compare(ours: np.ndarray, theirs: np.ndarray) -> tuple[bool, float, float]:
    """Whether NaNs are in the same places, the largest difference, the largest finite magnitude."""
    if ours.dtype.kind == "c":
        ours, theirs = (np.ascontiguousarray(x).view(x.real.dtype) for x in (ours, theirs))
    wide, expected = ours.astype(np.float64), theirs.astype(np.float64)
    same = np.array_equal(np.isnan(wide), np.isnan(expected))
    with np.errstate(invalid="ignore"):
        apart = np.where(wide == expected, 0.0, np.abs(wide - expected))
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return same, float(np.nanmax(apart, initial=0.0)), float(scale)


def measure(
    program: Program,
    arguments: Sequence[Any],
    placements: Sequence[Placement],
    peak: Peak,
    seconds: float,
    *,
    asking: bool = False,
) -> Measured:
    """``placements``: ours and the peer's; about ``seconds`` are spent on each. With ``asking`` the peer's program asks
    for its kernel. One that fails on either side, or gives other results than the peer, is one row that says so."""
    floor = max(program.traffic(tuple(arguments)) / peak.bytes, program.flops / peak.flops)
    functions = program.function, (program.asking if asking else None) or program.function
    sides = []
    for name, placement, function in zip(("flagos", "the peer"), placements, functions, strict=True):
        try:
            sides.append(Side(program, function, placement, arguments))
        except Exception as error:
            return Measured(program.name, floor, error=f"{name}: {type(error).__name__}: {str(error)[:200]}")
    ours, peer = sides
    wrong = _disagreement(program, ours, peer, lambda: _exact(program, placements[1], arguments))
    if wrong:
        return Measured(program.name, floor, error=wrong)
    return Measured(program.name, floor, *take_turns(ours, peer, seconds), ours.first_seconds, peer.first_seconds)


def take_turns(ours: Side, peer: Side, seconds: float) -> tuple[float, float]:
    """Median seconds of a call of each."""
    estimate = max(min(side.seconds(2) for _ in range(2)) for side in (ours, peer))
    calls = max(1, min(20, int(max(seconds / 10, _LEAST_TURN) / estimate)))
    rounds = max(3, min(30, int(seconds / (estimate * calls))))
    taken = [(ours.seconds(calls), peer.seconds(calls)) for _ in range(rounds)]
    return statistics.median(t for t, _ in taken), statistics.median(t for _, t in taken)


def peak_of(device: jax.Device, scale: Scale) -> Peak:
    """The best of a few calls: a copy of a large array, and a product. A chip that multiplies for longer than these few
    milliseconds is slowed down by its power limit, as the product among the programs is."""
    side, dtype = (8192, jnp.bfloat16) if scale is Scale.ACCELERATOR else (1024, jnp.float32)
    x = jax.device_put(jax.random.normal(jax.random.key(0), (side, side), dtype), device)
    big = jnp.tile(x, (4, 1))
    copy, product = jax.jit(lambda a: -a), jax.jit(jnp.matmul)

    def best(call: Callable[[], jax.Array]) -> float:
        times = []
        for _ in range(8):
            began = time.perf_counter()
            for _ in range(5):
                result = call()
            result.block_until_ready()
            times.append((time.perf_counter() - began) / 5)
        return min(times[1:])

    return Peak(2 * big.nbytes / best(lambda: copy(big)), 2.0 * side**3 / best(lambda: product(x, x)))


def best_of(peaks: Sequence[Peak]) -> Peak:
    """What either side reaches, the machine can do."""
    return Peak(max(peak.bytes for peak in peaks), max(peak.flops for peak in peaks))


def line(row: Measured) -> str:
    """One line of the table."""
    if row.speedup is None or row.ours is None or row.peer is None:
        return f"{row.name:44}{row.floor * 1e3:10.4g}  {row.error}"
    figures = f"{row.floor * 1e3:10.4g}{row.ours * 1e3:10.4g}{row.peer * 1e3:13.4g}{row.speedup:9.2f}"
    return f"{row.name:44}{figures}{row.ours_first:14.3g}{row.peer_first:12.3g}"


def _mean(rows: Sequence[Measured]) -> list[str]:
    speedups = [row.speedup for row in rows if row.speedup]
    if not speedups:
        return []
    mean = math.exp(statistics.fmean(map(math.log, speedups)))
    tenth = f", 10th percentile {np.quantile(speedups, 0.1):.2f}" if len(speedups) > 10 else ""
    return [f"geometric mean of {len(speedups)} speedups: {mean:.2f}{tenth}, smallest {min(speedups):.2f}"]


def render(
    rows: Sequence[Measured], asking: Sequence[Measured], peaks: Sequence[Peak], source: report.Origin, peer: str
) -> str:
    """The table, the geometric mean of the speedups, the same of the programs that ask the peer for a kernel, and where
    the figures come from."""
    head = (
        f"{'':44}{'floor ms':>10}{'ours ms':>10}{peer + ' ms':>13}{'speedup':>9}{'first call s':>14}{peer + ' s':>12}"
    )
    lines = [head, *map(line, rows), *_mean(rows)]
    if asking:
        lines += ["where the peer's program asks for its kernel:", *map(line, asking), *_mean(asking)]
    found = (
        f"{side} {peak.bytes / 1e9:.4g} GB/s, {peak.flops / 1e12:.4g} TFLOP/s"
        for side, peak in zip(("ours", peer), peaks, strict=True)
    )
    lines.append(f"measured peaks: {'; '.join(found)}")
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--peer", default="cpu", help="XLA's platform: cpu or cuda")
    parser.add_argument("--only", default="*", help="a glob on the programs' names")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each program")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further program begins")
    parser.add_argument("--scale", type=Scale, help="host or accelerator; by default what the peer is")
    suites = parser.add_mutually_exclusive_group()
    suites.add_argument("--everyday", action="store_true", help="the programs that are no models nor their kernels")
    suites.add_argument("--wild", action="store_true", help="programs as public projects have them, tuned by nobody")
    return parser.parse_args()


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    options = _options()
    # XLA would take three quarters of the memory before anything runs, and captures of large programs find too little.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    scale = options.scale or (Scale.HOST if options.peer == "cpu" else Scale.ACCELERATOR)
    devices = [jax.devices(platform)[0] for platform in (options.device, options.peer)]
    peaks = [peak_of(device, scale) for device in devices]
    best = best_of(peaks)
    suite = everyday() if options.everyday else wild() if options.wild else programs(scale)
    chosen = [program for program in suite if fnmatch.fnmatch(program.name, options.only)]
    deadline = time.monotonic() + options.limit

    rows, asked = [], []
    for program in chosen:
        if time.monotonic() > deadline:
            rows.append(Measured(program.name, math.nan, error="not measured: the time was up"))
            continue
        arguments = program.arguments(np.random.default_rng(0))
        rows.append(measure(program, arguments, devices, best, options.seconds))
        print(line(rows[-1]), flush=True)
        if program.asking:
            asked.append(measure(program, arguments, devices, best, options.seconds, asking=True))
            print(line(asked[-1]), "where it asks for its kernel", flush=True)
        drop_programs()
    source = report.origin("jax_speed", "" if scale is Scale.HOST else devices[1].device_kind)
    text = render(rows, asked, peaks, source, f"XLA {options.peer}")
    print(text, end="")
    if options.save:
        report.keep(
            f"jax_speed_{'everyday_' if options.everyday else 'wild_' if options.wild else ''}{scale.value}",
            text,
            asdict(source)
            | {
                "rows": [asdict(r) for r in rows],
                "asking": [asdict(r) for r in asked],
                "peaks": [asdict(p) for p in peaks],
            },
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
