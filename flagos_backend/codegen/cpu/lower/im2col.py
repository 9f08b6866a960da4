"""A convolution as a matrix product of patches of its input with its kernel, which BLAS computes: no library call.

Between emitter.py and the writers of loops: the copies that make padded inputs and patches are regions.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flagos_backend.codegen.cpu.lower.dot import MatrixProduct, Operand, matrix_operand
from flagos_backend.ir.attributes import ConvolutionAttributes, WindowDimension
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import dims_of, row_major
from flagos_backend.loop_ir.region import Affine, Literal, Load, Region, Store, axis, linear

# Patches that no longer stay in the caches cost more than the library's own ways to convolve.
_MAX_PATCH_BYTES = 16 << 20
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PatchProduct:
    """``copies`` run first, in order; what they store are temporaries."""

    copies: tuple[Region, ...]
    product: MatrixProduct


def as_patch_product(
    convolution: Instruction, input_buffer: Instruction, kernel_buffer: Instruction
) -> PatchProduct | None:
    """``convolution`` as one product, or None: another element type, groups, an empty dimension, a result whose
    features are not contiguous, or patches that are too large."""
    attributes = convolution.attributes_as(ConvolutionAttributes)
    element_type = _element_type(convolution)
    dims, kernel_dims, result_dims = map(dims_of, (*convolution.operands, convolution))
    if element_type is None or attributes.feature_group_count != 1 or attributes.batch_group_count != 1:
        return None
    if 0 in (*dims, *kernel_dims, *result_dims) or attributes.output_feature != len(result_dims) - 1:
        return None
    rows = [d for d in range(len(result_dims)) if d != attributes.output_feature]
    columns = _columns(attributes, len(dims))
    m, n = prod(result_dims[d] for d in rows), result_dims[-1]
    k = prod(kernel_dims[d] for d in columns)
    if max(m, n, k) > _MAX_SIZE:
        return None
    copies: list[Region] = []
    kernel = matrix_operand(
        row_major(kernel_buffer, kernel_dims), kernel_dims, (), columns, [attributes.kernel_output_feature]
    )
    if kernel is None:
        # Its output features stay where they are, first or last.
        first = attributes.kernel_output_feature == 0
        order = [attributes.kernel_output_feature, *columns] if first else [*columns, attributes.kernel_output_feature]
        copies.append(_copy(_load(kernel_buffer, kernel_dims, order), [kernel_dims[d] for d in order], "kernel"))
        kernel = Operand(copies[-1].stores[0].target, (), k if first else n, transposed=first)
    patches = _in_place(convolution, input_buffer, rows, columns)
    if patches is None:
        if m * k * element_type.bytes > _MAX_PATCH_BYTES:
            return None
        padded, padded_dims = padded_input(input_buffer, dims, attributes, copies)
        patches = _patches(convolution, padded, padded_dims, rows, columns, copies)
    types, result = (element_type, element_type), Operand(convolution, (), n)
    product = MatrixProduct(element_type, types, (), m, n, k, patches, kernel, result)
    return PatchProduct(tuple(copies), product)


def _columns(attributes: ConvolutionAttributes, rank: int) -> list[int]:
    """The kernel's dimensions that are summed over: those of the input last that is so in the input, because copies of
    runs are faster than what the kernel's own order saves; else in the order of the kernel."""
    if attributes.input_feature == rank - 1:
        return [*attributes.kernel_spatial, attributes.kernel_input_feature]
    return [d for d in range(rank) if d != attributes.kernel_output_feature]


def _element_type(convolution: Instruction) -> ElementType | None:
    shapes = [convolution.shape, *(o.shape for o in convolution.operands)]
    types = {s.element_type for s in shapes if isinstance(s, ArrayShape)}
    return types.pop() if len(types) == 1 and types <= {ElementType.F32, ElementType.F64} else None


def _in_place(convolution: Instruction, buffer: Instruction, rows: list[int], columns: list[int]) -> Operand | None:
    """The input itself as a matrix of patches: in each spatial dimension the window is one point that visits all, or
    all points, visited once."""
    attributes = convolution.attributes_as(ConvolutionAttributes)
    dims = dims_of(convolution.operands[0])
    in_row = {attributes.output_batch: attributes.input_batch}
    in_column = {attributes.kernel_input_feature: attributes.input_feature}
    for i, window in enumerate(attributes.window):
        source = attributes.input_spatial[i]
        if window.padding_low or window.padding_high or window.base_dilation != 1:
            return None
        if window.size == 1 and window.stride == 1:
            in_row[attributes.output_spatial[i]] = source
        elif window.size == dims[source] and window.window_dilation == 1 and not window.window_reversal:
            in_column[attributes.kernel_spatial[i]] = source
        else:
            return None
    row_dims = [in_row[d] for d in rows if d in in_row]
    return matrix_operand(
        row_major(buffer, dims), dims, (), row_dims, [in_column[d] for d in columns if d in in_column]
    )


def padded_input(
    buffer: Instruction, dims: tuple[int, ...], attributes: ConvolutionAttributes, copies: list[Region]
) -> tuple[Instruction, tuple[int, ...]]:
    """The input with zeros around and between its elements; itself, if it needs none. Negative padding takes nothing
    away: windows only begin further in."""
    windows = dict(zip(attributes.input_spatial, attributes.window, strict=True))
    wide = tuple(_padded_size(size, windows.get(d, WindowDimension(1))) for d, size in enumerate(dims))
    if wide == dims:
        return buffer, dims
    element_type = _type_of(buffer)
    size = prod(wide)
    target = Instruction(Opcode.COPY, ArrayShape(element_type, wide), (buffer,), name=f"{buffer.name}.padded")
    zero = Literal(element_type, bytes(element_type.bytes))
    copies.append(Region((size,), (Store(target, zero, axis(0, 1)),)))
    rank = len(dims)
    there = tuple(
        axis(d, rank).scaled(windows[d].base_dilation, max(windows[d].padding_low, 0))
        if d in windows
        else axis(d, rank)
        for d in range(rank)
    )
    copies.append(Region(dims, (Store(target, _load(buffer, dims, range(rank)), linear(there, wide, rank)),)))
    return target, wide


def _padded_size(size: int, window: WindowDimension) -> int:
    return max(window.padding_low, 0) + (size - 1) * window.base_dilation + 1 + max(window.padding_high, 0)


def _patches(
    convolution: Instruction,
    padded: Instruction,
    dims: tuple[int, ...],
    rows: list[int],
    columns: list[int],
    copies: list[Region],
) -> Operand:
    """A copy of every patch; what is contiguous in the input stays so."""
    attributes = convolution.attributes_as(ConvolutionAttributes)
    result_dims, kernel_dims = dims_of(convolution), dims_of(convolution.operands[1])
    transposed = attributes.input_feature != len(dims) - 1
    order = [*((0, d) for d in rows), *((1, d) for d in columns)]
    if transposed:
        order = [*order[len(rows) :], *order[: len(rows)]]
    sizes = [(result_dims, kernel_dims)[side][d] for side, d in order]
    rank = len(order)
    index = [Affine(0, (0,) * rank)] * len(dims)
    index[attributes.input_batch] = axis(order.index((0, attributes.output_batch)), rank)
    index[attributes.input_feature] = axis(order.index((1, attributes.kernel_input_feature)), rank)
    for i, window in enumerate(attributes.window):
        step = -window.window_dilation if window.window_reversal else window.window_dilation
        first = (window.size - 1) * window.window_dilation if window.window_reversal else 0
        first -= min(window.padding_low, 0)
        position = axis(order.index((0, attributes.output_spatial[i])), rank).scaled(window.stride, first)
        index[attributes.input_spatial[i]] = position + axis(
            order.index((1, attributes.kernel_spatial[i])), rank
        ).scaled(step)
    load = Load(_type_of(padded), padded, linear(tuple(index), dims, rank))
    copies.append(_copy(load, sizes, f"{convolution.name}.patches"))
    leading = prod(sizes[len(columns) :]) if transposed else prod(sizes[len(rows) :])
    return Operand(copies[-1].stores[0].target, (), leading, transposed)


def _type_of(buffer: Instruction) -> ElementType:
    assert isinstance(buffer.shape, ArrayShape)
    return buffer.shape.element_type


def _load(buffer: Instruction, dims: tuple[int, ...], order: list[int] | range) -> Load:
    """The element of ``buffer`` at a position whose dimensions are in ``order``."""
    rank = len(dims)
    places = {d: axis(position, rank) for position, d in enumerate(order)}
    return Load(_type_of(buffer), buffer, linear(tuple(places[d] for d in range(rank)), dims, rank))


def _copy(value: Load, dims: list[int], name: str) -> Region:
    """``value`` over ``dims``, in row-major order."""
    shape = ArrayShape(value.element_type, tuple(dims))
    target = Instruction(Opcode.COPY, shape, (value.source,), name=name)
    indices = tuple(axis(d, len(dims)) for d in range(len(dims)))
    return Region(tuple(dims), (Store(target, value, linear(indices, tuple(dims), len(dims))),))
