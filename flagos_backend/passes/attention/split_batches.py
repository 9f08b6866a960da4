"""Products whose batch dimensions were merged into one, as PyTorch writes them, on the dimensions before that.

A reshape that takes such a dimension of a product's result apart moves up to the product's operands, where it mostly
meets the reshape that had put the dimension together; one that meets none moves down behind the product. What is left
looks as einsums do. So is what is apart only to be changed, as logits are while the masks of shifted windows are added
to them. A sum over such a dimension is one over those that it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flagos_backend.ir.attributes import NONE, Attributes, DimensionsAttributes, DotAttributes
from flagos_backend.ir.elementwise import ELEMENTWISE
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.attention.labels import dims_of, element_type_of
from flagos_backend.passes.rewrite import Emitter, Substitution, rewrite_computations

_MOVES = frozenset({*ELEMENTWISE, Opcode.COPY})
# Instructions between a reshape and the product that it takes apart.
_MAX_DEPTH = 12
# And between one and the reshape that puts together again what it took apart.
_MAX_USERS = 64

Dims = tuple[int, ...]


def split_batches(module: Module) -> Module:
    return rewrite_computations(module, _split_computation)


def _split_computation(computation: Computation, replaced: dict[int, Computation]) -> Computation:
    emitter, substitution = Emitter(), Substitution(replaced)
    users: dict[Instruction, list[Instruction]] = {}
    for instruction in computation.instructions:
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)
    for instruction in computation.instructions:
        better = substitution.apply(instruction)
        found = _rule(better, emitter, apart_for_a_while=_is_apart_for_a_while(instruction, users))
        substitution.record(instruction, emitter.put(better) if found is None else found)
    if not substitution.values:
        return computation
    return Computation(computation.name, tuple(emitter.instructions), substitution.value(computation.root))


def _rule(instruction: Instruction, emitter: Emitter, *, apart_for_a_while: bool) -> Instruction | None:
    if instruction.opcode is Opcode.DOT:
        return _merged_after(instruction, emitter)
    if instruction.opcode is Opcode.REDUCE and len(instruction.operands) == 2:
        return _reduced_apart(instruction, emitter)
    if instruction.opcode is not Opcode.RESHAPE:
        return None
    (merged,) = instruction.operands
    split = _Split.between(dims_of(merged), dims_of(instruction))
    if split is not None and _meets_product(merged, split, split.dimension, _MAX_DEPTH, never_apart=apart_for_a_while):
        return _Rewriting(emitter, split.sizes).value(merged, split.dimension)
    if merged.opcode is Opcode.RESHAPE and merged.operands[0].opcode is Opcode.DOT:
        return _reshaped(merged.operands[0], instruction, emitter)
    return None


def _is_apart_for_a_while(reshape: Instruction, users: Mapping[Instruction, Sequence[Instruction]]) -> bool:
    """Whether what a reshape takes apart is put together again after elementwise instructions."""
    if reshape.opcode is not Opcode.RESHAPE:
        return False
    split = _Split.between(dims_of(reshape.operands[0]), dims_of(reshape))
    seen, stack = {reshape}, [reshape] if split is not None else []
    while stack and len(seen) <= _MAX_USERS:
        value = stack.pop()
        for user in users.get(value, ()):
            if user.opcode is Opcode.RESHAPE and _Split.between(dims_of(user), dims_of(value)) == split:
                return True
            if user.opcode in _MOVES and dims_of(user) == dims_of(value) and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _merged_after(dot: Instruction, emitter: Emitter) -> Instruction | None:
    """A product of operands that merged batches: merged after it."""
    apart, found = dot, _split_once(dot, emitter)
    while found is not None:
        apart, found = found, _split_once(found, emitter)
    return None if apart is dot else _reshaped(apart, dot, emitter)


def _split_once(dot: Instruction, emitter: Emitter) -> Instruction | None:
    for dimension in range(len(dot.attributes_as(DotAttributes).lhs_batch)):
        sizes = _sizes_of_operands(dot, dimension, _MAX_DEPTH)
        if sizes:
            return _Rewriting(emitter, sizes).value(dot, dimension)
    return None


def _reduced_apart(reduce: Instruction, emitter: Emitter) -> Instruction | None:
    """A reduction over a dimension that was merged after a product: over the dimensions that were merged."""
    merged, initial = reduce.operands
    reduced = reduce.attributes_as(DimensionsAttributes).dimensions
    for dimension in reduced:
        sizes = _merged_sizes(merged, dimension, _MAX_DEPTH)
        if sizes and _meets_product(merged, _Split(dimension, sizes), dimension, _MAX_DEPTH):
            apart = _Rewriting(emitter, sizes).value(merged, dimension)
            attributes = DimensionsAttributes(_spread(reduced, dimension, len(sizes)))
            made = Instruction(
                Opcode.REDUCE, reduce.shape, (apart, initial), attributes, reduce.called, reduce.name, reduce.metadata
            )
            emitter.instructions.append(made)
            return made
    return None


def _reshaped(value: Instruction, like: Instruction, emitter: Emitter) -> Instruction:
    made = Instruction(Opcode.RESHAPE, like.shape, (value,), NONE, (), like.name, like.metadata)
    emitter.instructions.append(made)
    return made


@dataclass(frozen=True, slots=True)
class _Split:
    """``dimension`` becomes as many as there are ``sizes``."""

    dimension: int
    sizes: Dims

    @classmethod
    def between(cls, old: Dims, new: Dims) -> _Split | None:
        """The one dimension that ``new`` takes apart; None when more differs."""
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
        rest = len(old) - same - 1
        if len(new) <= len(old) or rest < 0 or old[same + 1 :] != new[len(new) - rest :]:
            return None
        sizes = new[same : len(new) - rest]
        return cls(same, sizes) if 0 not in sizes and 1 not in sizes else None


def _spread(dimensions: Dims, dimension: int, count: int) -> Dims:
    """``dimensions`` where ``dimension`` is ``count`` of them and those behind it moved."""
    found: list[int] = []
    for d in dimensions:
        found += range(d, d + count) if d == dimension else [d if d < dimension else d + count - 1]
    return tuple(found)


def _without_ones(reshape: Instruction, dimension: int) -> int | None:
    """Which dimension of its operand ``dimension`` is, of a reshape that only puts in or takes out sizes of 1."""
    new, old = ([d for d, size in enumerate(dims_of(i)) if size != 1] for i in (reshape, reshape.operands[0]))
    same = [dims_of(reshape)[d] for d in new] == [dims_of(reshape.operands[0])[d] for d in old]
    return old[new.index(dimension)] if same and dimension in new else None


def _meets_product(value: Instruction, split: _Split, dimension: int, depth: int, *, never_apart: bool = False) -> bool:
    """Whether ``dimension`` is the batch of a product whose operands merged it so, or came to the program merged.
    With ``never_apart`` any operands will do that did not merge it otherwise."""
    if value.opcode is Opcode.DOT:
        a = value.attributes_as(DotAttributes)
        if dimension >= len(a.lhs_batch):
            return False
        sizes = _sizes_of_operands(value, dimension, depth)
        given = never_apart or all(_is_given(operand) for operand in value.operands)
        return sizes == split.sizes or (not sizes and given)
    if value.opcode is Opcode.RESHAPE:
        merged = _Split.between(dims_of(value), dims_of(value.operands[0]))
        if merged is not None:
            same = merged.dimension == dimension and merged.sizes == split.sizes
            return same and _are_batches(value.operands[0], dimension, len(split.sizes), depth)
    return any(
        _meets_product(operand, split, d, depth - 1, never_apart=never_apart)
        for operand, d in _sources(value, dimension, depth)
    )


def _is_given(value: Instruction) -> bool:
    """Whether it is an argument, arranged."""
    while value.opcode in (Opcode.TRANSPOSE, Opcode.CONVERT, Opcode.COPY):
        value = value.operands[0]
    return value.opcode is Opcode.PARAMETER


def _are_batches(value: Instruction, first: int, count: int, depth: int) -> bool:
    """Whether ``count`` dimensions from ``first`` on are batches of a product that ``value`` is made of."""
    if value.opcode is Opcode.DOT:
        return first + count <= len(value.attributes_as(DotAttributes).lhs_batch)
    if depth == 0 or value.opcode not in _MOVES:
        return False
    return any(_are_batches(o, first, count, depth - 1) for o in value.operands if dims_of(o) == dims_of(value))


def _sizes_of_operands(dot: Instruction, dimension: int, depth: int) -> Dims:
    """What one of a product's operands merged to its batch ``dimension``; empty where none did."""
    a = dot.attributes_as(DotAttributes)
    batches = (a.lhs_batch[dimension], a.rhs_batch[dimension])
    found = (_merged_sizes(operand, d, depth) for operand, d in zip(dot.operands, batches, strict=True))
    return next((sizes for sizes in found if sizes), ())


def _merged_sizes(value: Instruction, dimension: int, depth: int) -> Dims:
    """Of the dimensions that ``dimension`` was merged of; empty where it was not. What was repeated for that, as keys
    are for groups of heads, says nothing of the others."""
    if value.opcode is Opcode.RESHAPE:
        split = _Split.between(dims_of(value), dims_of(value.operands[0]))
        if split is not None:
            repeated = value.operands[0].opcode is Opcode.BROADCAST
            return split.sizes if split.dimension == dimension and not repeated else ()
    found = (_merged_sizes(operand, d, depth - 1) for operand, d in _sources(value, dimension, depth))
    return next((sizes for sizes in found if sizes), ())


def _sources(value: Instruction, dimension: int, depth: int) -> list[tuple[Instruction, int]]:
    """The operands that ``value`` has ``dimension`` from, and which dimension of theirs it is."""
    if depth == 0:
        return []
    if value.opcode is Opcode.TRANSPOSE:
        return [(value.operands[0], value.attributes_as(DimensionsAttributes).dimensions[dimension])]
    if value.opcode is Opcode.RESHAPE:
        source = _without_ones(value, dimension)
        return [] if source is None else [(value.operands[0], source)]
    if value.opcode in _MOVES:
        return [(operand, dimension) for operand in value.operands if dims_of(operand) == dims_of(value)]
    return []


class _Rewriting:
    """Values with a dimension taken apart into ``sizes``."""

    def __init__(self, emitter: Emitter, sizes: Dims) -> None:
        self._emitter, self._sizes = emitter, sizes
        self._made: dict[tuple[int, int], Instruction] = {}

    def value(self, merged: Instruction, dimension: int) -> Instruction:
        key = (id(merged), dimension)
        if key not in self._made:
            self._made[key] = self._make(merged, dimension)
        return self._made[key]

    def _make(self, merged: Instruction, dimension: int) -> Instruction:
        old = dims_of(merged)
        dims = (*old[:dimension], *self._sizes, *old[dimension + 1 :])
        attributes, operands = merged.attributes, merged.operands
        count = len(self._sizes)
        if merged.opcode is Opcode.RESHAPE and dims_of(operands[0]) == dims:
            return operands[0]
        if merged.opcode is Opcode.RESHAPE and (place := _without_ones(merged, dimension)) is not None:
            return self._emit(merged, dims, (self.value(operands[0], place),), attributes)
        if merged.opcode is Opcode.DOT:
            return self._emit(merged, dims, *self._product(merged, dimension))
        if merged.opcode is Opcode.TRANSPOSE:
            order = merged.attributes_as(DimensionsAttributes).dimensions
            source = self.value(operands[0], order[dimension])
            order = _spread(order, order[dimension], count)
            return self._emit(merged, dims, (source,), DimensionsAttributes(order))
        if merged.opcode is Opcode.BROADCAST:
            kept = merged.attributes_as(DimensionsAttributes).dimensions
            source = self.value(operands[0], kept.index(dimension)) if dimension in kept else operands[0]
            return self._emit(merged, dims, (source,), DimensionsAttributes(_spread(kept, dimension, count)))
        if merged.opcode is Opcode.REDUCE and len(operands) == 2:
            reduced = merged.attributes_as(DimensionsAttributes).dimensions
            kept = tuple(d for d in range(len(dims_of(operands[0]))) if d not in reduced)
            source = self.value(operands[0], kept[dimension])
            reduced = _spread(reduced, kept[dimension], count)
            return self._emit(merged, dims, (source, operands[1]), DimensionsAttributes(reduced))
        if merged.opcode in _MOVES and all(dims_of(operand) == old for operand in operands):
            return self._emit(merged, dims, tuple(self.value(operand, dimension) for operand in operands), attributes)
        made = Instruction(
            Opcode.RESHAPE, ArrayShape(element_type_of(merged), dims), (merged,), NONE, (), merged.name, merged.metadata
        )
        self._emitter.instructions.append(made)
        return made

    def _product(self, dot: Instruction, dimension: int) -> tuple[tuple[Instruction, ...], Attributes]:
        a, count = dot.attributes_as(DotAttributes), len(self._sizes)
        left, right = a.lhs_batch[dimension], a.rhs_batch[dimension]
        operands = (self.value(dot.operands[0], left), self.value(dot.operands[1], right))
        return operands, replace(
            a,
            lhs_contracting=_spread(a.lhs_contracting, left, count),
            rhs_contracting=_spread(a.rhs_contracting, right, count),
            lhs_batch=_spread(a.lhs_batch, left, count),
            rhs_batch=_spread(a.rhs_batch, right, count),
        )

    def _emit(
        self, like: Instruction, dims: Dims, operands: tuple[Instruction, ...], attributes: Attributes
    ) -> Instruction:
        """``like`` with other dimensions; what it is made of passed the rule."""
        shape = ArrayShape(element_type_of(like), dims)
        made = Instruction(like.opcode, shape, operands, attributes, like.called, like.name, like.metadata)
        self._emitter.instructions.append(made)
        return made
