"""How long a region takes, about: what decides whether it is spread over more of a device, or over more kernels."""

from __future__ import annotations

from math import prod

from flagos_backend.devices.target import Target
from flagos_backend.ir.functions import FUNCTIONS
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.region import Apply, Reduce, Region
from flagos_backend.loop_ir.spaces import moved_bytes

# As many operations as a function of a float, or a quotient, takes the time of.
_FUNCTION = 20
_FUNCTIONS = frozenset({*FUNCTIONS, Opcode.ATAN2, Opcode.DIVIDE, Opcode.POWER, Opcode.REMAINDER})


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
