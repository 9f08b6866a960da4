"""Bags of as many rows of a table each, summed up or averaged, as F.embedding_bag has them of a matrix of indices; and
the gradient of the table of any bags. All other bags are ATen's."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.index_checks import Refusal, check
from flagos_backend.frontends.torch.compile.lowering.indexing import rows_at
from flagos_backend.frontends.torch.compile.lowering.movement import cut
from flagos_backend.frontends.torch.compile.lowering.scatters import COMBINED, summed_rows
from flagos_backend.frontends.torch.compile.lowering.searches import first_places
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import DimensionAttributes, DimensionsAttributes
from flagos_backend.ir.constants import is_splat_of, scalar_bytes
from flagos_backend.ir.custom_calls.index_check import INDEX, POSITION
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten
E = ElementType
_SUM, _MEAN = range(2)
# What eager raises for offsets.
_FIRST = (
    "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0. However, got "
    + INDEX
)
_LAST = "offsets[-1] can not be greater than input's length {count} but got offsets[-1] of "
Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _refuse_weighted(mode: int, by_frequency: bool, sparse: bool, weights: Instruction | None, padding: int) -> None:
    if mode not in (_SUM, _MEAN) or by_frequency or sparse or weights is not None or padding >= 0:
        raise NoLoweringError("maxima, and rows that count more or less than others, are ATen's")


def _bag_size(offsets: Instruction, count: int) -> int:
    """How many of ``count`` indices each bag has that begins at ``offsets``. Raises NoLoweringError where they do not
    all have as many."""
    (bags,) = array(offsets).dims
    if not bags or not count or count % bags:
        raise NoLoweringError("bags of unlike sizes are ATen's")
    size = count // bags
    counted, factor = offsets.operands if offsets.opcode is Opcode.MULTIPLY else (offsets, None)
    step = scalar_bytes(size, array(offsets).element_type)
    if factor is not None and factor.opcode is Opcode.BROADCAST:
        factor = factor.operands[0]
    fits = size == 1 if factor is None else is_splat_of(factor, step)
    if counted.opcode is not Opcode.IOTA or not (fits or bags == 1):
        raise NoLoweringError("only the data say where bags begin")
    return size


def _out_of_range(table: Instruction) -> Refusal:
    """What eager raises, whose kernel depends on the type."""
    shape = array(table)
    message = f"embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be {INDEX}"
    if shape.element_type is not E.F64:
        message = f"Index {POSITION} of input takes value {INDEX} which is not in the valid range [0, {shape.dims[0]})"
    return Refusal(message, "RuntimeError")


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _bags(
    emitter: Emitter,
    result: Bags,
    table: Instruction,
    index: Instruction,
    offsets: Instruction,
    by_frequency: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    weights: Instruction | None = None,
    include_last: bool = False,
    padding: int = -1,
) -> list[Instruction]:
    """The bags, the number of each index's bag, how many indices each has; and what maxima would say."""
    _refuse_weighted(mode, by_frequency, sparse, weights, padding)
    output, bag_of, sizes, places = result
    kind, dims = element_type(output), tuple(output.shape)
    if include_last or kind not in COMBINED or not output.numel() or array(table).num_elements == 0:
        raise NoLoweringError("bags that end where the last offset says are ATen's")
    wide = COMBINED[kind]
    if not _are_alike(offsets, array(index).num_elements):
        return _unlike_bags(emitter, result, table, index, offsets, mode)
    size = _bag_size(offsets, array(index).num_elements)
    index = emitter.reshape(index, (dims[0], size))
    rows = rows_at(emitter, (dims[0], size, dims[1]), table, 0, index, _out_of_range(table))
    total = emitter.builder.add(
        Opcode.REDUCE,
        [emitter.convert(rows, wide), emitter.scalar(0, wide)],
        DimensionsAttributes((1,)),
        called=[emitter.combiner(Opcode.ADD, wide)],
    )
    if mode == _MEAN:
        total = emitter.add(Opcode.DIVIDE, total, emitter.operand(float(size), wide, dims))
    saved = [
        emitter.operand(number, element_type(tensor), tuple(tensor.shape))
        for tensor, number in ((sizes, size), (places, 0))
    ]
    return [emitter.convert(total, kind), _bag_of(emitter, bag_of, size), *saved]


def _are_alike(offsets: Instruction, count: int) -> bool:
    try:
        return bool(_bag_size(offsets, count))
    except NoLoweringError:
        return False


def _unlike_bags(
    emitter: Emitter, result: Bags, table: Instruction, index: Instruction, offsets: Instruction, mode: int
) -> list[Instruction]:
    """Bags that begin where the data say, on the host: their rows are added up at the numbers of the bags."""
    output, bag_of, sizes, places = result
    kind, dims = element_type(output), tuple(output.shape)
    count, bags = array(index).num_elements, dims[0]
    number = _bag_of_each(emitter, offsets, count)
    rows = rows_at(emitter, (count, dims[1]), table, 0, index, _out_of_range(table))
    total = summed_rows(emitter, output, number, rows)
    begins = emitter.convert(offsets, E.S64)
    ends = [emitter.operand(count, E.S64, (1,))]
    if bags > 1:
        ends.insert(0, cut(emitter, begins, 0, 1, bags))
    end = ends[0] if bags == 1 else emitter.builder.add(Opcode.CONCATENATE, ends, DimensionAttributes(0))
    size = emitter.add(Opcode.SUBTRACT, end, begins)
    if mode == _MEAN:
        wide = COMBINED[kind]
        divisor = emitter.add(Opcode.MAXIMUM, size, emitter.operand(1, E.S64, (bags,)))
        each = emitter.builder.broadcast(emitter.convert(divisor, wide), dims, [0])
        total = emitter.convert(emitter.add(Opcode.DIVIDE, emitter.convert(total, wide), each), kind)
    if tuple(sizes.shape) != (bags,):
        raise NoLoweringError("it keeps something else than the sizes of bags")
    saved = (
        number if bag_of.numel() == count else emitter.operand(0, E.S64, tuple(bag_of.shape)),
        size,
        emitter.operand(0, element_type(places), tuple(places.shape)),
    )
    kinds = (element_type(tensor) for tensor in (bag_of, sizes, places))
    return [total, *(emitter.convert(value, kind) for value, kind in zip(saved, kinds, strict=True))]


def _bag_of_each(emitter: Emitter, offsets: Instruction, count: int) -> Instruction:
    """The number of the bag of each of ``count`` indices, of which the first is at the first offset."""
    (bags,) = array(offsets).dims
    if not emitter.on_host or not bags or not count:
        raise NoLoweringError("only the data say where bags begin")
    begins = emitter.convert(offsets, E.S64)
    first, last = (cut(emitter, begins, 0, at, at + 1) for at in (0, bags - 1))
    check(emitter, first, 0, 1, Refusal(_FIRST, "RuntimeError"))
    check(emitter, last, 0, count + 1, Refusal(_LAST.format(count=count) + INDEX, "RuntimeError"))
    position = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(0), shape=ArrayShape(E.S64, (count,)))
    after = first_places(emitter, begins, position, is_right=True)
    number = emitter.add(Opcode.SUBTRACT, after, emitter.operand(1, E.S64, (count,)))
    emitter.ranges[number] = (0, bags - 1)
    return number


def _bag_of(emitter: Emitter, like: torch.Tensor, size: int) -> Instruction:
    """The number of the bag of each index, where PyTorch keeps it."""
    kind, dims = element_type(like), tuple(like.shape)
    if not like.numel():
        return emitter.operand(0, kind, dims)
    number = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(0), shape=ArrayShape(kind, dims))
    return emitter.add(Opcode.DIVIDE, number, emitter.operand(size, kind, dims))


@lowering(aten._embedding_bag_backward.default)
def _bags_backward(
    emitter: Emitter,
    result: torch.Tensor,
    gradient: Instruction,
    index: Instruction,
    offsets: Instruction,
    bag_of: Instruction,
    sizes: Instruction,
    places: Instruction,
    count: int,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    weights: Instruction | None,
    padding: int = -1,
) -> Instruction:
    _refuse_weighted(mode, by_frequency, sparse, weights, padding)
    if not array(gradient).num_elements:
        raise NoLoweringError("there are no bags")
    if array(bag_of).num_elements != array(index).num_elements:
        bag_of = _bag_of_each(emitter, offsets, array(index).num_elements)
    kind = element_type(result)
    if kind not in COMBINED:
        raise NoLoweringError("sums of this type are ATen's")
    wide, dims = COMBINED[kind], array(gradient).dims
    gradient = emitter.convert(gradient, wide)
    if mode == _MEAN:
        sizes = emitter.add(Opcode.MAXIMUM, sizes, emitter.operand(1, array(sizes).element_type, array(sizes).dims))
        each = emitter.builder.broadcast(emitter.convert(sizes, wide), dims, [0])
        gradient = emitter.add(Opcode.DIVIDE, gradient, each)
    rows = rows_at(emitter, (*array(bag_of).dims, dims[1]), gradient, 0, bag_of)
    return summed_rows(emitter, result, index, rows)
