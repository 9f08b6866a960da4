"""What accelerators' libraries want done to the operands of convolutions, as instructions, which fuse with others:
padding that is not the same on both sides, the order and reversal of the kernel. A window of one point is a product.

After the passes of pipeline.py, where the target is an accelerator.
"""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.ir.attributes import (
    ConstantAttributes,
    ConvolutionAttributes,
    DimensionsAttributes,
    DotAttributes,
    PadAttributes,
    WindowDimension,
)
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

_FLOATS = frozenset({ElementType.F16, ElementType.BF16, ElementType.F32, ElementType.F64})
_POINT = WindowDimension(1)


def lay_out_convolutions(module: Module) -> Module:
    """``module`` with the operands of its convolutions of floats, of at most three spatial dimensions, laid out."""
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.CONVOLUTION:
        return None
    attributes = instruction.attributes_as(ConvolutionAttributes)
    shapes = [array_shape(value) for value in (instruction, *instruction.operands)]
    types = {shape.element_type for shape in shapes}
    if len(types) != 1 or not types <= _FLOATS or not all(shape.num_elements for shape in shapes):
        return None
    if attributes.batch_group_count != 1 or not 1 <= len(attributes.window) <= 3:
        return None
    return _as_product(instruction, attributes, emitter) or _laid_out(instruction, attributes, emitter)


def _as_product(instruction: Instruction, a: ConvolutionAttributes, emitter: Emitter) -> Instruction | None:
    """Every point of the input times the kernel, where features are the last dimension on both sides."""
    inputs, kernel = instruction.operands
    last = len(a.window) + 1
    same = (a.input_batch, a.input_feature, a.input_spatial) == (a.output_batch, last, a.output_spatial)
    points = all(replace(w, window_dilation=1, window_reversal=False) == _POINT for w in a.window)
    if not same or not points or a.output_feature != last or a.feature_group_count != 1:
        return None
    shape = array_shape(kernel)
    feature_dims = sorted((a.kernel_input_feature, a.kernel_output_feature))
    matrix = ArrayShape(shape.element_type, tuple(shape.dims[d] for d in feature_dims))
    flat = emitter.emit(Opcode.RESHAPE, matrix, (kernel,), like=instruction)
    contracted = feature_dims.index(a.kernel_input_feature)
    attributes = DotAttributes((last,), (contracted,), precision=a.precision)
    return emitter.emit(Opcode.DOT, instruction.shape, (inputs, flat), attributes, like=instruction)


def _laid_out(instruction: Instruction, a: ConvolutionAttributes, emitter: Emitter) -> Instruction | None:
    inputs, kernel = instruction.operands
    # Of a dilated base the library knows the transposed convolution, which goes through the window in reverse.
    transposed = any(w.base_dilation > 1 for w in a.window) and all(w.stride == 1 for w in a.window)
    wanted = a
    if not any(w.base_dilation > 1 for w in a.window):
        inputs, wanted = _padded(inputs, wanted, emitter, instruction)
    if not transposed or a.feature_group_count == 1:
        kernel, wanted = _reversed(kernel, wanted, transposed, emitter, instruction)
        kernel, wanted = _ordered(kernel, wanted, transposed, emitter, instruction)
    if wanted == a:
        return None
    return emitter.emit(Opcode.CONVOLUTION, instruction.shape, (inputs, kernel), wanted, like=instruction)


def _padded(
    inputs: Instruction, a: ConvolutionAttributes, emitter: Emitter, like: Instruction
) -> tuple[Instruction, ConvolutionAttributes]:
    """Zeros around the input where one side needs more of them than the other."""
    if any(min(w.padding_low, w.padding_high) < 0 for w in a.window):
        return inputs, a
    if all(w.padding_low == w.padding_high for w in a.window):
        return inputs, a
    shape = array_shape(inputs)
    low, high = [0] * shape.rank, [0] * shape.rank
    window = []
    for d, w in zip(a.input_spatial, a.window, strict=True):
        both = min(w.padding_low, w.padding_high)
        low[d], high[d] = w.padding_low - both, w.padding_high - both
        window.append(replace(w, padding_low=both, padding_high=both))
    scalar = ArrayShape(shape.element_type)
    zero = emitter.emit(Opcode.CONSTANT, scalar, (), ConstantAttributes(bytes(shape.element_type.bytes)), like=like)
    dims = tuple(before + size + after for before, size, after in zip(low, shape.dims, high, strict=True))
    padded = ArrayShape(shape.element_type, dims)
    attributes = PadAttributes(tuple(low), tuple(high), (0,) * shape.rank)
    inputs = emitter.emit(Opcode.PAD, padded, (inputs, zero), attributes, like=like)
    return inputs, replace(a, window=tuple(window))


def _reversed(
    kernel: Instruction, a: ConvolutionAttributes, wanted: bool, emitter: Emitter, like: Instruction
) -> tuple[Instruction, ConvolutionAttributes]:
    """The kernel as it is where the window has the reversal ``wanted`` in every dimension."""
    turned = {d for d, w in zip(a.kernel_spatial, a.window, strict=True) if w.window_reversal is not wanted}
    turned -= {d for d in turned if array_shape(kernel).dims[d] == 1}
    if kernel.opcode is Opcode.REVERSE:
        before = set(kernel.attributes_as(DimensionsAttributes).dimensions)
        if turned and before <= set(a.kernel_spatial):
            kernel, turned = kernel.operands[0], turned ^ before
    if turned:
        dims = DimensionsAttributes(tuple(sorted(turned)))
        kernel = emitter.emit(Opcode.REVERSE, kernel.shape, (kernel,), dims, like=like)
    return kernel, replace(a, window=tuple(replace(w, window_reversal=wanted) for w in a.window))


def _ordered(
    kernel: Instruction, a: ConvolutionAttributes, transposed: bool, emitter: Emitter, like: Instruction
) -> tuple[Instruction, ConvolutionAttributes]:
    """The kernel in the order in which the library reads it beside an input of that order."""
    outer, inner = a.kernel_output_feature, a.kernel_input_feature
    if transposed:
        outer, inner = inner, outer
    channels_last = a.input_feature == len(a.window) + 1
    order = (outer, *a.kernel_spatial, inner) if channels_last else (outer, inner, *a.kernel_spatial)
    if order == tuple(range(len(order))):
        return kernel, a
    shape = array_shape(kernel)
    dims = ArrayShape(shape.element_type, tuple(shape.dims[d] for d in order))
    kernel = emitter.emit(Opcode.TRANSPOSE, dims, (kernel,), DimensionsAttributes(order), like=like)
    place = {d: number for number, d in enumerate(order)}
    return kernel, replace(
        a,
        kernel_output_feature=place[a.kernel_output_feature],
        kernel_input_feature=place[a.kernel_input_feature],
        kernel_spatial=tuple(place[d] for d in a.kernel_spatial),
    )
