"""Runs fused schedules as generated Triton kernels: compiled on an accelerator, else through Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from flagos_backend.codegen.triton import RegionKernel, prepare
from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.devices.target import Target
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.ir.attributes import ConstantAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape
from flagos_backend.kernels.reference.registry import Run, Value
from flagos_backend.kernels.reference.registry import prepare as prepare_reference
from flagos_backend.kernels.reference.storage import dtype_of, from_bytes
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.region import Region

# Few multiprocessors, so that small arrays already go to several programs and through split reductions.
SIMULATED = Target("cpu", vendor="simulated", architecture="host", multiprocessors=4, shared_memory_bytes=1 << 16)


@functools.cache
def target() -> Target:
    """The accelerator of this machine, else the simulated one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return SIMULATED if found is None else TorchAccelerator(found.type, 0).target


def to_storage(array: np.ndarray, element_type: ElementType) -> torch.Tensor:
    """``array`` as kernels take it, on the device."""
    content = np.ascontiguousarray(array).tobytes()
    return from_bytes(content, ArrayShape(element_type, np.shape(array))).to(target().device_type)


def run(
    flat: FlatComputation,
    schedule: Schedule,
    arguments: Sequence[torch.Tensor],
    made: Callable[[RegionKernel], object] = lambda kernel: None,
) -> list[torch.Tensor]:
    """The outputs of ``schedule``: regions run as generated kernels (each goes to ``made``), the rest as reference."""
    device = target().device_type
    memory: dict[Instruction, torch.Tensor] = dict(zip(flat.parameters, arguments, strict=True))
    for instruction in flat.instructions:
        if instruction.opcode is Opcode.CONSTANT:
            data = instruction.attributes_as(ConstantAttributes).data
            memory[instruction] = from_bytes(data, instruction.shape).to(device)
    for item in schedule.items:
        if isinstance(item, Region):
            kernel = prepare(item, target())
            made(kernel)
            for output in kernel.outputs:
                if output not in memory:
                    memory[output] = torch.full(output.shape.dims, 77, device=device).to(
                        dtype_of(output.shape.element_type)
                    )
            kernel([memory[i] for i in kernel.inputs], [memory[o] for o in kernel.outputs])
        else:
            operands = iter([memory[schedule.buffers[o]].reshape(o.shape.dims).cpu() for o in flat.operands(item)])
            result = prepare_reference(item)(Run(), *(_packed(o.shape, operands) for o in item.operands))
            for leaf, value in zip(flat.leaves_of[item], _leaves(result), strict=True):
                memory[leaf] = value.contiguous().to(device)
    return [memory[schedule.buffers[o]].reshape(o.shape.dims) for o in flat.outputs]


def _packed(shape: Shape, values: Iterator[torch.Tensor]) -> Value:
    """The value of ``shape`` that the next of ``values`` make up."""
    if isinstance(shape, ArrayShape):
        return next(values)
    return tuple(_packed(element, values) for element in shape.elements)


def _leaves(value: Value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for element in value:
            yield from _leaves(element)
