"""What a device's kernels bear, which fuse.py splits a computation by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.operator_call import takes_strides
from flagos_backend.loop_ir.indexing import View

# More operations than this in one region and its tiles no longer stay in the first-level cache.
MAX_OPERATIONS = 48


def reads_strides(call: Instruction, operand: int, view: View) -> bool:
    """Operators of PyTorch take any strides; what is made at compile time is made as they like it best."""
    return takes_strides(call, operand) and view.buffer.opcode is not Opcode.CONSTANT


@dataclass(frozen=True, slots=True)
class Policy:
    """What a device's kernels bear. ``half_sums``: sums of 16-bit floats accumulate wider and round once.
    ``runtime_starts``: loads and stores start where numbers on the device say, as in dynamic slices and their updates.
    ``reads_gather``: whether loads do so in the place of a gather, one that nobody else reads.
    ``parts``: what is used part by part is computed where the parts are used, rather than written whole before.
    ``repeated_elements``: a value of no more than these, a few operations from parameters, is computed again wherever
    it is spread over more, where a kernel of its own would take longer. ``reads_view``: whether a library call reads
    its operand of that number, which only moves elements of another value, where that stands; else the operand is a
    buffer of its own. ``chooses``: loads have guards, so that who reads a concatenate or a pad finds out which operand
    has an element, and no buffer is put together. ``splits``: loads have guards where regions are then
    cut where the operand changes, if that pays (seams.py). ``complex_numbers``: regions compute with those of two
    floats. ``remade_bytes``: a value of at least so many, unless 0, which few operations make of much smaller arrays,
    is no buffer, however many regions read it."""

    max_operations: int
    half_sums: bool
    runtime_starts: bool
    parts: bool
    repeated_elements: int = 0
    chooses: bool = False
    splits: bool = False
    complex_numbers: bool = False
    remade_bytes: int = 0
    reads_view: Callable[[Instruction, int, View], bool] = reads_strides
    reads_gather: Callable[[Instruction], bool] = lambda gather: False


HOST = Policy(MAX_OPERATIONS, half_sums=False, runtime_starts=False, parts=False)
ACCELERATOR = Policy(
    128,
    half_sums=True,
    runtime_starts=True,
    parts=True,
    repeated_elements=4096,
    chooses=True,
    complex_numbers=True,
    remade_bytes=1 << 20,
    reads_gather=lambda gather: True,
)
