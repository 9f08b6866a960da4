"""What accelerators' libraries want done to the operands of convolutions, as instructions, which fuse with others:
padding that is not the same on both sides, the order and reversal of the kernel, the order of what is made. A window of
one point is a product, and so is the gradient of its weights.

Where the target is an accelerator.
"""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.ir.attributes import (
    ConstantAttributes,
    ConvolutionAttributes,
    DimensionsAttributes,
    DotAttributes,
    PadAttributes,
    SliceAttributes,
    WindowDimension,
)
from flagos_backend.ir.custom_calls.weight_gradient import is_weight_gradient
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

_FLOATS = frozenset({ElementType.F16, ElementType.BF16, ElementType.F32, ElementType.F64})
_POINT = WindowDimension(1)


def canonicalize_convolutions(module: Module) -> Module:
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
    return (
        _as_product(instruction, attributes, emitter)
        or _gradient_as_product(instruction, attributes, emitter)
        or _laid_out(instruction, attributes, emitter)
    )


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


def _gradient_as_product(instruction: Instruction, a: ConvolutionAttributes, emitter: Emitter) -> Instruction | None:
    """A window that is the whole input sums over everything but the features, which are the last dimension of both
    operands."""
    shapes = [array_shape(value) for value in (*instruction.operands, instruction)]
    inputs, _, result = shapes
    summed = tuple(range(len(a.window) + 1))
    same = (a.input_feature, *a.input_spatial) == (a.kernel_input_feature, *a.kernel_spatial) == summed
    points = all(replace(w, size=1, stride=1) == _POINT for w in a.window)
    whole = [inputs.dims[d] for d in a.input_spatial] == [w.size for w in a.window]
    if not same or not points or not whole or a.feature_group_count != 1:
        return None
    operands, features = instruction.operands, (a.output_batch, a.output_feature)
    if a.output_feature < a.output_batch:
        operands = operands[::-1]
    matrix = ArrayShape(result.element_type, tuple(result.dims[d] for d in sorted(features)))
    attributes = DotAttributes(summed, summed, precision=a.precision)
    product = emitter.emit(Opcode.DOT, matrix, operands, attributes, like=instruction)
    return emitter.emit(Opcode.RESHAPE, instruction.shape, (product,), like=instruction)


def _laid_out(instruction: Instruction, a: ConvolutionAttributes, emitter: Emitter) -> Instruction | None:
    inputs, kernel = instruction.operands
    # Of a dilated base the library knows the transposed convolution, which goes through the window in reverse.
    transposed = any(w.base_dilation > 1 for w in a.window) and all(w.stride == 1 for w in a.window)
    wanted = a
    if not any(w.base_dilation > 1 for w in a.window):
        inputs, wanted = _padded(inputs, wanted, emitter, instruction)
    if _is_gradient_of_weight(inputs, wanted, instruction):
        kernel, wanted = _reversed(kernel, wanted, False, emitter, instruction)
        kernel, wanted = _ordered(kernel, wanted, _order_beside(wanted), emitter, instruction)
        return _made_in_order(instruction, inputs, kernel, a, wanted, emitter)
    if not transposed or a.feature_group_count == 1:
        kernel, wanted = _reversed(kernel, wanted, transposed, emitter, instruction)
        kernel, wanted = _ordered(kernel, wanted, _order_of_weight(wanted, transposed), emitter, instruction)
    if transposed and (cropped := _cropped(instruction, inputs, kernel, wanted, emitter)) is not None:
        return cropped
    if wanted == a:
        return None
    return emitter.emit(Opcode.CONVOLUTION, instruction.shape, (inputs, kernel), wanted, like=instruction)


def _cropped(
    instruction: Instruction, inputs: Instruction, kernel: Instruction, a: ConvolutionAttributes, emitter: Emitter
) -> Instruction | None:
    """A transposed convolution that the library can only make larger, as part of that. Its padding crops both sides
    alike; None where it does, and where the result has zeros around it."""
    shape = array_shape(instruction)
    window, limits = [], list(shape.dims)
    for d, w in zip(a.output_spatial, a.window, strict=True):
        reach = (w.size - 1) * w.window_dilation
        if w.padding_low > reach or w.padding_high > w.padding_low + max(w.base_dilation, w.window_dilation) - 1:
            return None
        high = max(w.padding_low, w.padding_high)
        limits[d] += high - w.padding_high
        window.append(replace(w, padding_high=high))
    if tuple(limits) == shape.dims:
        return None
    whole, made = replace(a, window=tuple(window)), ArrayShape(shape.element_type, tuple(limits))
    result = emitter.emit(Opcode.CONVOLUTION, made, (inputs, kernel), whole, like=instruction)
    part = SliceAttributes((0,) * shape.rank, shape.dims, (1,) * shape.rank)
    return emitter.emit(Opcode.SLICE, shape, (result,), part, like=instruction)


def _is_gradient_of_weight(inputs: Instruction, a: ConvolutionAttributes, result: Instruction) -> bool:
    counts = [array_shape(result).dims[d] for d in a.output_spatial]
    spatial = [array_shape(inputs).dims[d] for d in a.input_spatial]
    return is_weight_gradient(a.window, counts, spatial, a.feature_group_count)


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
    reversed_dims = {d for d, w in zip(a.kernel_spatial, a.window, strict=True) if w.window_reversal is not wanted}
    reversed_dims -= {d for d in reversed_dims if array_shape(kernel).dims[d] == 1}
    if kernel.opcode is Opcode.REVERSE:
        before = set(kernel.attributes_as(DimensionsAttributes).dimensions)
        if reversed_dims and before <= set(a.kernel_spatial):
            kernel, reversed_dims = kernel.operands[0], reversed_dims ^ before
    if reversed_dims:
        dims = DimensionsAttributes(tuple(sorted(reversed_dims)))
        kernel = emitter.emit(Opcode.REVERSE, kernel.shape, (kernel,), dims, like=like)
    return kernel, replace(a, window=tuple(replace(w, window_reversal=wanted) for w in a.window))


def _order_of_weight(a: ConvolutionAttributes, transposed: bool) -> tuple[int, ...]:
    """The kernel's dimensions in the order in which the library reads it beside an input of that order."""
    outer, inner = a.kernel_output_feature, a.kernel_input_feature
    if transposed:
        outer, inner = inner, outer
    channels_last = a.input_feature == len(a.window) + 1
    return (outer, *a.kernel_spatial, inner) if channels_last else (outer, inner, *a.kernel_spatial)


def _order_beside(a: ConvolutionAttributes) -> tuple[int, ...]:
    """The dimensions of a gradient that is the kernel, in the order in which the library reads it beside the inputs."""
    batch, features = a.kernel_input_feature, a.kernel_output_feature
    channels_last = a.input_batch == len(a.window) + 1
    return (batch, *a.kernel_spatial, features) if channels_last else (batch, features, *a.kernel_spatial)


def _ordered(
    kernel: Instruction, a: ConvolutionAttributes, order: tuple[int, ...], emitter: Emitter, like: Instruction
) -> tuple[Instruction, ConvolutionAttributes]:
    """The kernel with its dimensions in that order."""
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


def _made_in_order(
    instruction: Instruction,
    inputs: Instruction,
    kernel: Instruction,
    before: ConvolutionAttributes,
    a: ConvolutionAttributes,
    emitter: Emitter,
) -> Instruction | None:
    """A gradient of weights made in the order in which the library writes it; a transposition brings it into that of
    the program."""
    channels_last = a.input_batch == len(a.window) + 1
    outer, inner = a.output_feature, a.output_batch
    order = (outer, *a.output_spatial, inner) if channels_last else (outer, inner, *a.output_spatial)
    place = tuple(order.index(d) for d in range(len(order)))
    a = replace(
        a,
        output_batch=place[a.output_batch],
        output_feature=place[a.output_feature],
        output_spatial=tuple(place[d] for d in a.output_spatial),
    )
    if a == before:
        return None
    shape = array_shape(instruction)
    made = ArrayShape(shape.element_type, tuple(shape.dims[d] for d in order))
    gradient = emitter.emit(Opcode.CONVOLUTION, made, (inputs, kernel), a, like=instruction)
    if place == tuple(range(len(place))):
        return gradient
    return emitter.emit(Opcode.TRANSPOSE, shape, (gradient,), DimensionsAttributes(place), like=instruction)
