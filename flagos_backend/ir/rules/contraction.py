"""Shape rules: contractions, reductions, windows, sorts."""

from __future__ import annotations

from collections.abc import Sequence

from flagos_backend.ir.attributes import (
    ConvolutionAttributes,
    DimensionsAttributes,
    DotAttributes,
    RaggedDotAttributes,
    SortAttributes,
    TopKAttributes,
    WindowAttributes,
    WindowDimension,
)
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.rules.common import (
    Operation,
    Rule,
    as_result,
    broken,
    expect_combiner,
    expect_distinct,
    expect_same_dims,
    expect_scalar,
    scalar,
)
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape


def _contracted_type(operation: Operation, lhs: ArrayShape, rhs: ArrayShape) -> ElementType:
    """The element type is the producer's choice (preferred_element_type); without a choice, the operands'."""
    for shape in (lhs, rhs):
        if shape.element_type is ElementType.PRED and operation.opcode is not Opcode.DOT:
            broken(f"{operation.opcode} does not take pred")
    if operation.declared is not None:
        result = operation.declared_array().element_type
        if result.is_complex != (lhs.element_type.is_complex or rhs.element_type.is_complex):
            broken(f"{operation.opcode} of {lhs} and {rhs} does not make {result.name.lower()}")
        return result
    if lhs.element_type is not rhs.element_type:
        broken(f"{operation.opcode} of {lhs} and {rhs} needs a declared element type")
    return lhs.element_type


def _expect_paired(lhs: ArrayShape, rhs: ArrayShape, a: DotAttributes) -> None:
    expect_distinct((*a.lhs_batch, *a.lhs_contracting), lhs.rank, "lhs batch and contracting dimensions")
    expect_distinct((*a.rhs_batch, *a.rhs_contracting), rhs.rank, "rhs batch and contracting dimensions")
    for what, left, right in (
        ("batch", a.lhs_batch, a.rhs_batch),
        ("contracting", a.lhs_contracting, a.rhs_contracting),
    ):
        equal = len(left) == len(right) and all(lhs.dims[i] == rhs.dims[j] for i, j in zip(left, right, strict=True))
        if not equal:
            broken(f"{what} dimensions {list(left)} of {lhs} and {list(right)} of {rhs} must pair up")


def _free(shape: ArrayShape, used: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for dimension, size in enumerate(shape.dims) if dimension not in used)


def _dot(operation: Operation) -> Shape:
    operation.expect_operands(2)
    lhs, rhs = operation.arrays()
    a = operation.attributes_as(DotAttributes)
    _expect_paired(lhs, rhs, a)
    batch = tuple(lhs.dims[dimension] for dimension in a.lhs_batch)
    rows, columns = _free(lhs, (*a.lhs_batch, *a.lhs_contracting)), _free(rhs, (*a.rhs_batch, *a.rhs_contracting))
    return ArrayShape(_contracted_type(operation, lhs, rhs), batch + rows + columns)


def _ragged_dot(operation: Operation) -> Shape:
    """The ragged dimension of lhs is a free one, a contracting one or a batch one: three modes."""
    operation.expect_operands(3)
    lhs, rhs, group_sizes = operation.arrays()
    a = operation.attributes_as(RaggedDotAttributes)
    expect_distinct(a.lhs_ragged, lhs.rank, "lhs_ragged")
    expect_distinct(a.rhs_group, rhs.rank, "rhs_group")
    if len(a.lhs_ragged) != 1 or not group_sizes.element_type.is_integer or not group_sizes.rank:
        broken("ragged-dot takes one ragged dimension and integer group sizes")
    _expect_paired(lhs, rhs, a.dot)
    ragged, groups = a.lhs_ragged[0], group_sizes.dims[-1]
    batch = tuple(lhs.dims[dimension] for dimension in a.dot.lhs_batch)
    rows = _free(lhs, (*a.dot.lhs_batch, *a.dot.lhs_contracting))
    columns = _free(rhs, (*a.dot.rhs_batch, *a.dot.rhs_contracting, *a.rhs_group))
    free_mode = ragged not in (*a.dot.lhs_batch, *a.dot.lhs_contracting)
    if len(a.rhs_group) != int(free_mode) or (free_mode and rhs.dims[a.rhs_group[0]] != groups):
        broken(f"rhs_group {list(a.rhs_group)} of {rhs} does not fit {groups} groups")
    leading = (groups,) if ragged in a.dot.lhs_contracting else ()
    return ArrayShape(_contracted_type(operation, lhs, rhs), leading + batch + rows + columns)


def window_result(sizes: Sequence[int], window: Sequence[WindowDimension]) -> tuple[int, ...]:
    """How many window positions fit each padded, dilated dimension. Raises RuleBroken."""
    if len(sizes) != len(window):
        broken(f"the window has {len(window)} dimensions, the operand {len(sizes)}")
    dims = []
    for size, w in zip(sizes, window, strict=True):
        if w.size < 1 or w.stride < 1 or w.window_dilation < 1 or w.base_dilation < 1:
            broken(f"a window's size, stride and dilations must be at least 1, got {w}")
        padded = w.padding_low + w.padding_high + (0 if size == 0 else (size - 1) * w.base_dilation + 1)
        reach = (w.size - 1) * w.window_dilation + 1
        if padded < 0:
            broken(f"the window crops a dimension of {size} to {padded}")
        dims.append(0 if padded < reach else (padded - reach) // w.stride + 1)
    return tuple(dims)


def _convolution(operation: Operation) -> Shape:
    operation.expect_operands(2)
    lhs, rhs = operation.arrays()
    a = operation.attributes_as(ConvolutionAttributes)
    rank = len(a.window) + 2
    if lhs.rank != rank or rhs.rank != rank:
        broken(f"{len(a.window)} spatial dimensions need operands of rank {rank}, got {lhs} and {rhs}")
    for what, dims in (
        ("input", (a.input_batch, a.input_feature, *a.input_spatial)),
        ("kernel", (a.kernel_input_feature, a.kernel_output_feature, *a.kernel_spatial)),
        ("output", (a.output_batch, a.output_feature, *a.output_spatial)),
    ):
        if sorted(dims) != list(range(rank)):
            broken(f"the {what} dimension numbers {list(dims)} do not name each of {rank} dimensions once")
    if any(rhs.dims[d] != w.size for d, w in zip(a.kernel_spatial, a.window, strict=True)):
        broken(f"the window's sizes are not those of the kernel {rhs}")
    batch, features, outputs = lhs.dims[a.input_batch], lhs.dims[a.input_feature], rhs.dims[a.kernel_output_feature]
    groups, batch_groups = a.feature_group_count, a.batch_group_count
    if groups < 1 or batch_groups < 1 or (groups > 1 and batch_groups > 1):
        broken(f"group counts must be at least 1 and not both greater, got {groups} and {batch_groups}")
    if rhs.dims[a.kernel_input_feature] * groups != features:
        broken(f"{features} input features do not make {groups} groups of {rhs.dims[a.kernel_input_feature]}")
    if outputs % groups or outputs % batch_groups or batch % batch_groups:
        broken(f"{outputs} output features or a batch of {batch} do not divide into {groups}, {batch_groups} groups")
    spatial = window_result([lhs.dims[d] for d in a.input_spatial], a.window)
    sizes = {a.output_batch: batch // batch_groups, a.output_feature: outputs}
    sizes |= dict(zip(a.output_spatial, spatial, strict=True))
    return ArrayShape(_contracted_type(operation, lhs, rhs), tuple(sizes[dimension] for dimension in range(rank)))


def _map(operation: Operation) -> Shape:
    arrays = operation.arrays()
    if not arrays:
        broken("map takes at least one operand")
    expect_same_dims(arrays)
    signature = operation.called[0]
    if signature.parameters != tuple(scalar(shape.element_type) for shape in arrays):
        broken(f"map's computation takes {', '.join(map(str, signature.parameters))}")
    return ArrayShape(expect_scalar(signature.result, "the result of map's computation"), arrays[0].dims)


def _arrays_and_inits(operation: Operation) -> tuple[tuple[ArrayShape, ...], tuple[ElementType, ...]]:
    """n arrays, n scalars and a combiner: the arrays and the element types that it makes of them."""
    count = len(operation.operands) // 2
    if len(operation.operands) != 2 * count or not count:
        broken(f"{operation.opcode} takes n arrays and n initial values, got {len(operation.operands)} operands")
    arrays = operation.arrays()
    expect_same_dims(arrays[:count])
    types = [shape.element_type for shape in arrays[:count]]
    found = expect_combiner(operation.called[0], types, f"{operation.opcode}'s computation")
    for shape, element_type in zip(arrays[count:], types, strict=True):
        if shape.dims or (shape.element_type is not element_type and not shape.element_type.is_float):
            broken(f"an initial value must be a scalar of {element_type.name.lower()}, not {shape}")
    return arrays[:count], found


def _reduce(operation: Operation) -> Shape:
    arrays, types = _arrays_and_inits(operation)
    dims = operation.attributes_as(DimensionsAttributes).dimensions
    expect_distinct(dims, arrays[0].rank, "reduce's dimensions")
    kept = _free(arrays[0], dims)
    return as_result([ArrayShape(t, kept) for t in types])


def _reduce_window(operation: Operation) -> Shape:
    arrays, types = _arrays_and_inits(operation)
    dims = window_result(arrays[0].dims, operation.attributes_as(WindowAttributes).window)
    return as_result([ArrayShape(t, dims) for t in types])


def _select_and_scatter(operation: Operation) -> Shape:
    operation.expect_operands(3)
    operand, source, init = operation.arrays()
    dims = window_result(operand.dims, operation.attributes_as(WindowAttributes).window)
    if source != ArrayShape(operand.element_type, dims) or init != scalar(operand.element_type):
        broken(f"select-and-scatter of {operand} scatters {list(dims)} values into {init}, got {source}")
    element = scalar(operand.element_type)
    if operation.called[0] != type(operation.called[0])((element, element), scalar(ElementType.PRED)):
        broken(f"select-and-scatter's selection must take two {element} and return pred[]")
    expect_combiner(operation.called[1], [operand.element_type], "select-and-scatter's combination")
    return operand


def _sort(operation: Operation) -> Shape:
    arrays = operation.arrays()
    if not arrays:
        broken("sort takes at least one operand")
    expect_same_dims(arrays)
    expect_distinct([operation.attributes_as(SortAttributes).dimension], arrays[0].rank, "sort's dimension")
    wanted = tuple(scalar(shape.element_type) for shape in arrays for _ in range(2))
    signature = operation.called[0]
    if signature.parameters != wanted or signature.result != scalar(ElementType.PRED):
        broken(f"sort's comparator must take ({', '.join(map(str, wanted))}) and return pred[]")
    return as_result(arrays)


def _top_k(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape = operation.array(0)
    k = operation.attributes_as(TopKAttributes).k
    if not shape.rank or not 0 <= k <= shape.dims[-1] or shape.element_type.is_complex:
        broken(f"topk cannot take {k} of the last dimension of {shape}")
    dims = (*shape.dims[:-1], k)
    return TupleShape((ArrayShape(shape.element_type, dims), ArrayShape(ElementType.S32, dims)))


RULES: dict[Opcode, Rule] = {
    Opcode.DOT: _dot,
    Opcode.RAGGED_DOT: _ragged_dot,
    Opcode.CONVOLUTION: _convolution,
    Opcode.MAP: _map,
    Opcode.REDUCE: _reduce,
    Opcode.REDUCE_WINDOW: _reduce_window,
    Opcode.SELECT_AND_SCATTER: _select_and_scatter,
    Opcode.SORT: _sort,
    Opcode.TOP_K: _top_k,
}
