"""Typed attributes, one frozen dataclass for each kind of instruction that has any. Field names are HLO's.

``ATTRIBUTES_OF`` tells which class an opcode carries; the verifier holds every instruction to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
from flagos_backend.ir.types import ArrayShape

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoAttributes:
    pass


@dataclass(frozen=True, slots=True)
class ParameterAttributes:
    number: int


@dataclass(frozen=True, slots=True)
class ConstantAttributes:
    """``data``: the elements, row major, little endian, sub-byte types one byte each."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class DimensionAttributes:
    """iota, concatenate, get-dimension-size."""

    dimension: int


@dataclass(frozen=True, slots=True)
class DimensionsAttributes:
    """broadcast: dimensions[i] is the result dimension of operand dimension i. transpose: the permutation, result
    dimension i is operand dimension dimensions[i]. reverse: which to turn. reduce: which to reduce. map: all."""

    dimensions: Dims


@dataclass(frozen=True, slots=True)
class CompareAttributes:
    direction: Comparison
    order: ComparisonOrder = ComparisonOrder.PARTIAL


@dataclass(frozen=True, slots=True)
class ReducePrecisionAttributes:
    exponent_bits: int
    mantissa_bits: int


@dataclass(frozen=True, slots=True)
class SliceAttributes:
    starts: Dims
    limits: Dims
    strides: Dims


@dataclass(frozen=True, slots=True)
class DynamicSliceAttributes:
    """Operands: array, then one scalar start index a dimension; starts are clamped into bounds."""

    sizes: Dims


@dataclass(frozen=True, slots=True)
class PadAttributes:
    """Negative low or high crop. ``interior`` goes between elements."""

    low: Dims
    high: Dims
    interior: Dims


@dataclass(frozen=True, slots=True)
class DotAttributes:
    lhs_contracting: Dims
    rhs_contracting: Dims
    lhs_batch: Dims = ()
    rhs_batch: Dims = ()
    precision: Precision = Precision.DEFAULT
    algorithm: DotAlgorithm = DotAlgorithm.UNSET

    @property
    def allows_tensor_float(self) -> bool:
        """Whether operands of f32 may be rounded to TF32: HLO's default precision allows it, as XLA does on GPUs."""
        if self.algorithm in (DotAlgorithm.TF32_TF32_F32, DotAlgorithm.TF32_TF32_F32_X3):
            return self.algorithm is DotAlgorithm.TF32_TF32_F32
        return self.algorithm is DotAlgorithm.UNSET and self.precision is Precision.DEFAULT


@dataclass(frozen=True, slots=True)
class RaggedDotAttributes:
    dot: DotAttributes
    lhs_ragged: Dims
    rhs_group: Dims


@dataclass(frozen=True, slots=True)
class WindowDimension:
    size: int
    stride: int = 1
    padding_low: int = 0
    padding_high: int = 0
    window_dilation: int = 1
    base_dilation: int = 1
    window_reversal: bool = False


@dataclass(frozen=True, slots=True)
class WindowAttributes:
    """reduce-window, select-and-scatter: one entry for each operand dimension."""

    window: tuple[WindowDimension, ...]


@dataclass(frozen=True, slots=True)
class ConvolutionAttributes:
    """``window`` has one entry for each spatial dimension, in the order of the *_spatial tuples."""

    window: tuple[WindowDimension, ...]
    input_batch: int
    input_feature: int
    input_spatial: Dims
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: Dims
    output_batch: int
    output_feature: int
    output_spatial: Dims
    feature_group_count: int = 1
    batch_group_count: int = 1
    precision: Precision = Precision.DEFAULT


@dataclass(frozen=True, slots=True)
class IndexNumber:
    """Where the numbers are that indices have for one dimension: in operand number ``operand``, read as an array of
    ``dims``, at ``component`` of its index vectors. Negative ones count from ``wrap``."""

    operand: int
    dims: Dims
    component: int
    wrap: int = 0


@dataclass(frozen=True, slots=True)
class GatherAttributes:
    offset_dims: Dims
    collapsed_slice_dims: Dims
    start_index_map: Dims
    index_vector_dim: int
    slice_sizes: Dims
    operand_batching_dims: Dims = ()
    start_indices_batching_dims: Dims = ()
    indices_are_sorted: bool = False

    def index_shape(self, indices: tuple[ArrayShape, ...]) -> ArrayShape | None:
        """The shape of the index vectors that are in the operands ``indices``; None if those do not hold any."""
        return indices[0] if len(indices) == 1 else None

    def index_number(self, number: int, indices: tuple[Dims, ...]) -> IndexNumber:
        """The numbers for dimension ``start_index_map[number]``. ``indices``: the dimensions of those operands."""
        return IndexNumber(1, indices[0], number)


@dataclass(frozen=True, slots=True)
class ScatterAttributes:
    """Operands: n arrays, the indices, n updates. called[0] combines; n results (a tuple when n > 1).
    ``unique_indices``: no element is updated twice, or what is written over an element may be any of its updates."""

    update_window_dims: Dims
    inserted_window_dims: Dims
    scatter_dims_to_operand_dims: Dims
    index_vector_dim: int
    input_batching_dims: Dims = ()
    scatter_indices_batching_dims: Dims = ()
    indices_are_sorted: bool = False
    unique_indices: bool = False

    def num_arrays(self, num_operands: int) -> int:
        """How many arrays are updated."""
        return num_operands // 2

    def index_shape(self, indices: tuple[ArrayShape, ...]) -> ArrayShape | None:
        """As of GatherAttributes."""
        return indices[0] if len(indices) == 1 else None


@dataclass(frozen=True, slots=True)
class SortAttributes:
    """called[0] takes (lhs_0, rhs_0, lhs_1, rhs_1, ...) scalars and says whether lhs goes before rhs."""

    dimension: int
    is_stable: bool


@dataclass(frozen=True, slots=True)
class TopKAttributes:
    k: int
    largest: bool = True


@dataclass(frozen=True, slots=True)
class FftAttributes:
    fft_type: FftType
    lengths: Dims


@dataclass(frozen=True, slots=True)
class CholeskyAttributes:
    lower: bool


@dataclass(frozen=True, slots=True)
class TriangularSolveAttributes:
    left_side: bool
    lower: bool
    unit_diagonal: bool
    transpose_a: TransposeA


@dataclass(frozen=True, slots=True)
class RngBitGeneratorAttributes:
    algorithm: RngAlgorithm


@dataclass(frozen=True, slots=True)
class RngAttributes:
    distribution: RngDistribution


@dataclass(frozen=True, slots=True)
class BatchNormAttributes:
    epsilon: float
    feature_index: int


@dataclass(frozen=True, slots=True)
class CustomCallAttributes:
    """``output_operand_aliases``: pairs (result tuple index path, operand number) the callee may share storage for.
    The ``*_layouts`` are what a layout-constrained callee of stock XLA would see, minor to major, one for each array
    inside the operands (results), or empty: all row major. Values of the IR are row major whatever they say."""

    target: str
    backend_config: bytes = b""
    api_version: int = 0
    has_side_effect: bool = False
    output_operand_aliases: tuple[tuple[Dims, int], ...] = ()
    operand_layouts: tuple[Dims, ...] = ()
    result_layouts: tuple[Dims, ...] = ()


@dataclass(frozen=True, slots=True)
class TupleIndexAttributes:
    index: int


@dataclass(frozen=True, slots=True)
class WhileAttributes:
    """called = (condition, body). ``trip_count`` is None when unknown."""

    trip_count: int | None = None


@dataclass(frozen=True, slots=True)
class CollectiveAttributes:
    """``replica_groups``: lists of participants; empty means all in one group. What a number in them names follows
    from ``channel_id`` and ``use_global_device_ids`` as in HLO: replicas, partitions or flattened ids.
    ``dimension``: what all-gather and reduce-scatter split, all-to-all's split dimension (None: tuple form)."""

    replica_groups: tuple[Dims, ...] = ()
    channel_id: int | None = None
    use_global_device_ids: bool = False
    dimension: int | None = None


@dataclass(frozen=True, slots=True)
class CollectivePermuteAttributes:
    source_target_pairs: tuple[tuple[int, int], ...]
    channel_id: int | None = None


Attributes = (
    NoAttributes
    | ParameterAttributes
    | ConstantAttributes
    | DimensionAttributes
    | DimensionsAttributes
    | CompareAttributes
    | ReducePrecisionAttributes
    | SliceAttributes
    | DynamicSliceAttributes
    | PadAttributes
    | DotAttributes
    | RaggedDotAttributes
    | WindowAttributes
    | ConvolutionAttributes
    | GatherAttributes
    | ScatterAttributes
    | SortAttributes
    | TopKAttributes
    | FftAttributes
    | CholeskyAttributes
    | TriangularSolveAttributes
    | RngBitGeneratorAttributes
    | RngAttributes
    | BatchNormAttributes
    | CustomCallAttributes
    | TupleIndexAttributes
    | WhileAttributes
    | CollectiveAttributes
    | CollectivePermuteAttributes
)

NONE = NoAttributes()

#: Those whose fields are numbers of HloInstructionProto under its own names, which importer and exporter copy.
OF_MESSAGE: frozenset[type[Attributes]] = frozenset({BatchNormAttributes, ReducePrecisionAttributes, TopKAttributes})
ATTRIBUTES_OF: dict[Opcode, type[Attributes]] = dict.fromkeys(Opcode, NoAttributes) | {
    Opcode.PARAMETER: ParameterAttributes,
    Opcode.CONSTANT: ConstantAttributes,
    Opcode.IOTA: DimensionAttributes,
    Opcode.CONCATENATE: DimensionAttributes,
    Opcode.GET_DIMENSION_SIZE: DimensionAttributes,
    Opcode.BROADCAST: DimensionsAttributes,
    Opcode.TRANSPOSE: DimensionsAttributes,
    Opcode.REVERSE: DimensionsAttributes,
    Opcode.REDUCE: DimensionsAttributes,
    Opcode.MAP: DimensionsAttributes,
    Opcode.COMPARE: CompareAttributes,
    Opcode.REDUCE_PRECISION: ReducePrecisionAttributes,
    Opcode.SLICE: SliceAttributes,
    Opcode.DYNAMIC_SLICE: DynamicSliceAttributes,
    Opcode.PAD: PadAttributes,
    Opcode.DOT: DotAttributes,
    Opcode.RAGGED_DOT: RaggedDotAttributes,
    Opcode.REDUCE_WINDOW: WindowAttributes,
    Opcode.SELECT_AND_SCATTER: WindowAttributes,
    Opcode.CONVOLUTION: ConvolutionAttributes,
    Opcode.GATHER: GatherAttributes,
    Opcode.SCATTER: ScatterAttributes,
    Opcode.SORT: SortAttributes,
    Opcode.TOP_K: TopKAttributes,
    Opcode.FFT: FftAttributes,
    Opcode.CHOLESKY: CholeskyAttributes,
    Opcode.TRIANGULAR_SOLVE: TriangularSolveAttributes,
    Opcode.RNG_BIT_GENERATOR: RngBitGeneratorAttributes,
    Opcode.RNG: RngAttributes,
    Opcode.BATCH_NORM_TRAINING: BatchNormAttributes,
    Opcode.BATCH_NORM_INFERENCE: BatchNormAttributes,
    Opcode.BATCH_NORM_GRAD: BatchNormAttributes,
    Opcode.CUSTOM_CALL: CustomCallAttributes,
    Opcode.GET_TUPLE_ELEMENT: TupleIndexAttributes,
    Opcode.WHILE: WhileAttributes,
    Opcode.ALL_GATHER: CollectiveAttributes,
    Opcode.ALL_REDUCE: CollectiveAttributes,
    Opcode.ALL_TO_ALL: CollectiveAttributes,
    Opcode.COLLECTIVE_BROADCAST: CollectiveAttributes,
    Opcode.RAGGED_ALL_TO_ALL: CollectiveAttributes,
    Opcode.REDUCE_SCATTER: CollectiveAttributes,
    Opcode.COLLECTIVE_PERMUTE: CollectivePermuteAttributes,
}
