"""Images with their channels last, as matrix units and oneDNN read them: convolutions take and make them so, and what
is between convolutions follows, until a program begins or ends or moves elements otherwise.

Where the target is an accelerator canonicalize_convolutions.py follows.
"""

from __future__ import annotations

import json
from dataclasses import replace

from flagos_backend.ir.attributes import (
    ConvolutionAttributes,
    CustomCallAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    PadAttributes,
    SliceAttributes,
    TupleIndexAttributes,
    WindowAttributes,
)
from flagos_backend.ir.config import parse_config
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.operator_call import tensors_of
from flagos_backend.ir.rules.elementwise import RULES as ELEMENTWISE
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape, leaves
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

# Of f64 neither cuDNN nor oneDNN has channels-last convolutions.
_TYPES = frozenset({ElementType.F16, ElementType.BF16, ElementType.F32})
_RANKS = (4, 5)
# Operators of PyTorch all of whose arrays of those ranks are images, or weights beside them, and which take and give
# channels-last ones where the first is one. Those of the first line are reason enough to make images so.
_CONVOLUTIONS = frozenset({"aten::convolution", "aten::convolution_backward"})
_FOLLOWERS = frozenset(
    {
        *("aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward"),
        *("aten::avg_pool2d", "aten::avg_pool2d_backward"),
        *("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool2d_backward"),
        *("aten::_native_batch_norm_legit_functional", "aten::_native_batch_norm_legit_no_training"),
        "aten::native_batch_norm_backward",
    }
)
_SAME_DIMS = frozenset(ELEMENTWISE) - {Opcode.BITCAST_CONVERT}


def channels_last(module: Module) -> Module:
    """``module`` with its convolutions of f16, bf16 and f32 over images of two or three dimensions on channels-last
    arrays."""
    if not any(_convolves(i) for computation in module.computations() for i in computation.instructions):
        return module
    return apply_rule(module, _rule)


def _convolves(instruction: Instruction) -> bool:
    if instruction.opcode is Opcode.CONVOLUTION:
        return True
    attributes = instruction.attributes
    return isinstance(attributes, CustomCallAttributes) and attributes.target.partition(".")[0] in _CONVOLUTIONS


def _first(rank: int) -> tuple[int, ...]:
    """The dimensions of a channels-last array in the order of one with its channels in front."""
    return (0, rank - 1, *range(1, rank - 1))


def _last(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def _permuted(shape: ArrayShape, order: tuple[int, ...]) -> ArrayShape:
    return ArrayShape(shape.element_type, tuple(shape.dims[d] for d in order))


def _is_transposition(value: Instruction, order: tuple[int, ...]) -> bool:
    return value.opcode is Opcode.TRANSPOSE and value.attributes_as(DimensionsAttributes).dimensions == order


def _is_image(value: Instruction) -> bool:
    """Whether it is a channels-last array with its channels in front."""
    return (
        isinstance(value.shape, ArrayShape)
        and _is_transposition(value, _first(value.shape.rank))
        and _has_rank(value.shape)
    )


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    opcode = instruction.opcode
    if opcode is Opcode.CONVOLUTION:
        return _convolution(instruction, emitter)
    if opcode is Opcode.CUSTOM_CALL:
        return _call(instruction, emitter)
    if opcode is Opcode.GET_TUPLE_ELEMENT and instruction.operands[0].opcode is Opcode.TUPLE:
        return instruction.operands[0].operands[instruction.attributes_as(TupleIndexAttributes).index]
    if not any(_is_image(operand) for operand in instruction.operands):
        return None
    if opcode is Opcode.TRANSPOSE:
        (image,) = instruction.operands
        return image.operands[0] if _is_transposition(instruction, _last(array_shape(image).rank)) else None
    if opcode is Opcode.REDUCE:
        return _reduce(instruction, emitter)
    if opcode in _SAME_DIMS or opcode in _MOVED:
        return _follow(instruction, emitter)
    return None


# ---- values


def _image(value: Instruction, emitter: Emitter, like: Instruction) -> Instruction:
    """A channels-last array with its channels in front."""
    order = _first(array_shape(value).rank)
    shape = _permuted(array_shape(value), order)
    return emitter.emit(Opcode.TRANSPOSE, shape, (value,), DimensionsAttributes(order), like=like)


def _channels_last(value: Instruction, emitter: Emitter) -> Instruction:
    shape = array_shape(value)
    order = _last(shape.rank)
    if _is_image(value):
        return value.operands[0]
    if value.opcode is Opcode.BROADCAST:
        place = [order.index(d) for d in value.attributes_as(DimensionsAttributes).dimensions]
        if place == sorted(place):
            attributes, dims = DimensionsAttributes(tuple(place)), _permuted(shape, order)
            return emitter.emit(Opcode.BROADCAST, dims, value.operands, attributes, like=value)
    moved = [d for d in order if shape.dims[d] != 1]
    if moved == sorted(moved):
        return emitter.emit(Opcode.RESHAPE, _permuted(shape, order), (value,), like=value)
    attributes, dims = DimensionsAttributes(order), _permuted(shape, order)
    return emitter.emit(Opcode.TRANSPOSE, dims, (value,), attributes, like=value)


# ---- convolutions


def _convolution(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    a = instruction.attributes_as(ConvolutionAttributes)
    inputs, kernel = instruction.operands
    shape = array_shape(instruction)
    rank, order = shape.rank, _last(shape.rank)
    spatial = tuple(range(2, rank))
    if rank not in _RANKS or shape.element_type not in _TYPES:
        return None
    if a.input_spatial != spatial or a.output_spatial != spatial:
        return None
    place = [order.index(d) for d in range(rank)]
    moved = tuple(place[d] for d in spatial)
    if _is_image(kernel):  # the gradient of a result, beside the inputs, makes that of weights
        kernel, a = (
            kernel.operands[0],
            replace(
                a,
                kernel_input_feature=place[a.kernel_input_feature],
                kernel_output_feature=place[a.kernel_output_feature],
                kernel_spatial=tuple(place[d] for d in a.kernel_spatial),
            ),
        )
    a = replace(
        a,
        input_batch=place[a.input_batch],
        input_feature=place[a.input_feature],
        input_spatial=moved,
        output_batch=place[a.output_batch],
        output_feature=place[a.output_feature],
        output_spatial=moved,
    )
    operands = (_channels_last(inputs, emitter), kernel)
    made = emitter.emit(Opcode.CONVOLUTION, _permuted(shape, order), operands, a, like=instruction)
    return _image(made, emitter, instruction)


# ---- operators of PyTorch


def _call(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    call = instruction.attributes_as(CustomCallAttributes)
    name = call.target.partition(".")[0]
    if name not in _CONVOLUTIONS and name not in _FOLLOWERS:
        return None
    numbers = [n for n, o in enumerate(instruction.operands) if _has_rank(o.shape)]
    shapes = list(leaves(instruction.shape))
    types = {array_shape(instruction.operands[number]).element_type for number in numbers}
    try:
        config = parse_config(call.backend_config)
    except ValueError:
        return None  # whoever prepares the kernel refuses it
    if not isinstance(config, dict):
        return None
    tensors = [tensor for tensor in tensors_of(config) if tensor["tensor"] in numbers]
    if not types or any("strides" in tensor or "dtype" in tensor or "order" in tensor for tensor in tensors):
        return None
    follows = any(_is_image(instruction.operands[number]) for number in numbers)
    if not follows and (name not in _CONVOLUTIONS or not types <= _TYPES):
        return None
    operands = list(instruction.operands)
    for number in numbers:
        operands[number] = _channels_last(operands[number], emitter)
    for tensor in tensors:
        tensor["order"] = list(_first(array_shape(operands[tensor["tensor"]]).rank))
        tensor.pop("strided", None)
    orders = config.get("orders") or [None] * len(shapes)
    if not isinstance(orders, list) or len(orders) != len(shapes):
        return None
    permuted = [_has_rank(shape) and order is None for shape, order in zip(shapes, orders, strict=True)]
    for number, shape in enumerate(shapes):
        if permuted[number]:
            orders[number], shapes[number] = list(_last(shape.rank)), _permuted(shape, _last(shape.rank))
    if any(orders):
        config["orders"] = orders
    made_shape: Shape = TupleShape(tuple(shapes)) if isinstance(instruction.shape, TupleShape) else shapes[0]
    attributes = replace(call, backend_config=json.dumps(config, allow_nan=False).encode())
    made = Instruction(
        Opcode.CUSTOM_CALL, made_shape, tuple(operands), attributes, (), instruction.name, instruction.metadata
    )
    emitter.instructions.append(made)
    if isinstance(made_shape, ArrayShape):
        return _image(made, emitter, instruction) if permuted[0] else made
    parts = []
    for number, shape in enumerate(shapes):
        part = emitter.emit(Opcode.GET_TUPLE_ELEMENT, shape, (made,), TupleIndexAttributes(number), like=instruction)
        parts.append(_image(part, emitter, instruction) if permuted[number] else part)
    return emitter.emit(Opcode.TUPLE, instruction.shape, parts, like=instruction)


# ---- what is between


def _reduce(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if len(instruction.operands) != 2 or not isinstance(instruction.shape, ArrayShape):
        return None
    image, initial = instruction.operands
    if not _is_image(image):
        return None
    order = _first(array_shape(image).rank)
    reduced = instruction.attributes_as(DimensionsAttributes).dimensions
    kept = [order[d] for d in range(len(order)) if d not in reduced]
    if kept != sorted(kept):
        return None
    attributes = DimensionsAttributes(tuple(sorted(order[d] for d in reduced)))
    operands = (image.operands[0], initial)
    return emitter.emit(Opcode.REDUCE, instruction.shape, operands, attributes, instruction.called, like=instruction)


def _follow(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """The same on channels-last arrays; beside an image scalars stay as they are."""
    shape = array_shape(instruction)
    order = _last(shape.rank)
    if any(_rank(operand) not in (0, shape.rank) for operand in instruction.operands):
        return None
    if len(instruction.operands) != 2 and instruction.opcode is Opcode.REDUCE_WINDOW:
        return None
    if instruction.opcode is Opcode.SELECT_AND_SCATTER:
        # Of equal elements it takes the first of a window, whose dimensions keep their order.
        window = instruction.attributes_as(WindowAttributes).window
        wide = [d for d in order if window[d].size > 1]
        if wide != sorted(wide):
            return None
    operands = tuple(_channels_last(o, emitter) if _rank(o) else o for o in instruction.operands)
    attributes = instruction.attributes
    if instruction.opcode in _MOVED:
        attributes = _moved(instruction, order)
    made = Instruction(
        instruction.opcode,
        _permuted(shape, order),
        operands,
        attributes,
        instruction.called,
        instruction.name,
        instruction.metadata,
    )
    emitter.instructions.append(made)
    return _image(made, emitter, instruction)


_MOVED = frozenset({Opcode.CONCATENATE, Opcode.PAD, Opcode.REDUCE_WINDOW, Opcode.SELECT_AND_SCATTER, Opcode.SLICE})


def _moved(
    instruction: Instruction, order: tuple[int, ...]
) -> DimensionAttributes | PadAttributes | SliceAttributes | WindowAttributes:
    """What an instruction says of its dimensions, of arrays with these in ``order``."""

    def permuted(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[d] for d in order)

    a = instruction.attributes
    if isinstance(a, DimensionAttributes):
        return DimensionAttributes(order.index(a.dimension))
    if isinstance(a, PadAttributes):
        return PadAttributes(permuted(a.low), permuted(a.high), permuted(a.interior))
    if isinstance(a, SliceAttributes):
        return SliceAttributes(permuted(a.starts), permuted(a.limits), permuted(a.strides))
    return WindowAttributes(tuple(instruction.attributes_as(WindowAttributes).window[d] for d in order))


def _rank(value: Instruction) -> int:
    return value.shape.rank if isinstance(value.shape, ArrayShape) else -1


def _has_rank(shape: Shape) -> bool:
    return isinstance(shape, ArrayShape) and shape.rank in _RANKS
