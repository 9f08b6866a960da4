"""The custom call ``flagos.check_indices``. Native programs of the host look for themselves, and call this where an
index lies outside (native/cpu/index_check.cc)."""

from __future__ import annotations

from typing import Any

from flagos_backend.errors import AtenCallFailed, place_of
from flagos_backend.ir.custom_calls.index_check import INDEX, POSITION, TARGET, index_check_of
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.custom_calls import REQUIRED, Config, custom_call, malformed
from flagos_backend.kernels.reference.registry import Kernel, Run, Value

E = ElementType


@custom_call(TARGET, low=REQUIRED, high=REQUIRED, exception=REQUIRED, message=REQUIRED)
def _check_indices(instruction: Instruction, config: Config) -> Kernel:
    check = index_check_of(instruction)
    shape = instruction.operands[0].shape if instruction.operands else None
    if check is None or not isinstance(shape, ArrayShape) or shape.element_type not in (E.S32, E.S64):
        raise malformed(instruction, "its operand is no array of s32 or s64, or its bounds are no integers")
    place = place_of(instruction)

    def run(launch: Run, index: Any) -> Value:
        row = index.reshape(-1)
        outside = ((row < check.low) | (row >= check.high)).nonzero()
        if outside.numel():
            position = int(outside[0])
            message = check.message.replace(INDEX, str(int(row[position]))).replace(POSITION, str(position))
            raise AtenCallFailed(exception=check.exception, message=message, place=place)
        return ()

    return run
