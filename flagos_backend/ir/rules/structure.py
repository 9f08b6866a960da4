"""Shape rules: leaves, library-shaped operations, tuples, control flow and collectives."""

from __future__ import annotations

from flagos_backend.ir.attributes import (
    BatchNormAttributes,
    CollectiveAttributes,
    CollectivePermuteAttributes,
    ConstantAttributes,
    FftAttributes,
    RngBitGeneratorAttributes,
    TriangularSolveAttributes,
    TupleIndexAttributes,
)
from flagos_backend.ir.opcode import FftType, Opcode, RngAlgorithm
from flagos_backend.ir.rules.common import (
    Operation,
    Rule,
    Signature,
    as_result,
    broken,
    expect_combiner,
    expect_distinct,
    expect_same_dims,
    scalar,
)
from flagos_backend.ir.rules.custom_calls import custom_call
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape

TOKEN = ArrayShape(ElementType.TOKEN)
_FFT_TYPES = {
    ElementType.F32: ElementType.C64,
    ElementType.F64: ElementType.C128,
    ElementType.C64: ElementType.C64,
    ElementType.C128: ElementType.C128,
}


def _declared(operation: Operation) -> Shape:
    """For opcodes that may have any shape: parameter, custom-call."""
    if operation.declared is None:
        broken(f"{operation.opcode} needs a declared shape")
    return operation.declared


def _parameter(operation: Operation) -> Shape:
    operation.expect_operands(0)
    return _declared(operation)


def _constant(operation: Operation) -> Shape:
    operation.expect_operands(0)
    shape = operation.declared_array()
    size = len(operation.attributes_as(ConstantAttributes).data)
    if size != shape.num_bytes:
        broken(f"a constant of {shape} holds {shape.num_bytes} bytes, not {size}")
    return shape


def _device_number(operation: Operation) -> Shape:
    operation.expect_operands(0)
    return scalar(ElementType.U32)


def _batch_norm(operation: Operation) -> Shape:
    counts = {Opcode.BATCH_NORM_TRAINING: 3, Opcode.BATCH_NORM_INFERENCE: 5, Opcode.BATCH_NORM_GRAD: 5}
    operation.expect_operands(counts[operation.opcode])
    operand, feature = operation.array(0), operation.attributes_as(BatchNormAttributes).feature_index
    expect_distinct([feature], operand.rank, "feature_index")
    if not operand.element_type.is_float:
        broken(f"{operation.opcode} takes floats, not {operand}")
    vector = ArrayShape(operand.element_type, (operand.dims[feature],))
    for index in range(1, len(operation.operands)):
        wanted = operand if operation.opcode is Opcode.BATCH_NORM_GRAD and index == 4 else vector
        if operation.array(index) != wanted:
            broken(f"operand {index} must be {wanted}, not {operation.array(index)}")
    return operand if operation.opcode is Opcode.BATCH_NORM_INFERENCE else TupleShape((operand, vector, vector))


def _expect_matrix(shape: ArrayShape, opcode: Opcode) -> None:
    if shape.rank < 2 or shape.dims[-1] != shape.dims[-2]:
        broken(f"{opcode} takes square matrices, not {shape}")
    if not (shape.element_type.is_float or shape.element_type.is_complex):
        broken(f"{opcode} takes floats or complex numbers, not {shape}")


def _cholesky(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape = operation.array(0)
    _expect_matrix(shape, operation.opcode)
    return shape


def _triangular_solve(operation: Operation) -> Shape:
    operation.expect_operands(2)
    a, b = operation.arrays()
    _expect_matrix(a, operation.opcode)
    side = -2 if operation.attributes_as(TriangularSolveAttributes).left_side else -1
    if b.element_type is not a.element_type or b.rank != a.rank or b.dims[:-2] != a.dims[:-2]:
        broken(f"triangular-solve takes equal types and batch dimensions, got {a} and {b}")
    if b.dims[side] != a.dims[-1]:
        broken(f"dimension {side} of {b} must be {a.dims[-1]}")
    return b


def _fft(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape, a = operation.array(0), operation.attributes_as(FftAttributes)
    count = len(a.lengths)
    if not 1 <= count <= min(3, shape.rank) or shape.element_type not in _FFT_TYPES:
        broken(f"fft transforms the last 1 to 3 dimensions of f32, f64, c64 or c128, got {count} of {shape}")
    if shape.element_type.is_float != (a.fft_type is FftType.RFFT):
        broken(f"{a.fft_type.name} does not take {shape}")
    complex_type = _FFT_TYPES[shape.element_type]
    taken = shape.dims[-count:]
    halved = (*a.lengths[:-1], a.lengths[-1] // 2 + 1)
    if taken != (halved if a.fft_type is FftType.IRFFT else a.lengths):
        broken(f"{a.fft_type.name} of lengths {list(a.lengths)} does not fit {shape}")
    made = halved if a.fft_type is FftType.RFFT else a.lengths
    result = complex_type.real if a.fft_type is FftType.IRFFT else complex_type
    return ArrayShape(result, shape.dims[:-count] + made)


def _rng(operation: Operation) -> Shape:
    operation.expect_operands(2)
    shape = operation.declared_array()
    for index in range(2):
        if operation.array(index) != scalar(shape.element_type):
            broken(f"rng's bounds must be scalars of {shape.element_type.name.lower()}, not {operation.array(index)}")
    return shape


def _rng_bit_generator(operation: Operation) -> Shape:
    operation.expect_operands(1)
    state, declared = operation.array(0), operation.declared
    lengths = {RngAlgorithm.THREE_FRY: (2,), RngAlgorithm.PHILOX: (2, 3), RngAlgorithm.DEFAULT: (2, 3)}
    words = state.num_bytes // 8
    algorithm = operation.attributes_as(RngBitGeneratorAttributes).algorithm
    if not state.element_type.is_unsigned or state.rank != 1 or words not in lengths[algorithm]:
        broken(f"the state of {algorithm.name} has {lengths[algorithm]} 64-bit words, not {state}")
    if not isinstance(declared, TupleShape) or len(declared.elements) != 2:
        broken(f"rng-bit-generator makes (state, bits), not {declared}")
    bits = declared.elements[1]
    if not isinstance(bits, ArrayShape) or not bits.element_type.is_integer:
        broken(f"rng-bit-generator makes integers, not {bits}")
    return TupleShape((state, bits))


def _add_dependency(operation: Operation) -> Shape:
    operation.expect_operands(2)
    if operation.operands[1] != TOKEN:
        broken(f"add-dependency depends on a token, not {operation.operands[1]}")
    return operation.operands[0]


def _after_all(operation: Operation) -> Shape:
    if any(shape != TOKEN for shape in operation.operands):
        broken("after-all takes tokens")
    return TOKEN


def _expect_call(signature: Signature, arguments: tuple[Shape, ...], what: str) -> None:
    if signature.parameters != arguments:
        taken, given = (", ".join(map(str, shapes)) for shapes in (signature.parameters, arguments))
        broken(f"{what} takes ({taken}), gets ({given})")


def _call(operation: Operation) -> Shape:
    _expect_call(operation.called[0], operation.operands, "the called computation")
    return operation.called[0].result


def _conditional(operation: Operation) -> Shape:
    branches = operation.called
    operation.expect_operands(len(branches) + 1)
    selector = operation.array(0)
    boolean = selector == scalar(ElementType.PRED) and len(branches) == 2
    if not branches or not (boolean or selector == scalar(ElementType.S32)):
        broken(f"conditional selects one of its branches by pred[] (of two) or s32[], not {selector}")
    for number, branch in enumerate(branches):
        _expect_call(branch, (operation.operands[number + 1],), f"branch {number}")
        if branch.result != branches[0].result:
            broken(f"branches return {branches[0].result} and {branch.result}")
    return branches[0].result


def _while(operation: Operation) -> Shape:
    operation.expect_operands(1)
    condition, body = operation.called
    _expect_call(condition, operation.operands, "the condition")
    _expect_call(body, operation.operands, "the body")
    if condition.result != scalar(ElementType.PRED) or body.result != operation.operands[0]:
        broken(f"the condition must return pred[] and the body {operation.operands[0]}")
    return operation.operands[0]


def _get_tuple_element(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape, index = operation.operands[0], operation.attributes_as(TupleIndexAttributes).index
    if not isinstance(shape, TupleShape) or not 0 <= index < len(shape.elements):
        broken(f"{shape} has no element {index}")
    return shape.elements[index]


def _optimization_barrier(operation: Operation) -> Shape:
    operation.expect_operands(1)
    return operation.operands[0]


def _tuple(operation: Operation) -> Shape:
    return TupleShape(operation.operands)


# Collectives. The number of participants depends on the device assignment, which a shape rule does not know: where it
# matters, the declared shape tells it and is checked to be one that some number of participants gives.


def _group_size(operation: Operation, operand: ArrayShape, gathered: bool) -> tuple[int, int]:
    """The dimension that a collective splits or joins, and by what factor."""
    attributes = operation.attributes_as(CollectiveAttributes)
    dimension = attributes.dimension
    if dimension is None:
        broken(f"{operation.opcode} needs a dimension")
    expect_distinct([dimension], operand.rank, f"{operation.opcode}'s dimension")
    if attributes.replica_groups:
        return dimension, len(attributes.replica_groups[0])
    declared = operation.declared
    first = declared.elements[0] if isinstance(declared, TupleShape) and declared.elements else declared
    if not isinstance(first, ArrayShape) or first.rank != operand.rank:
        broken(f"{operation.opcode} of {operand} does not make {declared}")
    large, small = (first, operand) if gathered else (operand, first)
    factor = large.dims[dimension] // small.dims[dimension] if small.dims[dimension] else 1
    return dimension, max(factor, 1)


def _gathered(operation: Operation) -> Shape:
    gather = operation.opcode is Opcode.ALL_GATHER
    if not operation.operands:
        broken(f"{operation.opcode} takes at least one operand")
    results = []
    for shape in operation.arrays():
        dimension, size = _group_size(operation, shape, gather)
        if not gather and shape.dims[dimension] % size:
            broken(f"dimension {dimension} of {shape} does not divide by {size} participants")
        length = shape.dims[dimension] * size if gather else shape.dims[dimension] // size
        dims = (*shape.dims[:dimension], length, *shape.dims[dimension + 1 :])
        results.append(ArrayShape(shape.element_type, dims))
    if not gather:
        _expect_reducer(operation)
    return as_result(results)


def _expect_reducer(operation: Operation) -> None:
    for shape in operation.arrays():
        expect_combiner(operation.called[0], [shape.element_type], f"{operation.opcode}'s computation")


def _all_reduce(operation: Operation) -> Shape:
    arrays = operation.arrays()
    if not arrays:
        broken("all-reduce takes at least one operand")
    _expect_reducer(operation)
    return as_result(arrays)


def _all_to_all(operation: Operation) -> Shape:
    arrays = operation.arrays()
    attributes = operation.attributes_as(CollectiveAttributes)
    if attributes.dimension is None:
        if not arrays or any(shape != arrays[0] for shape in arrays):
            broken("all-to-all without a dimension takes one array for each participant, all of one shape")
        return TupleShape(arrays)
    operation.expect_operands(1)
    expect_distinct([attributes.dimension], arrays[0].rank, "all-to-all's dimension")
    if attributes.replica_groups and arrays[0].dims[attributes.dimension] % len(attributes.replica_groups[0]):
        broken(f"dimension {attributes.dimension} of {arrays[0]} does not divide by its participants")
    return arrays[0]


def _collective_broadcast(operation: Operation) -> Shape:
    if not operation.operands:
        broken(f"{operation.opcode} takes at least one operand")
    return as_result(operation.arrays())


def _collective_permute(operation: Operation) -> Shape:
    pairs = operation.attributes_as(CollectivePermuteAttributes).source_target_pairs
    for side in (0, 1):
        if len({pair[side] for pair in pairs}) != len(pairs):
            broken(f"collective-permute uses a source or a target twice: {list(pairs)}")
    return _collective_broadcast(operation)


def _ragged_all_to_all(operation: Operation) -> Shape:
    operation.expect_operands(6)
    arrays = operation.arrays()
    if arrays[0].element_type is not arrays[1].element_type or any(not s.element_type.is_integer for s in arrays[2:]):
        broken("ragged-all-to-all takes input, output of one type, and four integer arrays of offsets and sizes")
    expect_same_dims(arrays[2:])
    return arrays[1]


RULES: dict[Opcode, Rule] = {
    Opcode.PARAMETER: _parameter,
    Opcode.CONSTANT: _constant,
    Opcode.PARTITION_ID: _device_number,
    Opcode.REPLICA_ID: _device_number,
    Opcode.BATCH_NORM_TRAINING: _batch_norm,
    Opcode.BATCH_NORM_INFERENCE: _batch_norm,
    Opcode.BATCH_NORM_GRAD: _batch_norm,
    Opcode.CHOLESKY: _cholesky,
    Opcode.CUSTOM_CALL: custom_call,
    Opcode.FFT: _fft,
    Opcode.RNG: _rng,
    Opcode.RNG_BIT_GENERATOR: _rng_bit_generator,
    Opcode.TRIANGULAR_SOLVE: _triangular_solve,
    Opcode.ADD_DEPENDENCY: _add_dependency,
    Opcode.AFTER_ALL: _after_all,
    Opcode.CALL: _call,
    Opcode.CONDITIONAL: _conditional,
    Opcode.GET_TUPLE_ELEMENT: _get_tuple_element,
    Opcode.OPTIMIZATION_BARRIER: _optimization_barrier,
    Opcode.TUPLE: _tuple,
    Opcode.WHILE: _while,
    Opcode.ALL_GATHER: _gathered,
    Opcode.ALL_REDUCE: _all_reduce,
    Opcode.ALL_TO_ALL: _all_to_all,
    Opcode.COLLECTIVE_BROADCAST: _collective_broadcast,
    Opcode.COLLECTIVE_PERMUTE: _collective_permute,
    Opcode.RAGGED_ALL_TO_ALL: _ragged_all_to_all,
    Opcode.REDUCE_SCATTER: _gathered,
}
