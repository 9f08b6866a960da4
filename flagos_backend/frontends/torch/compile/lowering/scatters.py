"""What writes, adds or compares at places that tensors say. On accelerators: the host's ATen has these.

Of several elements at one place that are not combined, any is written, as in eager. Sums of floats are made in the
order in which the device comes to them; where PyTorch is asked for deterministic algorithms they are left to ATen.
Places outside, with which eager ends the process, are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.indexing import Chosen, Indices, compare, vectors, wrapped
from flagos_backend.frontends.torch.compile.lowering.movement import cut
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes, DimensionsAttributes, ScatterAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten
E = ElementType
HALF_FLOATS = (E.F16, E.BF16)
# What chips combine in memory; narrower types are combined in these and converted, integers modulo their range.
COMBINED = {
    **{kind: kind for kind in (E.S32, E.S64, E.F32, E.F64)},
    **dict.fromkeys((E.S8, E.S16, E.U8), E.S32),
    **dict.fromkeys(HALF_FLOATS, E.F32),
}
_SUM, _MEAN, _AMAX, _AMIN = "sum", "mean", "amax", "amin"
_OPCODES = {_SUM: Opcode.ADD, _MEAN: Opcode.ADD, _AMAX: Opcode.MAXIMUM, _AMIN: Opcode.MINIMUM}


@dataclass(frozen=True, slots=True)
class Places:
    """Where windows lie in an array that is seen with the sizes ``dims``: at ``index``, as ``attributes`` have it.
    ``updates``: the sizes of an array of all windows."""

    dims: tuple[int, ...]
    index: Instruction
    attributes: ScatterAttributes
    updates: tuple[int, ...]

    def scatter(self, emitter: Emitter, x: Instruction, updates: Instruction, opcode: Opcode | None) -> Instruction:
        """``x`` with ``updates``, of its type, combined with what is there, or written over it."""
        kind, dims = array(x).element_type, array(x).dims
        called = _second(kind) if opcode is None else emitter.combiner(opcode, kind)
        operands = [emitter.reshape(x, self.dims), self.index, emitter.reshape(updates, self.updates)]
        # Who is written over at one place does not matter, so nobody has to look.
        attributes = self.attributes if opcode is not None else _any_of_equal(self.attributes)
        return emitter.reshape(emitter.builder.add(Opcode.SCATTER, operands, attributes, called=[called]), dims)

    def combine(self, emitter: Emitter, x: Instruction, updates: Instruction, opcode: Opcode) -> Instruction:
        """``scatter`` in a type that chips combine in; ``x`` and the result are of that type, too."""
        kind = combined_type(array(x).element_type, opcode)
        return self.scatter(emitter, emitter.convert(x, kind), emitter.convert(updates, kind), opcode)


def _any_of_equal(attributes: ScatterAttributes) -> ScatterAttributes:
    return ScatterAttributes(
        attributes.update_window_dims,
        attributes.inserted_window_dims,
        attributes.scatter_dims_to_operand_dims,
        attributes.index_vector_dim,
        unique_indices=True,
    )


def _second(kind: ElementType) -> Computation:
    """What is written over."""
    builder = Builder(f"second_{kind.name.lower()}")
    _, update = (builder.parameter(ArrayShape(kind), name) for name in ("there", "update"))
    return builder.build(update)


def combined_type(kind: ElementType, opcode: Opcode) -> ElementType:
    if kind not in COMBINED:
        raise NoLoweringError("numbers of this type are combined by ATen")
    if opcode is Opcode.ADD and kind.is_float and torch.are_deterministic_algorithms_enabled():
        raise NoLoweringError("sums of floats depend on the order in which the device comes to them")
    return COMBINED[kind]


# ---- Places


def _along(dims: tuple[int, ...], dim: int, index: Instruction) -> Places:
    """The windows of an array of ``dims`` that are one thick in ``dim`` and whole in the others, at ``index``, of one
    dimension, which stands in their place in the array of all windows."""
    attributes = ScatterAttributes(
        update_window_dims=tuple(d for d in range(len(dims)) if d != dim),
        inserted_window_dims=(dim,),
        scatter_dims_to_operand_dims=(dim,),
        index_vector_dim=1,
    )
    (count,) = array(index).dims
    return Places(dims, index, attributes, (*dims[:dim], count, *dims[dim + 1 :]))


def _elements(emitter: Emitter, dims: tuple[int, ...], dim: int, index: Instruction) -> Places:
    """Single elements of an array of ``dims``: along ``dim`` at ``index``, in the other dimensions where they stand in
    ``index``, which has as many dimensions and is not larger in these."""
    row = _row_of(dims, dim, index)
    if row is not None:
        return _along(dims, dim, row)
    inside = emitter.add(
        Opcode.AND,
        compare(emitter, Comparison.GE, index, 0),
        compare(emitter, Comparison.LT, index, dims[dim]),
    )
    # Counted in the order of memory.
    kind, shape = _counting_type(prod(dims)), array(index).dims
    place = _scaled(emitter, emitter.convert(index, kind), prod(dims[dim + 1 :]))
    for d in range(len(dims)):
        if d != dim and shape[d] > 1:
            own = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(d), shape=ArrayShape(kind, shape))
            place = emitter.add(Opcode.ADD, place, _scaled(emitter, own, prod(dims[d + 1 :])))
    place = emitter.add(Opcode.SELECT, inside, place, emitter.operand(-1, kind, shape))
    count = array(index).num_elements
    return _along((prod(dims),), 0, emitter.reshape(place, (count,)))


def _row_of(dims: tuple[int, ...], dim: int, index: Instruction) -> Instruction | None:
    """What ``index`` repeats in all other dimensions than ``dim``, which are those of the array; None where it is not
    the same all over them."""
    others = [d for d in range(len(dims)) if d != dim]
    if any(array(index).dims[d] != dims[d] for d in others):
        return None
    if not others:
        return index
    if index.opcode is not Opcode.BROADCAST or index.attributes_as(DimensionsAttributes).dimensions != (dim,):
        return None
    return index.operands[0]


def _counting_type(count: int) -> ElementType:
    return E.S32 if count < 1 << 31 else E.S64


def _scaled(emitter: Emitter, x: Instruction, factor: int) -> Instruction:
    if factor == 1:
        return x
    return emitter.add(Opcode.MULTIPLY, x, emitter.operand(factor, array(x).element_type, array(x).dims))


def _indexed(emitter: Emitter, dims: tuple[int, ...], chosen: Chosen) -> Places:
    """Where ``x[indices]`` of an array of ``dims`` stands; negative indices count from the end."""
    places = [wrapped(emitter, place, dims[d]) for d, place in zip(chosen.dims, chosen.places, strict=True)]
    window = tuple(size for d, size in enumerate(dims) if d not in chosen.dims)
    updates = (*window[: chosen.first], *chosen.shape, *window[chosen.first :])
    rows, index, seen = chosen.dims, vectors(emitter, places, chosen.shape), dims
    vector_dim = len(chosen.shape)
    if chosen.together and len(places) > 1:
        # Side by side in memory they are one dimension.
        first, last = rows[0], rows[-1] + 1
        index = _joined(emitter, places, dims[first:last], chosen.shape)
        rows, seen = (first,), (*dims[:first], prod(dims[first:last]), *dims[last:])
    elif len(places) == 1:
        index = places[0]
    attributes = ScatterAttributes(
        update_window_dims=chosen.offsets(len(updates)),
        inserted_window_dims=rows,
        scatter_dims_to_operand_dims=rows,
        index_vector_dim=vector_dim,
    )
    return Places(seen, index, attributes, updates)


def _joined(
    emitter: Emitter, places: Sequence[Instruction], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> Instruction:
    """The element that ``places`` [*shape] are in an array of ``sizes``, counted in the order of memory; -1 outside."""
    kind, total, inside = _counting_type(prod(sizes)), None, None
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        fits = emitter.add(
            Opcode.AND,
            compare(emitter, Comparison.GE, place, 0),
            compare(emitter, Comparison.LT, place, size),
        )
        fits = emitter.expand(fits, shape)
        inside = fits if inside is None else emitter.add(Opcode.AND, inside, fits)
        part = _scaled(emitter, emitter.operand(place, kind, shape), prod(sizes[number + 1 :]))
        total = part if total is None else emitter.add(Opcode.ADD, total, part)
    assert inside is not None and total is not None
    return emitter.add(Opcode.SELECT, inside, total, emitter.operand(-1, kind, shape))


# ---- Operators


@lowering(aten.index_put.default, aten._unsafe_index_put.default, on_host=False)
def _index_put(
    emitter: Emitter,
    result: torch.Tensor,
    x: Instruction,
    indices: Indices,
    values: Instruction,
    accumulate: bool = False,
) -> Instruction:
    masks = [index for index in indices if index is not None and array(index).element_type is E.PRED]
    if masks:
        return _masked_put(emitter, result, x, indices, values, accumulate)
    chosen = Chosen.by(indices)
    kind, dims = element_type(result), array(x).dims
    if array(values).element_type is not kind:
        raise NoLoweringError("ATen refuses values of another type")
    places = _indexed(emitter, dims, chosen)
    if not prod(places.updates) or not result.numel():
        return x
    updates = emitter.expand(values, places.updates)
    if not accumulate:
        return places.scatter(emitter, x, updates, None)
    return emitter.convert(places.combine(emitter, x, updates, Opcode.ADD), kind)


def _masked_put(
    emitter: Emitter, result: torch.Tensor, x: Instruction, indices: Indices, values: Instruction, accumulate: bool
) -> Instruction:
    """One value wherever a mask is true. How many are true says how many values there are, if there are several."""
    kind, dims = element_type(result), array(x).dims
    if len(indices) != 1 or array(values).num_elements != 1 or array(values).element_type is not kind:
        raise NoLoweringError("how many values there are depends on the mask")
    (mask,) = indices
    assert mask is not None
    mask = emitter.builder.broadcast(mask, dims, range(array(mask).rank))
    value = emitter.expand(emitter.reshape(values, ()), dims)
    if accumulate:
        if kind.is_complex or kind is E.PRED or kind in HALF_FLOATS:
            raise NoLoweringError("sums of this type are ATen's")
        value = emitter.add(Opcode.ADD, x, value)
    return emitter.add(Opcode.SELECT, mask, value, x)


@lowering(aten.index_add.default, on_host=False)
def _index_add(
    emitter: Emitter,
    result: torch.Tensor,
    x: Instruction,
    dim: int,
    index: Instruction,
    source: Instruction,
    *,
    alpha: complex = 1,
) -> Instruction:
    kind = element_type(result)
    places, updates = _parts(emitter, x, dim, index, source)
    wide = combined_type(kind, Opcode.ADD)
    if not result.numel() or not array(updates).num_elements:
        return x
    if alpha != 1:
        scale = emitter.operand(alpha, wide, array(updates).dims)
        updates = emitter.add(Opcode.MULTIPLY, emitter.convert(updates, wide), scale)
    return _shaped(emitter, result, places.combine(emitter, _vector(emitter, x), updates, Opcode.ADD))


@lowering(aten.index_copy.default, on_host=False)
def _index_copy(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: Instruction, source: Instruction
) -> Instruction:
    places, updates = _parts(emitter, x, dim, index, source)
    if not result.numel() or not array(updates).num_elements:
        return x
    return _shaped(emitter, result, places.scatter(emitter, _vector(emitter, x), updates, None))


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, on_host=False)
def _index_fill(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: Instruction, value: Instruction | complex
) -> Instruction:
    """Negative indices count from the end."""
    kind, dims = element_type(result), array(x).dims or (1,)
    if not isinstance(value, Instruction):
        emitter.refuse_overflow(value, kind)
    index = emitter.reshape(index, (array(index).num_elements,))
    dim %= len(dims)
    places = _along(dims, dim, wrapped(emitter, index, dims[dim]))
    if not prod(places.updates):
        return x
    updates = emitter.operand(value, kind, places.updates)
    return _shaped(emitter, result, places.scatter(emitter, _vector(emitter, x), updates, None))


def _vector(emitter: Emitter, x: Instruction) -> Instruction:
    """An array without dimensions counts as one of one element."""
    return emitter.reshape(x, array(x).dims or (1,))


def _shaped(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    return emitter.reshape(emitter.convert(x, element_type(result)), tuple(result.shape))


def _parts(
    emitter: Emitter, x: Instruction, dim: int, index: Instruction, source: Instruction
) -> tuple[Places, Instruction]:
    """Where the parts ``source`` of ``x`` along ``dim`` go, and they as an array of all windows."""
    if array(source).element_type is not array(x).element_type:
        raise NoLoweringError("ATen refuses sources of another type")
    dims = array(x).dims or (1,)
    index = emitter.reshape(index, (array(index).num_elements,))
    places = _along(dims, dim % len(dims), index)
    if array(source).num_elements != prod(places.updates):
        raise NoLoweringError("ATen refuses sources of other sizes")
    return places, emitter.reshape(source, places.updates)


# ---- Elements along a dimension


def _spread(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: Instruction, source: Instruction | complex
) -> tuple[Places, Instruction, Instruction]:
    """Where the elements of ``source`` that have an index go in ``x``; they; and ``x``, which has a dimension."""
    kind, x, index = element_type(result), _vector(emitter, x), _vector(emitter, index)
    places = _elements(emitter, array(x).dims, dim % array(x).rank, index)
    shape = array(index).dims
    if not isinstance(source, Instruction):
        emitter.refuse_overflow(source, kind)
        return places, emitter.operand(source, kind, shape), x
    source = _vector(emitter, source)
    if array(source).element_type is not kind:
        raise NoLoweringError("ATen refuses sources of another type")
    for d, size in enumerate(shape):
        source = cut(emitter, source, d, 0, size)
    return places, source, x


def _is_empty(result: torch.Tensor, index: Instruction) -> bool:
    return not result.numel() or not array(index).num_elements


@lowering(aten.scatter.src, aten.scatter.value, on_host=False)
def _scatter(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: Instruction, source: Instruction | complex
) -> Instruction:
    if _is_empty(result, index):
        return x
    places, updates, x = _spread(emitter, result, x, dim, index, source)
    return _shaped(emitter, result, places.scatter(emitter, x, updates, None))


@lowering(aten.scatter_add.default, on_host=False)
def _scatter_add(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: Instruction, source: Instruction | complex
) -> Instruction:
    if _is_empty(result, index):
        return x
    places, updates, x = _spread(emitter, result, x, dim, index, source)
    return _shaped(emitter, result, places.combine(emitter, x, updates, Opcode.ADD))


@lowering(aten.scatter.reduce, aten.scatter.value_reduce, on_host=False)
def _scatter_by_name(
    emitter: Emitter,
    result: torch.Tensor,
    x: Instruction,
    dim: int,
    index: Instruction,
    source: Instruction | complex,
    *,
    reduce: str,
) -> Instruction:
    if reduce != "add":
        raise NoLoweringError("chips multiply nothing in memory")
    return _scatter_add(emitter, result, x, dim, index, source)


@lowering(aten.scatter_reduce.two, on_host=False)
def _scatter_reduce(
    emitter: Emitter,
    result: torch.Tensor,
    x: Instruction,
    dim: int,
    index: Instruction,
    source: Instruction,
    reduce: str,
    *,
    include_self: bool = True,
) -> Instruction:
    opcode = _OPCODES.get(reduce)
    if opcode is None:
        raise NoLoweringError("chips multiply nothing in memory")
    kind = element_type(result)
    wide = combined_type(kind, opcode)
    if _is_empty(result, index):
        return x
    places, updates, x = _spread(emitter, result, x, dim, index, source)
    x = emitter.convert(x, wide)
    if not include_self:
        start = emitter.operand(_identity(reduce, result.dtype), wide, array(updates).dims)
        x = places.scatter(emitter, x, start, None)
    x = places.combine(emitter, x, updates, opcode)
    if reduce == _MEAN:
        count = emitter.operand(int(include_self), wide, array(x).dims)
        count = places.scatter(emitter, count, emitter.operand(1, wide, array(updates).dims), Opcode.ADD)
        # ATen adds and counts in the type of the result, whose integers may be narrower.
        if not kind.is_float:
            x, count = (emitter.convert(emitter.convert(v, kind), wide) for v in (x, count))
        one = emitter.operand(1, wide, array(x).dims)
        none = compare(emitter, Comparison.EQ, count, 0)
        x = _quotient(emitter, x, emitter.add(Opcode.SELECT, none, one, count))
    return _shaped(emitter, result, x)


def _identity(reduce: str, dtype: torch.dtype) -> float:
    if reduce in (_SUM, _MEAN):
        return 0
    if dtype.is_floating_point:
        return -torch.inf if reduce == _AMAX else torch.inf
    limits = torch.iinfo(dtype)
    return limits.min if reduce == _AMAX else limits.max


def _quotient(emitter: Emitter, x: Instruction, y: Instruction) -> Instruction:
    """Of integers the next lower one."""
    quotient = emitter.add(Opcode.DIVIDE, x, y)
    if array(x).element_type.is_float:
        return quotient
    rest = emitter.add(Opcode.REMAINDER, x, y)
    signs = [compare(emitter, Comparison.LT, value, 0) for value in (rest, y)]
    differ = emitter.builder.add(Opcode.COMPARE, signs, CompareAttributes(Comparison.NE))
    above = emitter.add(Opcode.AND, compare(emitter, Comparison.NE, rest, 0), differ)
    one = emitter.operand(1, array(x).element_type, array(x).dims)
    return emitter.add(Opcode.SELECT, above, emitter.add(Opcode.SUBTRACT, quotient, one), quotient)


# ---- Gradients


@lowering(aten.embedding_dense_backward.default, on_host=False)
def _embedding_backward(
    emitter: Emitter,
    result: torch.Tensor,
    gradient: Instruction,
    index: Instruction,
    count: int,
    padding: int,
    by_frequency: bool,
) -> Instruction:
    """Rows of the gradient, added up at their places in the table; those of the padding are nobody's."""
    if by_frequency:
        raise NoLoweringError("what is divided by how often a row occurs is ATen's")
    index = emitter.reshape(index, (array(index).num_elements,))
    if 0 <= padding < count:
        padded = compare(emitter, Comparison.EQ, index, padding)
        nowhere = emitter.operand(-1, array(index).element_type, array(index).dims)
        index = emitter.add(Opcode.SELECT, padded, nowhere, index)
    return summed_rows(emitter, result, index, gradient)


def summed_rows(emitter: Emitter, result: torch.Tensor, index: Instruction, rows: Instruction) -> Instruction:
    """``rows`` [*, n] added up at ``index`` [*] in the matrix that ``result`` is, zero elsewhere."""
    kind, dims = element_type(result), tuple(result.shape)
    wide = combined_type(kind, Opcode.ADD)
    if not result.numel() or not array(index).num_elements:
        return emitter.operand(0, kind, dims)
    places = _along(dims, 0, emitter.reshape(index, (array(index).num_elements,)))
    rows = emitter.reshape(rows, places.updates)
    return emitter.convert(places.combine(emitter, emitter.operand(0, wide, dims), rows, Opcode.ADD), kind)
