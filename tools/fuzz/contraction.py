"""Productions of contractions, reductions, windows and sorts."""

from __future__ import annotations

from math import prod

from flagos_backend.ir.attributes import (
    CompareAttributes,
    ConvolutionAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    DotAttributes,
    FftAttributes,
    RngBitGeneratorAttributes,
    SortAttributes,
    TopKAttributes,
    WindowAttributes,
    WindowDimension,
)
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, FftType, Opcode, RngAlgorithm
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from tools.fuzz.movement import combiner
from tools.fuzz.scope import COMPLEX, FLOATS, INTEGERS, MAX_ELEMENTS, Dims, Scope, canonical, dims_of, shape_of, type_of

E = ElementType
_IDENTITY: dict[Opcode, complex] = {Opcode.ADD: 0, Opcode.MULTIPLY: 1, Opcode.OR: 0, Opcode.XOR: 0}
_ORDERED = (*FLOATS, *INTEGERS, E.PRED)


def dot(scope: Scope) -> Instruction:
    """Any number of batch, contracting and free dimensions, in any order."""
    lhs = scope.operand((*FLOATS, *INTEGERS, *COMPLEX, E.F32, E.F32), lambda dims: len(dims) <= 4)
    dims = dims_of(lhs)
    roles = [scope.tape.pick(("free", "contracting", "batch")) for _ in dims]
    contracting = [d for d, role in enumerate(roles) if role == "contracting"]
    batch = [d for d, role in enumerate(roles) if role == "batch"]
    rows = prod(dims[d] for d, role in enumerate(roles) if role != "contracting")
    free = scope.dims(2, max_elements=max(MAX_ELEMENTS // max(rows, 1), 1))
    order = scope.tape.shuffled(len(contracting) + len(batch) + len(free))
    sizes = [*(dims[d] for d in (*batch, *contracting)), *free]
    rhs = scope.like(ArrayShape(type_of(lhs), tuple(sizes[number] for number in order)))
    attributes = DotAttributes(
        lhs_contracting=tuple(contracting),
        rhs_contracting=tuple(order.index(len(batch) + n) for n in range(len(contracting))),
        lhs_batch=tuple(batch),
        rhs_batch=tuple(order.index(n) for n in range(len(batch))),
    )
    return scope.add(Opcode.DOT, [lhs, rhs], attributes)


def convolution(scope: Scope) -> Instruction:
    """Up to two spatial dimensions, strides, dilations, padding and groups."""
    spatial = 1 + scope.tape.below(2)
    groups = scope.tape.pick((1, 1, 2, 3))
    batch, features, outputs = (1 + scope.tape.below(3) for _ in range(3))
    window, sizes = [], []
    for _ in range(spatial):
        sizes.append(scope.tape.pick((5, 1, 3, 8)))
        low, high = scope.tape.pick((0, 1, 2)), scope.tape.pick((0, 1, 2))
        strides = scope.tape.pick((1, 1, 2)), scope.tape.pick((1, 1, 2)), scope.tape.pick((1, 1, 2))
        size = scope.tape.pick((1, 2, 3))
        window.append(WindowDimension(size, strides[0], low, high, strides[1], strides[2]))
    input_order = tuple(scope.tape.shuffled(spatial + 2))
    kernel_order, output_order = (tuple(scope.tape.shuffled(spatial + 2)) for _ in range(2))
    kind = scope.tape.nearly_first((E.F32, E.F64, E.F16, E.BF16))
    lhs = scope.like(ArrayShape(kind, _placed((batch, features * groups, *sizes), input_order)))
    kernel = _placed((features, outputs * groups, *(w.size for w in window)), kernel_order)
    attributes = ConvolutionAttributes(
        tuple(window),
        *(input_order[0], input_order[1], input_order[2:]),
        *(kernel_order[0], kernel_order[1], kernel_order[2:]),
        *(output_order[0], output_order[1], output_order[2:]),
        feature_group_count=groups,
    )
    # Whether a padding zero meets an infinity is an implementation's choice.
    operands = [canonical(scope, operand) for operand in (lhs, scope.like(ArrayShape(kind, kernel)))]
    return scope.add(Opcode.CONVOLUTION, operands, attributes)


def _placed(sizes: Dims, order: Dims) -> Dims:
    """The dims of an array whose dimension order[i] is of sizes[i]."""
    return tuple(sizes[order.index(d)] for d in range(len(sizes)))


def reduce(scope: Scope) -> Instruction:
    value = _reducible(scope)
    opcode = _reduction(scope, type_of(value))
    dims = tuple(scope.tape.subset(shape_of(value).rank)) or (shape_of(value).rank - 1,)
    reduced = _reduction_operand(scope, opcode, value)
    operands = [reduced, scope.scalar(_identity(opcode, type_of(value)), type_of(value))]
    return scope.add(Opcode.REDUCE, operands, DimensionsAttributes(dims), called=[combiner(opcode, type_of(value))])


def _reduction_operand(scope: Scope, opcode: Opcode, value: Instruction) -> Instruction:
    """What ``opcode`` may reduce: no NaN in minima and maxima, which XLA's CPU loses along any dimension but the last;
    and signs in products, since it depends on the order and on the accumulator's width whether others overflow."""
    if type_of(value).is_integer or type_of(value) is E.PRED or opcode is Opcode.ADD:
        return value
    if opcode is Opcode.MULTIPLY:
        return scope.builder.add(Opcode.SIGN, [value])
    shape = shape_of(value)
    zero = scope.builder.broadcast(scope.scalar(0, shape.element_type), shape.dims)
    is_number = scope.builder.add(Opcode.COMPARE, [value, value], CompareAttributes(Comparison.EQ))
    return scope.builder.add(Opcode.SELECT, [is_number, value, zero])


def _reducible(scope: Scope) -> Instruction:
    kinds = (*FLOATS, *INTEGERS, E.PRED, *COMPLEX)
    return scope.operand(kinds, lambda dims: len(dims) >= 1, lambda: scope.dims(4, 1))


def _reduction(scope: Scope, kind: ElementType) -> Opcode:
    if kind is E.PRED:
        return scope.tape.pick((Opcode.OR, Opcode.AND))
    if kind.is_complex:
        return scope.tape.pick((Opcode.ADD, Opcode.MULTIPLY))
    numeric = (Opcode.ADD, Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.MULTIPLY)
    if kind.is_float:
        return scope.tape.pick(numeric)
    return scope.tape.pick((*numeric, Opcode.XOR, Opcode.OR, Opcode.AND))


def argument_of_maximum(scope: Scope) -> Instruction:
    """The reduction of pairs (value, index) that argmax is; ties go to the lower index."""
    value = scope.operand((E.F32, E.S32, E.BF16, E.U8, E.F64), lambda dims: len(dims) >= 1, lambda: scope.dims(3, 1))
    shape, kind = shape_of(value), type_of(value)
    dimension = scope.tape.below(shape.rank)
    builder = Builder("argmax")
    scalars = [ArrayShape(kind), ArrayShape(E.S32)] * 2
    old, old_index, new, new_index = (builder.parameter(s) for s in scalars)
    greater = builder.add(Opcode.COMPARE, [old, new], CompareAttributes(Comparison.GT))
    same = builder.add(Opcode.COMPARE, [old, new], CompareAttributes(Comparison.EQ))
    earlier = builder.add(Opcode.COMPARE, [old_index, new_index], CompareAttributes(Comparison.LT))
    keeps = builder.add(Opcode.OR, [greater, builder.add(Opcode.AND, [same, earlier])])
    number = builder.add(Opcode.SELECT, [keeps, old_index, new_index])
    result = builder.add(Opcode.SELECT, [builder.add(Opcode.OR, [greater, same]), old, new])
    called = builder.build(builder.tuple([result, number]))
    from_index = scope.builder.add(Opcode.IOTA, (), DimensionAttributes(dimension), shape=ArrayShape(E.S32, shape.dims))
    initial = [scope.scalar(_identity(Opcode.MAXIMUM, kind), kind), scope.scalar(MAX_ELEMENTS, E.S32)]
    operands = [canonical(scope, value), from_index, *initial]
    both = scope.add(Opcode.REDUCE, operands, DimensionsAttributes((dimension,)), called=[called])
    return scope.keep(scope.builder.element(both, scope.tape.below(2)))


def reduce_window(scope: Scope) -> Instruction:
    value = _reducible(scope)
    kind = type_of(value)
    opcode = _reduction(scope, kind)
    window = []
    for _ in dims_of(value):
        size = scope.tape.pick((1, 2, 3))
        low, high = scope.tape.below(size), scope.tape.below(size)
        window.append(WindowDimension(size, scope.tape.pick((1, 1, 2)), low, high, *(scope.tape.pick((1, 1, 2)),) * 2))
    identity = _identity(opcode, kind)
    operands = [_reduction_operand(scope, opcode, value), scope.scalar(identity, kind)]
    return scope.add(Opcode.REDUCE_WINDOW, operands, WindowAttributes(tuple(window)), called=[combiner(opcode, kind)])


def _identity(opcode: Opcode, kind: ElementType) -> complex:
    """What a reduction must begin with: XLA leaves out any beginning where there is but one element to reduce."""
    known = _IDENTITY.get(opcode)
    if known is not None:
        return known
    if kind is E.PRED:
        return 1
    if kind.is_float:
        return float("-inf") if opcode is Opcode.MAXIMUM else float("inf")
    lowest = -(1 << (kind.bits - 1)) if kind.is_signed else 0
    highest = (1 << (kind.bits - kind.is_signed)) - 1
    return {Opcode.MAXIMUM: lowest, Opcode.MINIMUM: highest, Opcode.AND: -1 if kind.is_signed else highest}[opcode]


def select_and_scatter(scope: Scope) -> Instruction:
    """The gradient of a pooling without overlap, so that nothing depends on the order of additions."""
    kind = scope.tape.nearly_first((E.F32, E.S32, E.F64))
    value = scope.operand((kind,), lambda dims: 1 <= len(dims) <= 3 and 0 not in dims, lambda: _positive(scope, 3))
    value = canonical(scope, value)
    dims = dims_of(value)
    # No window without a position: XLA leaves the result uninitialized then.
    sizes = [min(scope.tape.pick((1, 2, 3)), size) for size in dims]
    window = tuple(WindowDimension(size, size) for size in sizes)
    source = scope.like(ArrayShape(kind, tuple((d - s) // s + 1 for d, s in zip(dims, sizes, strict=True))))
    selection = Builder("select_ge")
    pair = [selection.parameter(ArrayShape(kind)) for _ in range(2)]
    called = [selection.build(selection.add(Opcode.COMPARE, pair, CompareAttributes(Comparison.GE)))]
    called.append(combiner(Opcode.ADD, kind))
    operands = [value, source, scope.scalar(0, kind)]
    return scope.add(Opcode.SELECT_AND_SCATTER, operands, WindowAttributes(window), called=called)


def _positive(scope: Scope, max_rank: int) -> Dims:
    return tuple(max(size, 1) for size in scope.dims(max_rank, 1))


def sort(scope: Scope) -> Instruction:
    """One key, and at most one value that travels with it, which only a stable sort puts into a certain order."""
    key = scope.operand(_ORDERED, lambda dims: len(dims) >= 1, lambda: scope.dims(3, 1))
    kind, shape = type_of(key), shape_of(key)
    operands = [canonical(scope, key)]
    if scope.tape.below(2):
        operands.append(scope.like(ArrayShape(scope.element_type(), shape.dims)))
    dimension = scope.tape.below(shape.rank)
    attributes = SortAttributes(dimension, is_stable=True)
    called = [_comparator(scope.tape.pick((Comparison.LT, Comparison.GT)), [type_of(o) for o in operands], kind)]
    result = scope.add(Opcode.SORT, operands, attributes, called=called)
    if len(operands) == 1:
        return result
    return scope.keep(scope.builder.element(result, scope.tape.below(2)))


def _comparator(direction: Comparison, kinds: list[ElementType], key: ElementType) -> Computation:
    builder = Builder(f"sort_{direction.value.lower()}")
    parameters = [builder.parameter(ArrayShape(kind)) for kind in kinds for _ in range(2)]
    order = ComparisonOrder.TOTAL if key.is_float else ComparisonOrder.PARTIAL
    return builder.build(builder.add(Opcode.COMPARE, parameters[:2], CompareAttributes(direction, order)))


def map_(scope: Scope) -> Instruction:
    """A scalar function of two steps on arrays."""
    lhs = scope.operand((*FLOATS, *INTEGERS))
    shape = shape_of(lhs)
    builder = Builder("mapped")
    x, y = (builder.parameter(ArrayShape(shape.element_type)) for _ in range(2))
    inner = builder.add(scope.tape.pick((Opcode.ADD, Opcode.MULTIPLY, Opcode.MAXIMUM)), [x, y])
    called = builder.build(builder.add(scope.tape.pick((Opcode.SUBTRACT, Opcode.MINIMUM)), [inner, x]))
    attributes = DimensionsAttributes(tuple(range(shape.rank)))
    return scope.add(Opcode.MAP, [lhs, scope.like(shape)], attributes, called=[called])


def fft(scope: Scope) -> Instruction:
    kind = scope.tape.pick((E.C64, E.C128))
    value = scope.operand((kind,), lambda dims: len(dims) >= 1 and dims[-1] > 0, lambda: _positive(scope, 2))
    transform = scope.tape.pick((FftType.FFT, FftType.IFFT))
    return scope.add(Opcode.FFT, [value], FftAttributes(transform, dims_of(value)[-1:]))


def random_bits(scope: Scope) -> Instruction:
    state = scope.like(ArrayShape(E.U64, (2,)))
    kind = scope.tape.pick((E.U32, E.U64, E.U8, E.U16))
    shape = TupleShape((shape_of(state), ArrayShape(kind, scope.dims(3))))
    attributes = RngBitGeneratorAttributes(scope.tape.pick((RngAlgorithm.THREE_FRY, RngAlgorithm.PHILOX)))
    both = scope.add(Opcode.RNG_BIT_GENERATOR, [state], attributes, shape=shape)
    return scope.keep(scope.builder.element(both, 1 - scope.tape.below(2)))


def top_k(scope: Scope) -> Instruction:
    value = scope.operand((E.F32, E.BF16, E.S32), lambda dims: len(dims) in (1, 2), lambda: scope.dims(2, 1))
    value = canonical(scope, value)
    k = scope.tape.below(dims_of(value)[-1] + 1)
    both = scope.add(Opcode.TOP_K, [value], TopKAttributes(k))
    return scope.keep(scope.builder.element(both, scope.tape.below(2)))


PRODUCTIONS = (
    (6, reduce),
    (5, dot),
    (2, sort),
    (2, reduce_window),
    (2, argument_of_maximum),
    (1, convolution),
    (1, select_and_scatter),
    (1, map_),
    (1, fft),
    (1, random_bits),
    (1, top_k),
)
