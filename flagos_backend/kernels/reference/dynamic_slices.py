"""dynamic-slice and dynamic-update-slice. Start indices are clamped so that the slice lies inside the array."""

from __future__ import annotations

from collections.abc import Sequence

from flagos_backend.ir.attributes import DynamicSliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.index_arithmetic import (
    WindowOffsets,
    row_major_strides,
    scalar_index,
    scalar_index_on_device,
)
from flagos_backend.kernels.reference.registry import InPlaceKernel, Kernel, Run, Storage, identity, in_place, kernel
from flagos_backend.process.torch_loading import Tensor, torch


class _Window:
    """A window of an array at run-time starts. Only the dimensions in which it can move are looked at."""

    def __init__(self, instruction: Instruction, sizes: tuple[int, ...], first_index: int) -> None:
        dims = _operand_dims(instruction)
        strides = row_major_strides(dims)
        self.sizes = sizes
        self._offsets = WindowOffsets(sizes, strides)
        self._moving = []
        for d, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
            if size == dim:
                continue
            shape = instruction.operands[first_index + d].shape
            assert isinstance(shape, ArrayShape)
            self._moving.append((d, strides[d], dim - size, size, shape.element_type))

    def cut(self, array: Tensor, starts: Sequence[Tensor]) -> Tensor:
        """The window as a view; waits for its starts."""
        for d, _, limit, size, element_type in self._moving:
            start = scalar_index(starts[d], element_type)
            array = array.narrow(d, min(max(start, 0), limit), size)
        return array

    def positions(self, starts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Where its elements lie in the row-major array, without waiting."""
        total = self._offsets.on(device)
        for d, stride, limit, _, element_type in self._moving:
            total = total + scalar_index_on_device(starts[d], element_type, limit) * stride
        return total

    def write(self, run: Run, array: Tensor, update: Tensor, starts: Sequence[Tensor]) -> None:
        if not run.asynchronous:
            self.cut(array, starts).copy_(update)
            return
        dense = array.contiguous()
        dense.view(-1).index_copy_(0, self.positions(starts, array.device), update.reshape(-1))
        if dense is not array:
            array.copy_(dense)


def _operand_dims(instruction: Instruction) -> tuple[int, ...]:
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    return shape.dims


@kernel(Opcode.DYNAMIC_SLICE, storage=Storage.FRESH)
def prepare_dynamic_slice(instruction: Instruction) -> Kernel:
    dims, sizes = _operand_dims(instruction), instruction.attributes_as(DynamicSliceAttributes).sizes
    if dims == sizes:
        return identity
    window = _Window(instruction, sizes, 1)

    def run(launch: Run, array: Tensor, *starts: Tensor) -> Tensor:
        if launch.asynchronous:
            return array.reshape(-1).index_select(0, window.positions(starts, array.device)).view(sizes)
        # A copy, so that a small window does not keep a large array from being freed or written over.
        return window.cut(array, starts).clone(memory_format=torch.contiguous_format)

    return run


def _update_window(instruction: Instruction) -> _Window:
    update = instruction.operands[1].shape
    assert isinstance(update, ArrayShape)
    return _Window(instruction, update.dims, 2)


@kernel(Opcode.DYNAMIC_UPDATE_SLICE, storage=Storage.FRESH)
def prepare_dynamic_update_slice(instruction: Instruction) -> Kernel:
    window = _update_window(instruction)
    whole = _operand_dims(instruction) == window.sizes

    def run(launch: Run, array: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
        if whole:
            return update.clone(memory_format=torch.contiguous_format)
        result = array.clone(memory_format=torch.contiguous_format)
        window.write(launch, result, update, starts)
        return result

    return run


@in_place(Opcode.DYNAMIC_UPDATE_SLICE)
def prepare_dynamic_update_slice_in_place(instruction: Instruction) -> InPlaceKernel:
    window = _update_window(instruction)

    def run(launch: Run, array: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
        window.write(launch, array, update, starts)
        return array

    return InPlaceKernel(run, (0,))
