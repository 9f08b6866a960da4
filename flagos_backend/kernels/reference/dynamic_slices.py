"""dynamic-slice and dynamic-update-slice. Start indices are clamped so that the slice lies inside the array."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flagos_backend.ir.attributes import DynamicSliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.index_arithmetic import scalar_index
from flagos_backend.kernels.reference.registry import InPlaceKernel, Kernel, Run, Storage, identity, in_place, kernel

# Cuts the window at run-time starts out of an array: a view.
Cut = Callable[[Tensor, Sequence[Tensor]], Tensor]


def _window(instruction: Instruction, dims: tuple[int, ...], sizes: tuple[int, ...], first_index: int) -> Cut:
    """Only the dimensions in which the window can move are looked at."""
    moving = []
    for d, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        if size == dim:
            continue
        shape = instruction.operands[first_index + d].shape
        assert isinstance(shape, ArrayShape)
        moving.append((d, dim - size, size, shape.element_type))

    def cut(array: Tensor, starts: Sequence[Tensor]) -> Tensor:
        for d, limit, size, element_type in moving:
            start = scalar_index(starts[d], element_type)
            array = array.narrow(d, min(max(start, 0), limit), size)
        return array

    return cut


def _operand_dims(instruction: Instruction) -> tuple[int, ...]:
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    return shape.dims


@kernel(Opcode.DYNAMIC_SLICE, storage=Storage.FRESH)
def prepare_dynamic_slice(instruction: Instruction) -> Kernel:
    dims, sizes = _operand_dims(instruction), instruction.attributes_as(DynamicSliceAttributes).sizes
    if dims == sizes:
        return identity
    cut = _window(instruction, dims, sizes, 1)
    # A copy, so that a small window does not keep a large array from being freed or written over.
    return lambda run, array, *starts: cut(array, starts).clone(memory_format=torch.contiguous_format)


def _prepare_update(instruction: Instruction) -> tuple[bool, Cut]:
    """Whether the update replaces the whole array, and where it goes otherwise."""
    dims = _operand_dims(instruction)
    update = instruction.operands[1].shape
    assert isinstance(update, ArrayShape)
    return dims == update.dims, _window(instruction, dims, update.dims, 2)


@kernel(Opcode.DYNAMIC_UPDATE_SLICE, storage=Storage.FRESH)
def prepare_dynamic_update_slice(instruction: Instruction) -> Kernel:
    whole, cut = _prepare_update(instruction)

    def run(_: Run, array: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
        if whole:
            return update.clone(memory_format=torch.contiguous_format)
        result = array.clone(memory_format=torch.contiguous_format)
        cut(result, starts).copy_(update)
        return result

    return run


@in_place(Opcode.DYNAMIC_UPDATE_SLICE)
def prepare_dynamic_update_slice_in_place(instruction: Instruction) -> InPlaceKernel:
    _, cut = _prepare_update(instruction)

    def run(_: Run, array: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
        cut(array, starts).copy_(update)
        return array

    return InPlaceKernel(run, (0,))
