"""What reads elements at places that tensors say: indexing, rows of tables, elements along a dimension. scatters.py has
what writes there.

Eager checks on the host that places lie inside, and ends the process on accelerators. Programs of accelerators do not
look: a place outside is read as the nearest one inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.movement import cut
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes, GatherAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType

aten = torch.ops.aten
E = ElementType
Indices = Sequence[Instruction | None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What ``x[indices]`` chooses: in the dimensions ``dims`` by the integers ``places``, which broadcast to ``shape``.
    ``first``: where in the result the dimensions of ``shape`` stand."""

    dims: tuple[int, ...]
    places: tuple[Instruction, ...]
    shape: tuple[int, ...]
    first: int

    @classmethod
    def by(cls, indices: Indices) -> Chosen:
        """Raises NoLoweringError for what chooses by truth values."""
        dims = tuple(number for number, index in enumerate(indices) if index is not None)
        given = tuple(index for index in indices if index is not None)
        if not dims or not all(array(index).element_type in (E.S32, E.S64) for index in given):
            raise NoLoweringError("only whole numbers tell places")
        dims_of_all = (array(index).dims for index in given)
        shape: tuple[int, ...] = torch.broadcast_shapes(*dims_of_all)  # type: ignore[no-untyped-call]
        # Where indices stand together, the result has their dimensions there; otherwise first.
        return cls(dims, given, tuple(shape), dims[0] if cls._stand_together(dims) else 0)

    @staticmethod
    def _stand_together(dims: Sequence[int]) -> bool:
        return list(dims) == list(range(dims[0], dims[-1] + 1))

    @property
    def together(self) -> bool:
        return self._stand_together(self.dims)

    def offsets(self, rank: int) -> tuple[int, ...]:
        """The dimensions of a result of that rank that are not those of ``shape``."""
        return tuple(d for d in range(rank) if not self.first <= d < self.first + len(self.shape))


def compare(emitter: Emitter, direction: Comparison, x: Instruction, number: int) -> Instruction:
    operands = [x, emitter.operand(number, array(x).element_type, array(x).dims)]
    return emitter.builder.add(Opcode.COMPARE, operands, CompareAttributes(direction))


def wrapped(emitter: Emitter, index: Instruction, size: int) -> Instruction:
    """``index``, of which negative numbers count from the end of ``size`` elements."""
    negative = compare(emitter, Comparison.LT, index, 0)
    from_end = emitter.add(Opcode.ADD, index, emitter.operand(size, array(index).element_type, array(index).dims))
    return emitter.add(Opcode.SELECT, negative, from_end, index)


def vectors(emitter: Emitter, places: Sequence[Instruction], shape: tuple[int, ...]) -> Instruction:
    """Start indices [*shape, a component for each of ``places``]."""
    parts = [emitter.reshape(emitter.operand(place, E.S64, shape), (*shape, 1)) for place in places]
    if len(parts) == 1:
        return parts[0]
    return emitter.builder.add(Opcode.CONCATENATE, parts, DimensionAttributes(len(shape)))


def nothing(emitter: Emitter, result: torch.Tensor) -> Instruction:
    """A result without elements."""
    return emitter.operand(0, element_type(result), tuple(result.shape))


def _refuse_choosing_of_nothing(x: Instruction, dims: Sequence[int]) -> None:
    if any(array(x).dims[d] == 0 for d in dims):
        raise NoLoweringError("ATen refuses to choose from nothing")


def _index(emitter: Emitter, result: torch.Tensor, x: Instruction, indices: Indices) -> Instruction:
    rank, sizes, chosen = array(x).rank, array(x).dims, Chosen.by(indices)
    if not result.numel():
        return nothing(emitter, result)
    _refuse_choosing_of_nothing(x, chosen.dims)
    places = [wrapped(emitter, place, sizes[d]) for d, place in zip(chosen.dims, chosen.places, strict=True)]
    attributes = GatherAttributes(
        offset_dims=chosen.offsets(result.dim()),
        collapsed_slice_dims=chosen.dims,
        start_index_map=chosen.dims,
        index_vector_dim=len(chosen.shape),
        slice_sizes=tuple(1 if number in chosen.dims else sizes[number] for number in range(rank)),
    )
    return emitter.builder.add(Opcode.GATHER, [x, vectors(emitter, places, chosen.shape)], attributes)


# Indices of the second are known to lie inside, as those of an interpolation: the host's ATen looks at others.
lowering(aten.index.Tensor, on_host=False)(_index)
lowering(aten._unsafe_index.Tensor)(_index)


@lowering(aten._unsafe_masked_index.default, on_host=False)
def _masked_index(
    emitter: Emitter, result: torch.Tensor, x: Instruction, mask: Instruction, indices: Indices, fill: complex
) -> Instruction:
    """Places where ``mask`` is false may lie anywhere."""
    kind, dims = element_type(result), tuple(result.shape)
    chosen = emitter.expand(_index(emitter, result, x, indices), dims)
    return emitter.add(Opcode.SELECT, emitter.operand(mask, E.PRED, dims), chosen, emitter.operand(fill, kind, dims))


def rows_at(emitter: Emitter, dims: Sequence[int], x: Instruction, dim: int, index: Instruction) -> Instruction:
    """The parts of ``x`` at ``index`` along ``dim``; the dimensions of ``index`` stand there in the result, which has
    the sizes ``dims``."""
    if not prod(dims):
        return emitter.operand(0, array(x).element_type, dims)
    _refuse_choosing_of_nothing(x, (dim,))
    count = array(index).rank
    attributes = GatherAttributes(
        offset_dims=tuple(d for d in range(array(x).rank - 1 + count) if not dim <= d < dim + count),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        index_vector_dim=count,
        slice_sizes=tuple(1 if d == dim else size for d, size in enumerate(array(x).dims)),
    )
    return emitter.builder.add(Opcode.GATHER, [x, index], attributes)


@lowering(aten.embedding.default, on_host=False)
def _embedding(
    emitter: Emitter, result: torch.Tensor, weight: Instruction, index: Instruction, *_: object
) -> Instruction:
    return rows_at(emitter, tuple(result.shape), weight, 0, index)


@lowering(aten.index_select.default, on_host=False)
def _index_select(emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: Instruction) -> Instruction:
    if not array(x).rank:
        return emitter.reshape(x, tuple(result.shape)) if result.numel() == 1 else nothing(emitter, result)
    index = emitter.reshape(index, (array(index).num_elements,))
    return emitter.reshape(rows_at(emitter, tuple(result.shape), x, dim % array(x).rank, index), tuple(result.shape))


@lowering(aten.take.default, on_host=False)
def _take(emitter: Emitter, result: torch.Tensor, x: Instruction, index: Instruction) -> Instruction:
    """Of the elements in order; negative numbers count from the end."""
    count = array(x).num_elements
    return rows_at(emitter, tuple(result.shape), emitter.reshape(x, (count,)), 0, wrapped(emitter, index, count))


@lowering(aten.gather.default, on_host=False)
def _gather(
    emitter: Emitter, result: torch.Tensor, x: Instruction, dim: int, index: Instruction, *, sparse_grad: bool = False
) -> Instruction:
    """Along ``dim`` at ``index``; of the other dimensions as much as ``index`` has."""
    if not result.numel():
        return nothing(emitter, result)
    # Arrays of one element without dimensions count as vectors.
    x, index = (emitter.reshape(v, array(v).dims or (1,)) for v in (x, index))
    rank = array(x).rank
    dim %= rank
    _refuse_choosing_of_nothing(x, (dim,))
    others = tuple(d for d in range(rank) if d != dim)
    for d in others:
        x = cut(emitter, x, d, 0, array(index).dims[d])
    attributes = GatherAttributes(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        index_vector_dim=rank,
        slice_sizes=(1,) * rank,
        operand_batching_dims=others,
        start_indices_batching_dims=others,
    )
    chosen = emitter.builder.add(Opcode.GATHER, [x, index], attributes)
    return emitter.reshape(chosen, tuple(result.shape))
