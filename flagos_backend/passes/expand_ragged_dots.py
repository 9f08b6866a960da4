"""Ragged dots, where no library computes one whole, become dots of windows of rows, each with its group's matrix.

How many rows a window has is decided by cost: few rows are many steps, each of which reads a group's matrix, and many
rows are products with elements of other groups, which are masked. Before inline_calls, for an expansion is a call.
An element meets its own group's numbers only, so that what is not a number stays in its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flagos_backend.devices.target import Target
from flagos_backend.ir.cost import Roofline
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.ragged_dots import RaggedDot, Role, ragged_dot_of, why_not_grouped
from flagos_backend.passes.ragged_windows import Windows, expansion
from flagos_backend.passes.rewrite import Emitter, apply_rule

#: Of a chip of which nothing is known.
_ROOFLINE = Roofline(1e14, 1e12)
#: What a step of a loop takes beside its product: some operations on scalars; on accelerators some kernels.
_STEP_SECONDS, _ACCELERATOR_STEP_SECONDS = 1e-6, 1e-5
#: How often the matrix of a group is moved in a step: read, written where it stands alone, and read by the product.
_MATRIX_MOVES = 3
#: Steps on an accelerator that are written one after another, whose operations on elements fuse.
_MOST_UNROLLED = 8


def expand_ragged_dots(module: Module, target: Target) -> Module:
    def rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
        if instruction.opcode is not Opcode.RAGGED_DOT:
            return None
        if target.has_grouped_products and not why_not_grouped(instruction):
            return None
        ragged = ragged_dot_of(instruction)
        if ragged.result.element_type.is_complex:  # The reference kernel's: loops of complex products are not native.
            return None
        computation = expansion(ragged, windows_for(ragged, target))
        return emitter.emit(
            Opcode.CALL, instruction.shape, instruction.operands, called=(computation,), like=instruction
        )

    return apply_rule(module, rule)


@dataclass(frozen=True, slots=True)
class _Work:
    """What one row of the ragged dimension, and one group's matrix, are: operations and bytes."""

    row_flops: float
    row_bytes: float
    matrix_bytes: float


def _work(ragged: RaggedDot) -> _Work:
    rows = max(ragged.length, 1)
    result = ragged.result.num_elements
    if ragged.role is Role.CONTRACTING:
        result //= max(ragged.groups, 1)
    contracted = prod(ragged.lhs.dims[d] for d in ragged.dot.lhs_contracting)
    row = ragged.lhs.num_bytes / rows
    if ragged.role is Role.CONTRACTING:
        row += ragged.rhs.num_bytes / rows
        matrix = result * ragged.result.element_type.bytes
    else:
        row += ragged.result.num_bytes / rows
        matrix = ragged.rhs.num_bytes // max(ragged.groups, 1)
    return _Work(2.0 * result * contracted / rows, row, matrix)


def windows_for(ragged: RaggedDot, target: Target) -> Windows:
    """The windows whose products take the least time by the roofline of ``target``."""
    whole = Windows(ragged.length, ragged.groups, unrolled=not target.is_host and ragged.groups <= _MOST_UNROLLED)
    if ragged.prefix or ragged.role is Role.BATCH or not ragged.result.num_elements or not ragged.lhs.num_elements:
        return whole
    work, roofline = _work(ragged), target.roofline or _ROOFLINE
    step = _STEP_SECONDS if target.is_host else _ACCELERATOR_STEP_SECONDS

    def seconds(windows: Windows) -> float:
        moved = windows.rows * work.row_bytes + _MATRIX_MOVES * work.matrix_bytes
        # One after the other: a matrix is moved before it is multiplied.
        return windows.count * (roofline.seconds(windows.rows * work.row_flops, 0) + roofline.seconds(0, moved) + step)

    cut = (Windows(1 << power, most_windows(ragged, 1 << power)) for power in range((ragged.length - 1).bit_length()))
    return min((whole, *cut), key=seconds)


def most_windows(ragged: RaggedDot, rows: int) -> int:
    """How many windows of so many rows hold the rows of all groups, whatever the groups' sizes: each group begins one,
    and its last one may be of one row."""
    groups = min(ragged.groups, ragged.length)
    return (ragged.length + groups * (rows - 1)) // rows
