"""What Triton's interpreter does otherwise than compiled kernels do. Asked before a kernel is chosen for the simulated
device."""

from __future__ import annotations

from flagos_backend.devices.simulated import SIMULATED
from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType, leaves


def refuses(instruction: Instruction, target: Target) -> str:
    """Why a kernel that multiplies bfloat16 as it is loaded cannot compute ``instruction`` on ``target``, or ""."""
    if target.vendor != SIMULATED:
        return ""
    shapes = [leaf for each in (*instruction.operands, instruction) for leaf in leaves(each.shape)]
    if not any(shape.element_type is ElementType.BF16 for shape in shapes):
        return ""
    return "Triton's interpreter computes with the bits of bfloat16"
