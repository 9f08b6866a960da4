"""Typed attributes to HloInstructionProto: one writer an opcode, the mirror of attributes.py. Part of the exporter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from flagos_backend.importer.literals import write_literal
from flagos_backend.importer.shapes import write_shape
from flagos_backend.ir.attributes import (
    OF_MESSAGE,
    CholeskyAttributes,
    CollectiveAttributes,
    CollectivePermuteAttributes,
    CompareAttributes,
    ConstantAttributes,
    ConvolutionAttributes,
    CustomCallAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    Dims,
    DotAttributes,
    DynamicSliceAttributes,
    FftAttributes,
    GatherAttributes,
    NoAttributes,
    PadAttributes,
    ParameterAttributes,
    RaggedDotAttributes,
    RngAttributes,
    RngBitGeneratorAttributes,
    ScatterAttributes,
    SliceAttributes,
    SortAttributes,
    TriangularSolveAttributes,
    TupleIndexAttributes,
    WhileAttributes,
    WindowAttributes,
    WindowDimension,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import ComparisonOrder, Opcode, Precision
from flagos_backend.ir.types import ArrayShape, Shape, TupleShape

# Writes (attributes, message, instruction).
Writer = Callable[[Any, Any, Instruction], None]


def write_attributes(instruction: Instruction, proto: Any) -> None:
    writer = _WRITERS[type(instruction.attributes)]
    if writer is not None:
        writer(instruction.attributes, proto, instruction)


def _array(shape: Shape) -> ArrayShape:
    if not isinstance(shape, ArrayShape):
        raise TypeError(f"{shape} is no array")
    return shape


def _constant(a: ConstantAttributes, proto: Any, instruction: Instruction) -> None:
    write_literal(a.data, _array(instruction.shape), proto.literal)


def _dimensions(a: DimensionsAttributes, proto: Any, _: Instruction) -> None:
    proto.dimensions.extend(a.dimensions)


def _compare(a: CompareAttributes, proto: Any, instruction: Instruction) -> None:
    proto.comparison_direction = a.direction.value
    compared = _array(instruction.operands[0].shape).element_type
    if a.order is ComparisonOrder.TOTAL and compared.is_float:
        proto.comparison_type = "TOTALORDER"
    elif compared.is_signed:
        proto.comparison_type = "SIGNED"
    else:
        proto.comparison_type = "FLOAT" if compared.is_float or compared.is_complex else "UNSIGNED"


def _slice(a: SliceAttributes, proto: Any, _: Instruction) -> None:
    for start, limit, stride in zip(a.starts, a.limits, a.strides, strict=True):
        proto.slice_dimensions.add(start=start, limit=limit, stride=stride)


def _dynamic_slice(a: DynamicSliceAttributes, proto: Any, _: Instruction) -> None:
    proto.dynamic_slice_sizes.extend(a.sizes)


def _pad(a: PadAttributes, proto: Any, _: Instruction) -> None:
    proto.padding_config.SetInParent()
    for low, high, interior in zip(a.low, a.high, a.interior, strict=True):
        proto.padding_config.dimensions.add(edge_padding_low=low, edge_padding_high=high, interior_padding=interior)


def _precision(precision: Precision, proto: Any) -> None:
    proto.precision_config.operand_precision.extend([int(precision)] * 2)


def _dot_numbers(a: DotAttributes, numbers: Any, proto: Any) -> None:
    numbers.SetInParent()
    numbers.lhs_contracting_dimensions.extend(a.lhs_contracting)
    numbers.rhs_contracting_dimensions.extend(a.rhs_contracting)
    numbers.lhs_batch_dimensions.extend(a.lhs_batch)
    numbers.rhs_batch_dimensions.extend(a.rhs_batch)
    _precision(a.precision, proto)
    proto.precision_config.algorithm = int(a.algorithm)


def _dot(a: DotAttributes, proto: Any, _: Instruction) -> None:
    _dot_numbers(a, proto.dot_dimension_numbers, proto)


def _ragged_dot(a: RaggedDotAttributes, proto: Any, _: Instruction) -> None:
    numbers = proto.ragged_dot_dimension_numbers
    _dot_numbers(a.dot, numbers.dot_dimension_numbers, proto)
    numbers.lhs_ragged_dimensions.extend(a.lhs_ragged)
    numbers.rhs_group_dimensions.extend(a.rhs_group)


def _window_dimensions(window: Sequence[WindowDimension], proto: Any) -> None:
    proto.window.SetInParent()
    for w in window:
        proto.window.dimensions.add(
            size=w.size,
            stride=w.stride,
            padding_low=w.padding_low,
            padding_high=w.padding_high,
            window_dilation=w.window_dilation,
            base_dilation=w.base_dilation,
            window_reversal=w.window_reversal,
        )


def _window(a: WindowAttributes, proto: Any, _: Instruction) -> None:
    _window_dimensions(a.window, proto)


def _convolution(a: ConvolutionAttributes, proto: Any, _: Instruction) -> None:
    _window_dimensions(a.window, proto)
    numbers = proto.convolution_dimension_numbers
    numbers.SetInParent()
    numbers.input_batch_dimension, numbers.input_feature_dimension = a.input_batch, a.input_feature
    numbers.input_spatial_dimensions.extend(a.input_spatial)
    numbers.kernel_input_feature_dimension = a.kernel_input_feature
    numbers.kernel_output_feature_dimension = a.kernel_output_feature
    numbers.kernel_spatial_dimensions.extend(a.kernel_spatial)
    numbers.output_batch_dimension, numbers.output_feature_dimension = a.output_batch, a.output_feature
    numbers.output_spatial_dimensions.extend(a.output_spatial)
    proto.feature_group_count, proto.batch_group_count = a.feature_group_count, a.batch_group_count
    _precision(a.precision, proto)


def _gather(a: GatherAttributes, proto: Any, _: Instruction) -> None:
    numbers = proto.gather_dimension_numbers
    numbers.SetInParent()
    numbers.offset_dims.extend(a.offset_dims)
    numbers.collapsed_slice_dims.extend(a.collapsed_slice_dims)
    numbers.start_index_map.extend(a.start_index_map)
    numbers.index_vector_dim = a.index_vector_dim
    numbers.operand_batching_dims.extend(a.operand_batching_dims)
    numbers.start_indices_batching_dims.extend(a.start_indices_batching_dims)
    proto.gather_slice_sizes.extend(a.slice_sizes)
    proto.indices_are_sorted = a.indices_are_sorted


def _scatter(a: ScatterAttributes, proto: Any, _: Instruction) -> None:
    numbers = proto.scatter_dimension_numbers
    numbers.SetInParent()
    numbers.update_window_dims.extend(a.update_window_dims)
    numbers.inserted_window_dims.extend(a.inserted_window_dims)
    numbers.scatter_dims_to_operand_dims.extend(a.scatter_dims_to_operand_dims)
    numbers.index_vector_dim = a.index_vector_dim
    numbers.input_batching_dims.extend(a.input_batching_dims)
    numbers.scatter_indices_batching_dims.extend(a.scatter_indices_batching_dims)
    proto.indices_are_sorted, proto.unique_indices = a.indices_are_sorted, a.unique_indices


def _sort(a: SortAttributes, proto: Any, _: Instruction) -> None:
    proto.dimensions.append(a.dimension)
    proto.is_stable = a.is_stable


def _fft(a: FftAttributes, proto: Any, _: Instruction) -> None:
    proto.fft_type = int(a.fft_type)
    proto.fft_length.extend(a.lengths)


def _cholesky(a: CholeskyAttributes, proto: Any, _: Instruction) -> None:
    proto.cholesky_options.SetInParent()
    proto.cholesky_options.lower = a.lower


def _triangular_solve(a: TriangularSolveAttributes, proto: Any, _: Instruction) -> None:
    options = proto.triangular_solve_options
    options.left_side, options.lower, options.unit_diagonal = a.left_side, a.lower, a.unit_diagonal
    options.transpose_a = int(a.transpose_a)


def _set_layouts(proto: Any, layouts: Iterator[Dims]) -> None:
    if proto.tuple_shapes:
        for element in proto.tuple_shapes:
            _set_layouts(element, layouts)
    elif proto.HasField("layout"):
        proto.layout.minor_to_major[:] = next(layouts)
    else:
        next(layouts)


def _custom_call(a: CustomCallAttributes, proto: Any, instruction: Instruction) -> None:
    proto.custom_call_target, proto.backend_config = a.target, a.backend_config
    proto.custom_call_api_version = a.api_version
    proto.custom_call_has_side_effect = a.has_side_effect
    for path, operand in a.output_operand_aliases:
        alias = proto.output_operand_aliasing.add(operand_index=operand)
        alias.output_shape_index.extend(path)
    if a.operand_layouts or a.result_layouts:
        proto.constrain_layout = True
        for value in instruction.operands:
            write_shape(value.shape, proto.operand_shapes_with_layout.add())
    if a.operand_layouts:
        layouts = iter(a.operand_layouts)
        for shape in proto.operand_shapes_with_layout:
            _set_layouts(shape, layouts)
    if a.result_layouts:
        _set_layouts(proto.shape, iter(a.result_layouts))


def _while(a: WhileAttributes, proto: Any, _: Instruction) -> None:
    if a.trip_count is not None:
        proto.backend_config = json.dumps({"known_trip_count": {"n": str(a.trip_count)}}).encode()


def _collective(a: CollectiveAttributes, proto: Any, instruction: Instruction) -> None:
    if (
        instruction.opcode is Opcode.ALL_TO_ALL
        and isinstance(instruction.shape, TupleShape)
        and a.dimension is not None
    ):
        raise TypeError(f"{instruction!r}: all-to-all has a dimension or several operands")
    proto.collective_device_list.SetInParent()
    for group in a.replica_groups:
        proto.collective_device_list.replica_groups.add(replica_ids=group)
    proto.channel_id = a.channel_id or 0
    proto.use_global_device_ids = a.use_global_device_ids
    if a.dimension is not None:
        proto.dimensions.append(a.dimension)


def _collective_permute(a: CollectivePermuteAttributes, proto: Any, _: Instruction) -> None:
    for source, target in a.source_target_pairs:
        proto.source_target_pairs.add(source=source, target=target)
    proto.channel_id = a.channel_id or 0


def _parameter(a: ParameterAttributes, proto: Any, _: Instruction) -> None:
    proto.parameter_number = a.number


def _dimension(a: DimensionAttributes, proto: Any, _: Instruction) -> None:
    proto.dimensions.append(a.dimension)


def _rng_bit_generator(a: RngBitGeneratorAttributes, proto: Any, _: Instruction) -> None:
    proto.rng_algorithm = int(a.algorithm)


def _rng(a: RngAttributes, proto: Any, _: Instruction) -> None:
    proto.distribution = int(a.distribution)


def _tuple_index(a: TupleIndexAttributes, proto: Any, _: Instruction) -> None:
    proto.tuple_index = a.index


def _of_message(a: Any, proto: Any, _: Instruction) -> None:
    for field in fields(a):
        setattr(proto, field.name, getattr(a, field.name))


_WRITERS: dict[type, Writer | None] = {
    NoAttributes: None,
    **dict.fromkeys(OF_MESSAGE, _of_message),
    ParameterAttributes: _parameter,
    ConstantAttributes: _constant,
    DimensionAttributes: _dimension,
    DimensionsAttributes: _dimensions,
    CompareAttributes: _compare,
    SliceAttributes: _slice,
    DynamicSliceAttributes: _dynamic_slice,
    PadAttributes: _pad,
    DotAttributes: _dot,
    RaggedDotAttributes: _ragged_dot,
    WindowAttributes: _window,
    ConvolutionAttributes: _convolution,
    GatherAttributes: _gather,
    ScatterAttributes: _scatter,
    SortAttributes: _sort,
    FftAttributes: _fft,
    CholeskyAttributes: _cholesky,
    TriangularSolveAttributes: _triangular_solve,
    RngBitGeneratorAttributes: _rng_bit_generator,
    RngAttributes: _rng,
    CustomCallAttributes: _custom_call,
    TupleIndexAttributes: _tuple_index,
    WhileAttributes: _while,
    CollectiveAttributes: _collective,
    CollectivePermuteAttributes: _collective_permute,
}
