"""The second half of a split reduction: a region that reduces the partial results and stores what depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flagos_backend.codegen.triton.tiling import Axis, Tiling
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.literals import identity_of, literal_of, starts_neutral
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Load, Reduce, Region, Store, below, linear
from flagos_backend.loop_ir.region import axis as dimension
from flagos_backend.loop_ir.rewriting import Pool, rewrite, rewrite_store

# What partial results are kept in, where that is not the reduction's own type.
_WIDER = {ElementType.PRED: ElementType.S32, ElementType.F16: ElementType.F32, ElementType.BF16: ElementType.F32}
_PRED_COMBINE = {
    Opcode.ADD: Opcode.MAXIMUM,
    Opcode.OR: Opcode.MAXIMUM,
    Opcode.MULTIPLY: Opcode.MINIMUM,
    Opcode.AND: Opcode.MINIMUM,
}


@dataclass(frozen=True, slots=True)
class Split:
    """``buffers``: for each reduction that is split, what its partial results lie in: [parts, positions that are kept].
    ``rest``: the region that reads them."""

    buffers: dict[Reduce, Instruction]
    rest: Region


def split(region: Region, tiling: Tiling) -> Split | None:
    """None when ``tiling`` leaves no partial results."""
    looped = tiling.looped
    partial_always = (
        len({reduction.dims for reduction in region.reductions}) > 1
    )  # rows and columns: the columns' reductions are never whole
    if looped is None or (tiling.parts == 1 and not partial_always):
        return None
    reductions = [reduction for reduction in region.reductions if set(reduction.dims) & set(looped.dims)]
    if not reductions:
        return None
    (kept,) = [a for a in tiling.axes if a is not looped]
    shape = (tiling.parts, *kept.sizes)
    buffers = {
        reduction: Instruction(
            Opcode.COPY, ArrayShape(_WIDER.get(reduction.element_type, reduction.element_type), shape), name=f"part{n}"
        )
        for n, reduction in enumerate(reductions)
    }
    return Split(buffers, _rest(region, kept, shape, buffers))


def _rest(region: Region, kept: Axis, dims: tuple[int, ...], buffers: dict[Reduce, Instruction]) -> Region:
    rank = len(dims)
    everywhere = linear(tuple(dimension(d, rank) for d in range(rank)), dims, rank)
    pool = Pool()

    def index_map(index: Affine) -> Affine:
        return Affine(index.offset, (0, *(index.coefficients[d] for d in kept.dims)))

    def replace(expression: Expression) -> Expression | None:
        if not isinstance(expression, Reduce) or expression not in buffers:
            return None
        buffer, own = buffers[expression], expression.element_type
        wide = _WIDER.get(own, own)
        combine = expression.combine
        if own is ElementType.PRED:
            combine = _PRED_COMBINE.get(combine, combine)
        start = moved_start(expression, combine, wide)
        total = Reduce(wide, combine, Load(wide, buffer, everywhere), start, (0,))
        return pool.apply(Apply(own, Opcode.CONVERT, (total,)), (total,)) if wide is not own else total

    def moved_start(reduction: Reduce, combine: Opcode, wide: ElementType) -> Expression:
        if starts_neutral(reduction):
            return literal_of(identity_of(combine, wide), wide)
        below_initial = below([reduction.initial])
        if any(isinstance(expression, Reduce) for expression in below_initial):
            raise AssertionError("a reduction that is split begins with what no reduction goes into")
        initial = rewrite(below_initial, pool, index_map, lambda _: (), lambda _: None)[reduction.initial]
        return initial if initial.element_type is wide else Apply(wide, Opcode.CONVERT, (initial,))

    late = Region(region.dims, tuple(store for store in region.stores if _needs(store.value, buffers)))
    moved = rewrite(below(late.roots(), buffers), pool, index_map, lambda _: (), replace)
    return Region(dims, tuple(rewrite_store(s, index_map, moved) for s in late.stores))


def _needs(value: Expression, reductions: dict[Reduce, Instruction]) -> bool:
    return any(e in reductions for e in below([value], reductions))


def stores_of_first(region: Region, split_reductions: Split) -> tuple[Store, ...]:
    """The stores that need no partial result."""
    return tuple(store for store in region.stores if not _needs(store.value, split_reductions.buffers))


def partial_size(buffer: Instruction) -> int:
    """Elements of one part."""
    assert isinstance(buffer.shape, ArrayShape)
    return prod(buffer.shape.dims[1:])
