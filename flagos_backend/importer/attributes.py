"""HloInstructionProto to typed attributes: one reader an opcode. Part of the importer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from flagos_backend.errors import MalformedProgram, UnsupportedAttribute
from flagos_backend.importer.devices import read_replica_groups
from flagos_backend.importer.schema import WhileLoopBackendConfig
from flagos_backend.importer.shapes import moves_data, read_layout, row_major
from flagos_backend.ir.attributes import (
    ATTRIBUTES_OF,
    NONE,
    OF_MESSAGE,
    Attributes,
    CholeskyAttributes,
    CollectiveAttributes,
    CollectivePermuteAttributes,
    CompareAttributes,
    ConvolutionAttributes,
    CustomCallAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    Dims,
    DotAttributes,
    DynamicSliceAttributes,
    FftAttributes,
    GatherAttributes,
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
from flagos_backend.ir.config import parse_config
from flagos_backend.ir.opcode import (
    Comparison,
    ComparisonOrder,
    DotAlgorithm,
    FftType,
    Opcode,
    Precision,
    RngAlgorithm,
    RngDistribution,
    TransposeA,
)

E = TypeVar("E")
# Reads (message, place): the place goes into errors.
Reader = Callable[[Any, object], Attributes]

# Integers have one order, which XLA of jaxlib 0.11 and later calls total. Here one name stands for it.
_INTEGER_COMPARISONS = ("SIGNED", "UNSIGNED")
_COMPARISON_TYPES = ("", "FLOAT", "TOTALORDER", *_INTEGER_COMPARISONS)
# XLA of jaxlib 0.11 and later says it in a field of its own.
_COMPARISON_ORDERS = {
    "": ComparisonOrder.PARTIAL,
    "PARTIAL": ComparisonOrder.PARTIAL,
    "PARTIALORDER": ComparisonOrder.PARTIAL,
    "TOTAL": ComparisonOrder.TOTAL,
    "TOTALORDER": ComparisonOrder.TOTAL,
}


def read_attributes(opcode: Opcode, proto: Any, place: object) -> Attributes:
    """Raises MalformedProgram or UnsupportedAttribute."""
    reader = _READERS.get(opcode)
    return NONE if reader is None else reader(proto, place)


def _enum(kind: Callable[[Any], E], value: object, attribute: str, place: object) -> E:
    try:
        return kind(value)
    except ValueError:
        raise UnsupportedAttribute(attribute=attribute, value=value, place=place) from None


def _only(values: Sequence[int], attribute: str, place: object) -> int:
    if len(values) != 1:
        raise MalformedProgram(fact=f"{attribute} has {len(values)} entries, not one", place=place)
    return values[0]


def _dimension(proto: Any, place: object) -> Attributes:
    return DimensionAttributes(_only(proto.dimensions, "dimensions", place))


def _dimensions(proto: Any, _: object) -> Attributes:
    return DimensionsAttributes(tuple(proto.dimensions))


def _compare(proto: Any, place: object) -> Attributes:
    direction = _enum(Comparison, proto.comparison_direction, "comparison_direction", place)
    kind = proto.comparison_type
    if kind not in _COMPARISON_TYPES:
        raise UnsupportedAttribute(attribute="comparison_type", value=kind, place=place)
    order = _COMPARISON_ORDERS.get(proto.comparison_order)
    if order is None:
        raise UnsupportedAttribute(attribute="comparison_order", value=proto.comparison_order, place=place)
    if kind in _INTEGER_COMPARISONS:
        order = ComparisonOrder.PARTIAL
    return CompareAttributes(direction, ComparisonOrder.TOTAL if kind == "TOTALORDER" else order)


def _slice(proto: Any, _: object) -> Attributes:
    starts, limits, strides = [], [], []
    for dimension in proto.slice_dimensions:
        starts.append(dimension.start)
        limits.append(dimension.limit)
        strides.append(dimension.stride)
    return SliceAttributes(tuple(starts), tuple(limits), tuple(strides))


def _pad(proto: Any, _: object) -> Attributes:
    dimensions = proto.padding_config.dimensions
    return PadAttributes(
        tuple(d.edge_padding_low for d in dimensions),
        tuple(d.edge_padding_high for d in dimensions),
        tuple(d.interior_padding for d in dimensions),
    )


def _precision(proto: Any, place: object) -> Precision:
    """The greater of the operands' precisions."""
    values = [_enum(Precision, v, "operand_precision", place) for v in proto.precision_config.operand_precision]
    return max(values, default=Precision.DEFAULT)


def _dot_attributes(numbers: Any, proto: Any, place: object) -> DotAttributes:
    if proto.sparsity_config.ByteSize():
        raise UnsupportedAttribute(attribute="sparsity_config", value=proto.sparsity_config, place=place)
    return DotAttributes(
        tuple(numbers.lhs_contracting_dimensions),
        tuple(numbers.rhs_contracting_dimensions),
        tuple(numbers.lhs_batch_dimensions),
        tuple(numbers.rhs_batch_dimensions),
        _precision(proto, place),
        _enum(DotAlgorithm, proto.precision_config.algorithm, "precision_config.algorithm", place),
    )


def _dot(proto: Any, place: object) -> Attributes:
    return _dot_attributes(proto.dot_dimension_numbers, proto, place)


def _ragged_dot(proto: Any, place: object) -> Attributes:
    numbers = proto.ragged_dot_dimension_numbers
    dot = _dot_attributes(numbers.dot_dimension_numbers, proto, place)
    return RaggedDotAttributes(dot, tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions))


def _window(proto: Any) -> tuple[WindowDimension, ...]:
    return tuple(
        WindowDimension(
            d.size, d.stride, d.padding_low, d.padding_high, d.window_dilation, d.base_dilation, d.window_reversal
        )
        for d in proto.window.dimensions
    )


def _convolution(proto: Any, place: object) -> Attributes:
    for attribute in ("padding_type", "conv_kind"):
        if value := getattr(proto, attribute):
            raise UnsupportedAttribute(attribute=attribute, value=value, place=place)
    if proto.sparsity_config.ByteSize():
        raise UnsupportedAttribute(attribute="sparsity_config", value=proto.sparsity_config, place=place)
    numbers = proto.convolution_dimension_numbers
    return ConvolutionAttributes(
        _window(proto),
        numbers.input_batch_dimension,
        numbers.input_feature_dimension,
        tuple(numbers.input_spatial_dimensions),
        numbers.kernel_input_feature_dimension,
        numbers.kernel_output_feature_dimension,
        tuple(numbers.kernel_spatial_dimensions),
        numbers.output_batch_dimension,
        numbers.output_feature_dimension,
        tuple(numbers.output_spatial_dimensions),
        proto.feature_group_count or 1,
        proto.batch_group_count or 1,
        _precision(proto, place),
    )


def _gather(proto: Any, _: object) -> Attributes:
    numbers = proto.gather_dimension_numbers
    return GatherAttributes(
        tuple(numbers.offset_dims),
        tuple(numbers.collapsed_slice_dims),
        tuple(numbers.start_index_map),
        numbers.index_vector_dim,
        tuple(proto.gather_slice_sizes),
        tuple(numbers.operand_batching_dims),
        tuple(numbers.start_indices_batching_dims),
        proto.indices_are_sorted,
    )


def _scatter(proto: Any, _: object) -> Attributes:
    numbers = proto.scatter_dimension_numbers
    return ScatterAttributes(
        tuple(numbers.update_window_dims),
        tuple(numbers.inserted_window_dims),
        tuple(numbers.scatter_dims_to_operand_dims),
        numbers.index_vector_dim,
        tuple(numbers.input_batching_dims),
        tuple(numbers.scatter_indices_batching_dims),
        proto.indices_are_sorted,
        proto.unique_indices,
    )


def _triangular_solve(proto: Any, place: object) -> Attributes:
    options = proto.triangular_solve_options
    transpose = _enum(TransposeA, options.transpose_a, "transpose_a", place)
    return TriangularSolveAttributes(options.left_side, options.lower, options.unit_diagonal, transpose)


def _fft(proto: Any, place: object) -> Attributes:
    return FftAttributes(_enum(FftType, proto.fft_type, "fft_type", place), tuple(proto.fft_length))


def _while(proto: Any, place: object) -> Attributes:
    """The trip count that XLA's own passes leave in the backend config, as JSON or in binary."""
    if proto.backend_config_payload.value:
        config = WhileLoopBackendConfig()
        try:
            config.ParseFromString(proto.backend_config_payload.value)
        except Exception as error:  # DecodeError has no stable home across protobuf versions
            raise MalformedProgram(fact=f"its backend_config does not parse ({error})", place=place) from None
        return WhileAttributes(config.known_trip_count.n if config.HasField("known_trip_count") else None)
    if not proto.backend_config:
        return WhileAttributes()
    try:
        known = parse_config(proto.backend_config).get("known_trip_count")
        return WhileAttributes(None if known is None else int(known.get("n", 0)))
    except (ValueError, AttributeError, TypeError, OverflowError) as error:
        raise MalformedProgram(fact=f"its backend_config does not parse ({error})", place=place) from None


def _layouts(shapes: Sequence[Any], place: object) -> tuple[Dims, ...]:
    """minor_to_major of every array inside ``shapes``; () when all are row major."""
    pending, found, moved = list(reversed(shapes)), [], False
    while pending:
        shape = pending.pop()
        if shape.tuple_shapes:
            pending.extend(reversed(shape.tuple_shapes))
        elif shape.HasField("layout"):
            found.append(read_layout(shape, place))
            moved |= moves_data(found[-1], shape.dimensions)
        else:
            found.append(row_major(len(shape.dimensions)))
    return tuple(found) if moved else ()


def _custom_call(proto: Any, place: object) -> Attributes:
    for attribute in ("window", "convolution_dimension_numbers", "dot_dimension_numbers", "literal"):
        if proto.HasField(attribute):
            raise UnsupportedAttribute(attribute=attribute, value=getattr(proto, attribute), place=place)
    aliases = []
    for alias in proto.output_operand_aliasing:
        if alias.operand_shape_index:
            value = tuple(alias.operand_shape_index)
            raise UnsupportedAttribute(
                attribute="output_operand_aliasing.operand_shape_index", value=value, place=place
            )
        aliases.append((tuple(alias.output_shape_index), alias.operand_index))
    constrained = proto.constrain_layout
    return CustomCallAttributes(
        proto.custom_call_target,
        proto.backend_config_payload.value or proto.backend_config,
        proto.custom_call_api_version,
        proto.custom_call_has_side_effect,
        tuple(aliases),
        _layouts(proto.operand_shapes_with_layout, place) if constrained else (),
        _layouts([proto.shape], place) if constrained else (),
    )


def _channel(proto: Any) -> int | None:
    channel: int = proto.channel_id if proto.channel_id > 0 else proto.all_reduce_id
    return channel if channel > 0 else None


def _collective(proto: Any, place: object) -> Attributes:
    dimensions = proto.dimensions
    dimension = _only(dimensions, "dimensions", place) if dimensions else None
    return CollectiveAttributes(
        read_replica_groups(proto, place), _channel(proto), proto.use_global_device_ids, dimension
    )


def _collective_permute(proto: Any, _: object) -> Attributes:
    pairs = tuple((pair.source, pair.target) for pair in proto.source_target_pairs)
    return CollectivePermuteAttributes(pairs, _channel(proto))


def _of_message(kind: type[Attributes]) -> Reader:
    names = [field.name for field in fields(kind)]
    return lambda proto, _: kind(*(getattr(proto, name) for name in names))


_READERS: dict[Opcode, Reader] = {
    **{opcode: _of_message(kind) for opcode, kind in ATTRIBUTES_OF.items() if kind in OF_MESSAGE},
    Opcode.PARAMETER: lambda p, _: ParameterAttributes(p.parameter_number),
    Opcode.IOTA: _dimension,
    Opcode.CONCATENATE: _dimension,
    Opcode.GET_DIMENSION_SIZE: _dimension,
    Opcode.BROADCAST: _dimensions,
    Opcode.TRANSPOSE: _dimensions,
    Opcode.REVERSE: _dimensions,
    Opcode.REDUCE: _dimensions,
    Opcode.MAP: _dimensions,
    Opcode.COMPARE: _compare,
    Opcode.SLICE: _slice,
    Opcode.DYNAMIC_SLICE: lambda p, _: DynamicSliceAttributes(tuple(p.dynamic_slice_sizes)),
    Opcode.PAD: _pad,
    Opcode.DOT: _dot,
    Opcode.RAGGED_DOT: _ragged_dot,
    Opcode.REDUCE_WINDOW: lambda p, _: WindowAttributes(_window(p)),
    Opcode.SELECT_AND_SCATTER: lambda p, _: WindowAttributes(_window(p)),
    Opcode.CONVOLUTION: _convolution,
    Opcode.GATHER: _gather,
    Opcode.SCATTER: _scatter,
    Opcode.SORT: lambda p, place: SortAttributes(_only(p.dimensions, "dimensions", place), p.is_stable),
    Opcode.FFT: _fft,
    Opcode.CHOLESKY: lambda p, _: CholeskyAttributes(p.cholesky_options.lower),
    Opcode.TRIANGULAR_SOLVE: _triangular_solve,
    Opcode.RNG_BIT_GENERATOR: lambda p, place: RngBitGeneratorAttributes(
        _enum(RngAlgorithm, p.rng_algorithm, "rng_algorithm", place)
    ),
    Opcode.RNG: lambda p, place: RngAttributes(_enum(RngDistribution, p.distribution, "distribution", place)),
    Opcode.CUSTOM_CALL: _custom_call,
    Opcode.GET_TUPLE_ELEMENT: lambda p, _: TupleIndexAttributes(p.tuple_index),
    Opcode.WHILE: _while,
    Opcode.ALL_GATHER: _collective,
    Opcode.ALL_REDUCE: _collective,
    Opcode.ALL_TO_ALL: _collective,
    Opcode.COLLECTIVE_BROADCAST: _collective,
    Opcode.RAGGED_ALL_TO_ALL: _collective,
    Opcode.REDUCE_SCATTER: _collective,
    Opcode.COLLECTIVE_PERMUTE: _collective_permute,
}
