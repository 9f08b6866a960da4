"""Training steps over several devices of one process, against XLA's platform for the same hardware."""

from __future__ import annotations

import fnmatch
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import report
from .jax_speed import Measured, Peak, best_of, drop_programs, line, measure, peak_of, render
from .programs import Program, Scale, programs

# That the host shows, for each side.
HOST_DEVICES = 4
_AXIS = "devices"
# The sharding of an array that is given up to the program, a weight or a moment of one, of the shape.
Spread = Callable[[tuple[int, ...], int], PartitionSpec]


def _whole(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Every device has all of it."""
    del shape, devices
    return PartitionSpec()


def _split(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Every device has a part of it, along the largest dimension that has equal ones."""
    sizes = [size if size % devices == 0 else 0 for size in shape]
    if not any(sizes):
        return PartitionSpec()
    along = sizes.index(max(sizes))
    return PartitionSpec(*(_AXIS if d == along else None for d in range(len(shape))))


WAYS: dict[str, Spread] = {"the batch": _whole, "batch and weights": _split}


def placement(program: Program, arguments: Sequence[Any], devices: Sequence[jax.Device], spread: Spread) -> Any:
    """A sharding for each array: those that are given up as ``spread`` says, the batch along its first dimension."""
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))

    def of(number: int) -> Callable[[Any], NamedSharding]:
        def sharding(array: Any) -> NamedSharding:
            given_up = number in program.donated
            return NamedSharding(mesh, spread(array.shape, len(devices)) if given_up else PartitionSpec(_AXIS))

        return sharding

    return tuple(jax.tree.map(of(number), argument) for number, argument in enumerate(arguments))


def steps(scale: Scale) -> list[Program]:
    """The training steps of language models."""
    return [p for p in programs(scale) if "training" in p.name and p.donated and p.name.startswith(("Llama", "GPT-2"))]


def main() -> int:
    """Command line; see tools/benchmarks/README.md."""
    parser = report.parser(__doc__)
    parser.add_argument("--peer", default="cpu", help="XLA's platform: cpu or cuda")
    parser.add_argument("--only", default="*", help="a glob on the programs' names")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each program")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further program begins")
    options = parser.parse_args()
    # Before the first look for devices, which makes them.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["FLAGOS_NUM_CPU_DEVICES"] = str(HOST_DEVICES)
    count_of_xla = f"--xla_force_host_platform_device_count={HOST_DEVICES}"
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), count_of_xla)))
    scale = Scale.HOST if options.peer == "cpu" else Scale.ACCELERATOR
    sides = [jax.devices(platform) for platform in (options.device, options.peer)]
    counts = [count for count in (2, 4, 8) if count <= min(map(len, sides))]
    peaks = [peak_of(side[0], scale) for side in sides]
    best = best_of(peaks)
    source = report.origin("sharded_speed", "" if scale is Scale.HOST else sides[1][0].device_kind)

    def table(rows: Sequence[Measured]) -> str:
        text = render(rows, [], peaks, source, f"XLA {options.peer}")
        if options.save:  # after each program: who has a machine for some time has what it came to
            content = asdict(source) | {"rows": [asdict(row) for row in rows if not math.isnan(row.floor)]}
            report.keep(f"sharded_speed_{scale.value}", text, content)
        return text

    deadline = time.monotonic() + options.limit
    rows: list[Measured] = []
    for program in steps(scale):
        arguments = program.arguments(np.random.default_rng(0))
        for count in counts:
            batch = [a for number, a in enumerate(arguments) if number not in program.donated]
            if any(leaf.shape[0] % count for leaf in jax.tree.leaves(batch)):
                continue
            # Devices of the host are its one processor.
            peak = best if scale is Scale.HOST else Peak(best.bytes * count, best.flops * count)
            for way, spread in WAYS.items():
                named = replace(program, name=f"{program.name}, {way} over {count}")
                if not fnmatch.fnmatch(named.name, options.only):
                    continue
                if time.monotonic() > deadline:
                    rows.append(Measured(named.name, math.nan, error="not measured: the time was up"))
                    continue
                placements = [placement(program, arguments, side[:count], spread) for side in sides]
                rows.append(measure(named, arguments, placements, peak, options.seconds))
                print(line(rows[-1]), flush=True)
                table(rows)
                drop_programs()
    print(table(rows), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
