"""Measures accuracy of a platform and of JAX's CPU; prints a table, and keeps it with --save."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tools.accuracy import measure, reductions
from tools.accuracy.functions import FUNCTIONS, Elementary
from tools.accuracy.measure import Errors
from tools.accuracy.reductions import REDUCTIONS
from tools.benchmarks.report import hardware, versions

_TYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "c64": np.dtype(np.complex64),
    "c128": np.dtype(np.complex128),
}
# How many random points: exact values of wide and complex types cost a tenth of a millisecond each.
_COUNTS = {"f16": 20000, "bf16": 20000, "f32": 100000, "f64": 1500, "c64": 500, "c128": 500}
# Within half a unit, or beyond the peer by less than a twentieth and this, nobody is the better one.
_SLACK = 0.02
# The greatest of 256 draws of one distribution scatters by an eighth: two of them differ by a fourth easily.
_GREATEST_OF_DRAWS = 1.25
_DRAWN = frozenset(reduction.name for reduction in REDUCTIONS)
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Line:
    function: str
    type: str
    ours: Errors
    theirs: Errors

    @property
    def is_worse(self) -> bool:
        """Whether the peer is the more accurate one in any respect."""
        greatest_factor = _GREATEST_OF_DRAWS if self.function in _DRAWN else 1.05
        return any(
            mine > max(factor * other, 0.5) + _SLACK
            for mine, other, factor in (
                (self.ours.greatest, self.theirs.greatest, greatest_factor),
                (self.ours.mean, self.theirs.mean, 1.05),
                (self.ours.subnormal, self.theirs.subnormal, 1.05),
            )
        ) or (self.ours.wrong > self.theirs.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.accuracy", description=__doc__)
    parser.add_argument("--device", default="flagos", help="the platform that is measured beside cpu")
    parser.add_argument("--types", nargs="*", default=list(_TYPES), choices=list(_TYPES))
    parser.add_argument("--only", default="", help="functions whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help=f"write the result into {RESULTS.name}/")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    lines = [
        _function(function, name, options.device, options.seed)
        for function in FUNCTIONS
        for name in options.types
        if options.only in function.name and (function.complex or not name.startswith("c"))
    ]
    lines += [
        _reduction(reduction, name, options.device, options.seed)
        for reduction in REDUCTIONS
        for name in options.types
        if options.only in reduction.name and not name.startswith("c")
    ]
    print(_table(lines))
    if options.save:
        _save(lines)
    return int(any(line.is_worse for line in lines))


def _save(lines: list[Line]) -> None:
    """Writes ``lines`` into results/, where they take the place of what was kept of the same functions and types."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "accuracy.json"
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"runs": [], "lines": []}
    new = {(line.function, line.type): asdict(line) for line in lines}
    joined = {(line["function"], line["type"]): line for line in kept["lines"]} | new
    run = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m tools.accuracy", *sys.argv[1:]]),
        "hardware": hardware(),
        "versions": versions(),
    }
    is_whole = new.keys() == joined.keys()
    record = {"runs": [run] if is_whole else [*kept["runs"], run], "lines": list(joined.values())}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    rows = [
        Line(line["function"], line["type"], Errors(**line["ours"]), Errors(**line["theirs"]))
        for line in record["lines"]
    ]
    origin = "".join(f"{r['hardware']}; {r['date']}; {r['command']}\n" for r in record["runs"])
    (RESULTS / "accuracy.txt").write_text(f"{_table(rows)}\n{origin}", encoding="utf-8")


def _on(platform: str, function: Any, arguments: tuple[np.ndarray, ...]) -> np.ndarray:
    device = jax.devices(platform)[0]
    with jax.default_device(device):
        return np.asarray(jax.jit(function)(*(jax.device_put(a, device) for a in arguments)))


def _function(function: Elementary, name: str, device: str, seed: int) -> Line:
    dtype = _TYPES[name]
    rng = np.random.default_rng([seed, len(function.name), dtype.itemsize])
    real = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    points = measure.points(function, real, _COUNTS[name], rng)
    if dtype.kind == "c":
        points = tuple((column + 1j * rng.permutation(column)).astype(dtype) for column in points)
    exact = measure.exact_values(function, points)
    ours, theirs = (measure.errors(_on(p, function.call, points), exact) for p in (device, "cpu"))
    return Line(function.name, name, ours, theirs)


def _reduction(reduction: reductions.Reduction, name: str, device: str, seed: int) -> Line:
    rng = np.random.default_rng([seed, len(reduction.name)])
    found: dict[str, list[np.ndarray]] = {device: [], "cpu": []}
    for size in reduction.sizes:
        columns = reductions.arguments(reduction, _TYPES[name], size, rng)
        for platform, units in found.items():
            units.append(reductions.errors(reduction, _on(platform, reduction.call, columns), columns))
    ours, theirs = (
        Errors(float(units.max()), float(units.mean()), 0.0, 0) for units in map(np.concatenate, found.values())
    )
    return Line(reduction.name, name, ours, theirs)


def _table(lines: list[Line]) -> str:
    """Errors in units in the last place; an exclamation mark where the peer is better."""
    head = f"{'':12}{'':6}{'greatest':>22}{'mean':>22}{'subnormal':>24}{'wrong':>12}"
    sub = f"{'':18}" + f"{'ours':>11}{'JAX CPU':>11}" * 2 + f"{'ours':>12}{'JAX CPU':>12}{'ours':>6}{'JAX':>6}"
    rows = [head, sub]
    for line in lines:
        o, t = line.ours, line.theirs
        rows.append(
            f"{line.function:12}{line.type:6}{o.greatest:11.4g}{t.greatest:11.4g}{o.mean:11.4g}{t.mean:11.4g}"
            f"{o.subnormal:12.4g}{t.subnormal:12.4g}{o.wrong:6}{t.wrong:6}{'  !' if line.is_worse else ''}"
        )
    rows.append(f"{sum(line.is_worse for line in lines)} of {len(lines)} are less accurate than JAX's CPU")
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
