"""Bags of as many rows of a table each, summed up or averaged, as F.embedding_bag has them of a matrix of indices; and
the gradient of the table of any bags. On accelerators: the host's ATen has these, and both have all other bags."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.indexing import rows_at
from flagos_backend.frontends.torch.compile.lowering.scatters import COMBINED, summed_rows
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import DimensionAttributes, DimensionsAttributes
from flagos_backend.ir.constants import is_splat_of, scalar_bytes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape

aten = torch.ops.aten
_SUM, _MEAN = range(2)
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


@lowering(aten._embedding_bag.default, aten._embedding_bag_forward_only.default, on_host=False)
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
    size, wide = _bag_size(offsets, array(index).num_elements), COMBINED[kind]
    rows = rows_at(emitter, (dims[0], size, dims[1]), table, 0, emitter.reshape(index, (dims[0], size)))
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


def _bag_of(emitter: Emitter, like: torch.Tensor, size: int) -> Instruction:
    """The number of the bag of each index, where PyTorch keeps it."""
    kind, dims = element_type(like), tuple(like.shape)
    if not like.numel():
        return emitter.operand(0, kind, dims)
    number = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(0), shape=ArrayShape(kind, dims))
    return emitter.add(Opcode.DIVIDE, number, emitter.operand(size, kind, dims))


@lowering(aten._embedding_bag_backward.default, on_host=False)
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
    if array(bag_of).num_elements != array(index).num_elements or not array(gradient).num_elements:
        raise NoLoweringError("it keeps no list of the bags of indices")
    kind = element_type(result)
    if kind not in COMBINED:
        raise NoLoweringError("sums of this type are ATen's")
    wide, dims = COMBINED[kind], array(gradient).dims
    gradient = emitter.convert(gradient, wide)
    if mode == _MEAN:
        each = emitter.builder.broadcast(emitter.convert(sizes, wide), dims, [0])
        gradient = emitter.add(Opcode.DIVIDE, gradient, each)
    rows = rows_at(emitter, (*array(bag_of).dims, dims[1]), gradient, 0, bag_of)
    return summed_rows(emitter, result, index, rows)
