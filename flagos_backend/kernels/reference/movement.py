"""Kernels that move elements without computing: shapes, slices, padding, iota. Views wherever torch has one."""

from __future__ import annotations

from flagos_backend.errors import UnsupportedElementType
from flagos_backend.ir.attributes import DimensionAttributes, DimensionsAttributes, PadAttributes, SliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.strided_view import TARGET, StridedView
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.conversion import converter
from flagos_backend.kernels.reference.custom_calls import Config, custom_call
from flagos_backend.kernels.reference.elementwise import splat_constant
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, identity, kernel
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process.torch_loading import torch

E = ElementType


def array_shape(instruction: Instruction) -> ArrayShape:
    """The shape of an instruction that gives one array."""
    shape = instruction.shape
    assert isinstance(shape, ArrayShape), instruction
    return shape


@kernel(Opcode.BROADCAST)
def _prepare_broadcast(instruction: Instruction) -> Kernel:
    dims = array_shape(instruction).dims
    dimensions = instruction.attributes_as(DimensionsAttributes).dimensions
    operand = array_shape(instruction.operands[0]).dims
    if operand == dims and dimensions == tuple(range(len(dims))):
        return identity
    order = sorted(range(len(dimensions)), key=dimensions.__getitem__)
    transposes = order != list(range(len(order)))
    # Dimensions that are missing in front need no entry: expand adds them.
    first = min(dimensions, default=len(dims))
    spread = [1] * (len(dims) - first)
    for dimension, size in zip(dimensions, operand, strict=True):
        spread[dimension - first] = size
    if not transposes and tuple(spread) == operand:
        return lambda run, x: x.expand(dims)
    if not transposes:
        return lambda run, x: x.reshape(spread).expand(dims)
    return lambda run, x: x.permute(order).reshape(spread).expand(dims)


@kernel(Opcode.RESHAPE, storage=Storage.VIEW)
def _prepare_reshape(instruction: Instruction) -> Kernel:
    dims = array_shape(instruction).dims
    if dims == array_shape(instruction.operands[0]).dims:
        return identity
    return lambda run, x: x.reshape(dims)


@kernel(Opcode.TRANSPOSE, storage=Storage.VIEW)
def _prepare_transpose(instruction: Instruction) -> Kernel:
    permutation = instruction.attributes_as(DimensionsAttributes).dimensions
    if permutation == tuple(range(len(permutation))):
        return identity
    return lambda run, x: x.permute(permutation)


@kernel(Opcode.REVERSE, storage=Storage.FRESH)
def _prepare_reverse(instruction: Instruction) -> Kernel:
    dimensions = instruction.attributes_as(DimensionsAttributes).dimensions
    return lambda run, x: x.flip(dimensions)


@kernel(Opcode.CONCATENATE, storage=Storage.FRESH)
def _prepare_concatenate(instruction: Instruction) -> Kernel:
    dimension = instruction.attributes_as(DimensionAttributes).dimension
    dims = array_shape(instruction).dims

    def concatenate(run: Run, *operands: torch.Tensor) -> torch.Tensor:
        return torch.cat(operands, dimension)

    # torch.cat drops one-dimensional empty operands whatever their other dimensions, and one operand gives a copy.
    return concatenate if 0 not in dims else lambda run, x, *_: x.new_empty(dims)


@kernel(Opcode.SLICE, storage=Storage.VIEW)
def _prepare_slice(instruction: Instruction) -> Kernel:
    attributes = instruction.attributes_as(SliceAttributes)
    operand = array_shape(instruction.operands[0]).dims
    bounds = zip(attributes.starts, attributes.limits, attributes.strides, operand, strict=True)
    cuts = [(d, *cut[:3]) for d, cut in enumerate(bounds) if cut[:3] != (0, cut[3], 1)]
    if not cuts:
        return identity
    if len(cuts) == 1 and cuts[0][3] == 1:
        ((dimension, start, limit, _),) = cuts
        length = limit - start
        return lambda run, x: x.narrow(dimension, start, length)
    index = tuple(slice(*cut) for cut in zip(attributes.starts, attributes.limits, attributes.strides, strict=True))
    return lambda run, x: x[index]


@kernel(Opcode.PAD, storage=Storage.FRESH)
def _prepare_pad(instruction: Instruction) -> Kernel:
    attributes = instruction.attributes_as(PadAttributes)
    dims = array_shape(instruction).dims
    operand = array_shape(instruction.operands[0]).dims
    source, target = [], []
    for size, low, interior, result in zip(operand, attributes.low, attributes.interior, dims, strict=True):
        # Element i comes to low + i * step; keep those that land inside the result.
        step = interior + 1
        first = max(0, -(low // step)) if low < 0 else 0
        last = min(size, (result - 1 - low) // step + 1) if result else 0
        last = max(first, last)
        source.append(slice(first, last))
        start = low + first * step
        target.append(slice(start, start + (last - first) * step, step) if last > first else slice(0, 0))
    from_index, to_index = tuple(source), tuple(target)

    def pad(run: Run, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # A copy even where one element is all: the result must not be the padding value itself.
        result = value.expand(dims).clone(memory_format=torch.contiguous_format)
        result[to_index] = x[from_index]
        return result

    def pad_zero(run: Run, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = x.new_zeros(dims)
        result[to_index] = x[from_index]
        return result

    # A minus zero is no zero here: its text differs.
    return pad_zero if str(splat_constant(instruction.operands[1])) in ("0", "0.0", "False") else pad


@kernel(Opcode.IOTA)
def _prepare_iota(instruction: Instruction) -> Kernel:
    shape = array_shape(instruction)
    dimension = instruction.attributes_as(DimensionAttributes).dimension
    size, element_type, dims = shape.dims[dimension], shape.element_type, shape.dims
    spread = (size,) + (1,) * (len(dims) - dimension - 1)
    if element_type is E.PRED:
        raise UnsupportedElementType.at(instruction, element_type=element_type.name)
    direct = element_type.bits >= 32 and not element_type.is_complex
    dtype = dtype_of(element_type)
    # Narrower types count modulo their width, or round what they cannot hold.
    convert = converter(E.S64, element_type)

    def iota(run: Run) -> torch.Tensor:
        if direct or convert is None:
            values = torch.arange(size, dtype=dtype, device=run.device)
        else:
            values = convert(torch.arange(size, device=run.device))
        return values.reshape(spread).expand(dims)

    return iota


@kernel(Opcode.GET_DIMENSION_SIZE, storage=Storage.FRESH)
def _prepare_get_dimension_size(instruction: Instruction) -> Kernel:
    dimension = instruction.attributes_as(DimensionAttributes).dimension
    size = array_shape(instruction.operands[0]).dims[dimension]
    return lambda run, x: torch.tensor(size, dtype=torch.int32, device=x.device)


@custom_call(TARGET, reads_config=False)
def _prepare_strided_view(instruction: Instruction, config: Config) -> Kernel:
    view = StridedView.of(instruction)
    assert view is not None
    dims, strides, offset = array_shape(instruction).dims, view.strides, view.offset

    def see(run: Run, x: torch.Tensor) -> torch.Tensor:
        line = x.contiguous()
        return line.as_strided(dims, strides, line.storage_offset() + offset)

    return see
