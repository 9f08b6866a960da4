"""Scaling over the devices of one machine: collectives beside the transport's own and XLA's, training steps beside
XLA's and beside one device, and a process that is killed in the middle of a step."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from . import report
from .programs import Scale
from .scaling import model
from .scaling.collectives import SIZES, Timed, of_jax, of_torch
from .scaling.lost_process import Lost, lose_one

_PARTS = ("collectives", "steps", "lost")
# Of one measurement in a process of its own.
_LONGEST_SECONDS = 900
_LATENCY_BYTES, _BANDWIDTH_BYTES = 64 << 10, 64 << 20
# Sizes of all that the last table argues about.
_DEVICES = (64, 256, 1024, 4096)


@dataclass(frozen=True)
class Step:
    """Seconds of a program over all devices, ours, the peer's, and ours on one device; of the first call; bytes of the
    device at the peak. ``error`` instead, where a side failed or the results differ."""

    name: str
    weak: bool = True
    ours: float = math.nan
    peer: float = math.nan
    alone: float = math.nan
    ours_first: float = math.nan
    peer_first: float = math.nan
    ours_peak: float = math.nan
    peer_peak: float = math.nan
    error: str = ""

    def efficiency(self, devices: int) -> float:
        """What is left of the speed of one device, times the devices."""
        return self.alone / self.ours / (1 if self.weak else devices)


def _measure_step(name: str, options: argparse.Namespace) -> Step:
    """In a process of its own: memory's peak and the first call are this program's."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding

    from .jax_speed import Side, difference, take_turns
    from .programs import Program
    from .scaling.programs import AXIS, sharded

    program = next(p for p in sharded(options.scale) if p.name == name)
    sides = [jax.devices(platform)[: options.devices] for platform in (options.device, options.peer)]

    def side(devices: Sequence[Any], arguments: tuple[Any, ...]) -> Side:
        mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        specs = program.specs(arguments, len(devices))
        is_spec = lambda x: isinstance(x, jax.sharding.PartitionSpec)  # noqa: E731
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
        step = program.step(mesh)
        described = Program(name, step, lambda _: arguments)
        return Side(described, step, places, arguments)

    arguments = program.arguments(np.random.default_rng(0), options.devices)
    measured = []
    for whose, devices in zip(("flagos", "the peer"), sides, strict=True):
        try:
            measured.append(side(devices, arguments))
        except Exception as error:
            return Step(name, program.weak, error=f"{whose}: {type(error).__name__}: {str(error)[:200]}")
    ours, peer = measured
    peaks = [devices[0].memory_stats() or {} for devices in sides]
    ours_seconds, peer_seconds = take_turns(ours, peer, options.seconds)
    # One device does all of it once, for the results; what it is timed with is its share.
    alone = side(sides[0][:1], arguments)
    for other, whose in ((peer, "the peer's"), (alone, "those of one device")):
        wrong = difference(ours.results[0], other.results[0], program.precision)
        if wrong:
            return Step(name, program.weak, error=f"beside {whose}: {wrong}")
    if program.weak:
        del alone
        alone = side(sides[0][:1], program.arguments(np.random.default_rng(0), 1))
    return Step(
        name,
        program.weak,
        ours_seconds,
        peer_seconds,
        take_turns(alone, alone, options.seconds)[0],
        ours.first_seconds,
        peer.first_seconds,
        float(peaks[0].get("peak_bytes_in_use", math.nan)),
        float(peaks[1].get("peak_bytes_in_use", math.nan)),
    )


def _measure_collectives(size: int, options: argparse.Namespace) -> dict[str, list[Timed]]:
    """``ours`` and ``xla``: of JAX programs."""
    import jax

    found = {}
    for name, platform in (("ours", options.device), ("xla", options.peer)):
        devices = jax.devices(platform)[: options.devices]
        found[name] = of_jax(devices, size, options.seconds, wait_for_each=options.scale is Scale.HOST)
    return found


def _in_a_process(part: str, what: str, options: argparse.Namespace, backend: str = "") -> Any:
    """The JSON that this module, started for one measurement, ends with; RuntimeError where it fails."""
    command = [sys.executable, "-m", "benchmarks.scale", "--one", part, "--what", what]
    for name in ("device", "peer", "devices", "seconds"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--scale", options.scale.value]
    environment = dict(os.environ)
    if backend:
        environment["FLAGOS_COLLECTIVE_BACKEND"] = backend
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {_LONGEST_SECONDS} s") from None
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _collective_rows(options: argparse.Namespace, backends: Sequence[str]) -> dict[str, list[Timed]]:
    """By what they went over: ``xla``; for each backend ``flagos over B``, and ``B`` alone."""
    sizes = [size for size in SIZES if size <= options.largest]
    found: dict[str, list[Timed]] = {}
    for number, backend in enumerate(backends):
        for size in sizes:
            rows = _in_a_process("collectives", str(size), options, "" if backend == "gloo" else backend)
            # Devices of one process on the host meet in its memory.
            found.setdefault("flagos" if backend == "gloo" else f"flagos over {backend}", []).extend(
                Timed(**row) for row in rows["ours"]
            )
            if number == 0:
                found.setdefault("XLA", []).extend(Timed(**row) for row in rows["xla"])
        found[backend] = of_torch(backend, options.devices, sizes, options.seconds)
    return found


def _collective_lines(rows: dict[str, list[Timed]], devices: int) -> list[str]:
    """Microseconds of short ones, bus bandwidth of the others."""
    names = list(rows)
    lines = [f"{'collective':28}" + "".join(f"{name:>22}" for name in names)]
    keys = sorted({(row.name, row.bytes) for timed in rows.values() for row in timed})
    for collective, size in keys:
        cells = []
        for name in names:
            row = next((r for r in rows[name] if (r.name, r.bytes) == (collective, size)), None)
            if row is None:
                cells.append("-")
            elif size <= _LATENCY_BYTES:
                cells.append(f"{row.seconds * 1e6:.1f} us")
            else:
                cells.append(f"{row.bus_bandwidth(devices) / 1e9:.2f} GB/s")
        lines.append(f"{f'{collective} {size} B':28}" + "".join(f"{cell:>22}" for cell in cells))
    return lines


def _step_lines(steps: Sequence[Step], devices: int) -> list[str]:
    lines = [
        f"{'step':36}{'ours ms':>9}{'XLA ms':>9}{'ratio':>7}{'one ms':>9}{'efficiency':>12}{'first s':>9}{'XLA s':>7}"
        f"{'peak MB':>9}{'XLA MB':>8}"
    ]
    for s in steps:
        if s.error:
            lines.append(f"{s.name:36}  {s.error}")
            continue
        lines.append(
            f"{s.name:36}{s.ours * 1e3:9.4g}{s.peer * 1e3:9.4g}{s.peer / s.ours:7.2f}{s.alone * 1e3:9.4g}"
            f"{s.efficiency(devices):12.2f}{s.ours_first:9.3g}{s.peer_first:7.3g}"
            f"{s.ours_peak / 1e6:9.4g}{s.peer_peak / 1e6:8.4g}"
        )
    return lines


def _argued_lines(rows: dict[str, list[Timed]], steps: Sequence[Step], devices: int, gradient: float) -> list[str]:
    """What the measured link and step say of more devices, were all links like this machine's: an upper bound."""
    ours = next((timed for name, timed in rows.items() if name.startswith("flagos")), [])
    step = next((s for s in steps if "data parallel" in s.name and not s.error), None)
    if not ours or step is None or len({row.bytes for row in ours}) < 2:
        return []
    link = model.fit(ours, devices)
    argued = ", ".join(
        f"{count}: {model.efficiency(step.alone, gradient, 0.0, count, link, link, devices):.2f}" for count in _DEVICES
    )
    return [
        f"all-reduce: alpha {link.alpha * 1e6:.3g} us, beta {link.beta * 1e9:.3g} ns/byte",
        f"efficiency of {step.name} without overlap, were all links like these: {argued}",
    ]


def _lost_lines(lost: Lost) -> list[str]:
    lines = ["a process is killed in a step; the others know after"]
    for rank, (seconds, reason) in enumerate(zip(lost.seconds, lost.reasons, strict=True)):
        lines.append(f"  process {rank}: {'never' if seconds is None else f'{seconds:.1f} s'}: {reason}")
    return lines


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--peer", default="cpu", help="XLA's platform: cpu or cuda")
    parser.add_argument("--devices", type=int, default=0, help="so many of them; by default all, on the host 8")
    parser.add_argument("--parts", default=",".join(_PARTS), help=f"of {', '.join(_PARTS)}")
    parser.add_argument(
        "--backends", default="", help="of torch.distributed: by default flagcx (if there) and nccl; gloo"
    )
    parser.add_argument("--only", default="*", help="a glob on the steps' names")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of the largest collective")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each measurement")
    parser.add_argument("--scale", type=Scale, help="host or accelerator; by default what the peer is")
    parser.add_argument("--one", choices=_PARTS[:2], help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.scale = options.scale or (Scale.HOST if options.peer == "cpu" else Scale.ACCELERATOR)
    unknown = set(options.parts.split(",")) - set(_PARTS)
    if unknown:
        parser.error(f"--parts: no {', '.join(sorted(unknown))} among {', '.join(_PARTS)}")
    return options


def _show_devices(options: argparse.Namespace) -> None:
    """As many as are asked for; before the first look for them, which makes them. SystemExit where that is too few."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.peer == "cpu":
        options.devices = options.devices or 8
        os.environ["FLAGOS_NUM_CPU_DEVICES"] = str(options.devices)
        count_of_xla = f"--xla_force_host_platform_device_count={options.devices}"
        os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), count_of_xla)))
    else:
        import torch

        options.devices = options.devices or torch.accelerator.device_count()
    if options.devices < 2:
        raise SystemExit(f"scaling needs two devices or more, not {options.devices}")


def _accelerator() -> str:
    """The name of the first."""
    import torch

    return str(torch.get_device_module().get_device_name(0))


def _backends(options: argparse.Namespace) -> list[str]:
    if options.backends:
        return list(options.backends.split(","))
    if options.peer == "cpu":
        return ["gloo"]
    from flagos_backend.devices import flagcx

    return [*(["flagcx"] if flagcx.find() else []), "nccl"]


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    options = _options()
    _show_devices(options)
    if options.one == "steps":
        print(json.dumps(asdict(_measure_step(options.what, options))))
        return 0
    if options.one == "collectives":
        found = _measure_collectives(int(options.what), options)
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in found.items()}))
        return 0

    parts = options.parts.split(",")
    backends = _backends(options)
    rows: dict[str, list[Timed]] = {}
    steps: list[Step] = []
    lost: Lost | None = None
    gradient = math.nan
    if "collectives" in parts:
        rows = _collective_rows(options, backends)
    if "steps" in parts:
        import jax
        import numpy as np

        from .scaling.programs import sharded

        for program in sharded(options.scale):
            if not fnmatch.fnmatch(program.name, options.only):
                continue
            try:
                steps.append(
                    Step(**_in_a_process("steps", program.name, options, backends[0] if backends[0] != "gloo" else ""))
                )
            except RuntimeError as error:
                steps.append(Step(program.name, error=str(error)))
            if "data parallel" in program.name:
                weights = program.arguments(np.random.default_rng(0), 1)[0]
                gradient = float(sum(leaf.nbytes for leaf in jax.tree.leaves(weights)))
            print(_step_lines(steps[-1:], options.devices)[-1], flush=True)
    if "lost" in parts:
        lost = lose_one(options.devices)

    source = report.origin("scale", "" if options.peer == "cpu" else _accelerator())
    lines = [f"{options.devices} devices"]
    lines += _collective_lines(rows, options.devices) if rows else []
    lines += _step_lines(steps, options.devices) if steps else []
    lines += _argued_lines(rows, steps, options.devices, gradient)
    lines += _lost_lines(lost) if lost else []
    lines.append(", ".join(f"{name} {version}" for name, version in source.versions.items()))
    lines.append(f"{source.hardware}; {source.date}; {source.command}")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.save:
        content = asdict(source) | {
            "devices": options.devices,
            "collectives": {name: [asdict(row) for row in timed] for name, timed in rows.items()},
            "steps": [dataclasses.asdict(step) for step in steps],
            "lost": asdict(lost) if lost else None,
        }
        report.keep(f"scale_{options.scale.value}", text, content)
    return 1 if any(step.error for step in steps) or (lost and lost.failed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
