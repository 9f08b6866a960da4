"""How long a region takes, about, and how much code it is: what decides whether it is spread over more of a device,
over more kernels, or over more lanes."""

from __future__ import annotations

from math import prod

from flagos_backend.devices.target import Target
from flagos_backend.ir.functions import ALL
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.region import Apply, Reduce, Region
from flagos_backend.loop_ir.spaces import moved_bytes

# As many operations as a function of a float, or a quotient, takes the time of.
_FUNCTION = 20
_FUNCTIONS = frozenset({*(function.opcode for function in ALL), Opcode.DIVIDE})
# Operations that are no functions are at most a few lines of PTX.
_LINES = {function.opcode: function.lines for function in ALL}
# How many lines a kernel's functions may be: each takes some 0.5 ms to compile.
_MOST_LINES = 4096


def seconds_alone(region: Region, target: Target) -> float:
    """How long one multiprocessor takes for all of ``region``."""
    operations = 0
    for e in region.expressions():
        if isinstance(e, Apply | Reduce):
            weight = _FUNCTION if isinstance(e, Apply) and e.opcode in _FUNCTIONS else 1
            varying = region.reach[e].union(e.dims if isinstance(e, Reduce) else ())
            operations += weight * prod(region.dims[d] for d in varying)
    alone = target.single_program
    return max(moved_bytes(region) / alone.bytes_per_second, operations / alone.operations_per_second)


def is_over_at_once(region: Region, programs: int, target: Target) -> bool:
    """Whether ``programs`` are done with ``region`` before several kernels in the place of one had started."""
    return seconds_alone(region, target) <= programs * target.single_program.start_seconds


def most_per_lane(region: Region) -> int:
    """How many points a lane may have so that ``region``'s functions, written out for each of them, compile in a few
    seconds: a power of two."""
    varying = [e.opcode for e in region.expressions() if isinstance(e, Apply) and region.reach[e]]
    most = _MOST_LINES // max(sum(_LINES.get(opcode, 0) for opcode in varying), 1)
    return 1 << max(most.bit_length() - 1, 0)
