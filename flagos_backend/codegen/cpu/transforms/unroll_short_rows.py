"""Makes loops over short rows, as of a few channels, loops over long ones: several rows become one.

What repeats from row to row is repeated in memory first; a reduction over rows leaves a result for each of the rows
that became one, which a second reduction joins. Between fusion_policy.py, which asks whether it can, and
emit_map_loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.literals import starts_neutral
from flagos_backend.loop_ir.region import Affine, Expression, Index, Load, Reduce, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite

# Rows of this many elements are long enough by themselves.
LONG = 64
# Of a loop without reductions they are joined up to here: a call for each operation of a row still tells.
_JOINED = 256
# How long the new rows may get, and how long they must get to be worth the repetition.
_GREATEST, _LEAST = 1024, 256


@dataclass(frozen=True, slots=True)
class _Rows:
    """A nest of ``rows`` by ``columns``, of which ``joined`` rows at a time become one."""

    nest: Nest
    rows: int
    columns: int
    joined: int

    @property
    def dims(self) -> tuple[int, int]:
        return self.rows // self.joined, self.joined * self.columns

    @property
    def square(self) -> tuple[int, int]:
        """The rows that become one."""
        return self.joined, self.columns

    @property
    def row_major(self) -> Affine:
        """Of ``square``."""
        return Affine(0, (self.columns, 1))

    def is_contiguous(self, index: Affine) -> bool:
        return self.nest.strides(index) == (self.columns, 1)

    def is_repeated(self, index: Affine) -> bool:
        return self.nest.strides(index) == (0, 1)

    def is_one_element(self, index: Affine) -> bool:
        return not any(self.nest.strides(index))

    def index_map(self, index: Affine) -> Affine:
        """``index``, contiguous or of one element, over ``dims``."""
        if self.is_one_element(index):
            return Affine(index.offset, (0, 0))
        return Affine(index.offset, (self.joined * self.columns, 1))


def can_lengthen(region: Region) -> bool:
    """Whether ``lengthened`` takes ``region``."""
    return _rows(region) is not None


def lengthened(region: Region) -> Sequence[Region]:
    """Regions that together store what ``region`` does, over long rows; itself where that is not possible."""
    rows = _rows(region)
    if rows is None:
        return (region,)
    repeated = {
        load: _repetition(load, rows)
        for load in region.expressions()
        if isinstance(load, Load) and rows.is_repeated(load.index)
    }
    loads: dict[Expression, Expression] = {
        load: Load(load.element_type, store.target, Affine(0, (0, 1))) for load, store in repeated.items()
    }
    moved = rewrite(region.expressions(), Pool(), rows.index_map, lambda dims: (0,), loads.get)
    stores, joins = [], []
    for store in region.stores:
        value = moved[store.value]
        if isinstance(value, Reduce):
            shape = ArrayShape(value.element_type, (prod(rows.square),))
            partial = Instruction(Opcode.COPY, shape, (store.target,), name=f"{store.target.name}.partial")
            stores.append(Store(partial, value, Affine(0, (0, 1))))
            load = Load(value.element_type, partial, rows.row_major)
            join = Reduce(value.element_type, value.combine, load, value.initial, (0,))
            joins.append(Store(store.target, join, Affine(store.index.offset, (0, 1))))
        else:
            stores.append(Store(store.target, value, rows.index_map(store.index)))
    regions = [Region(rows.dims, tuple(stores))]
    if repeated:
        regions.insert(0, Region(rows.square, tuple(repeated.values())))
    if joins:
        regions.append(Region(rows.square, tuple(joins)))
    return regions


def _repetition(load: Load, rows: _Rows) -> Store:
    """A row of what ``load`` reads, once for each row that becomes part of one."""
    shape = ArrayShape(load.element_type, rows.square)
    target = Instruction(Opcode.COPY, shape, (load.source,), name=f"{load.source.name}.repeated")
    return Store(target, Load(load.element_type, load.source, Affine(load.index.offset, (0, 1))), rows.row_major)


def _rows(region: Region) -> _Rows | None:
    nest = simplify(region)
    if len(nest.dims) != 2 or not 1 < nest.dims[1] < (LONG if region.reductions else _JOINED):
        return None
    count, columns = nest.dims
    joined = next((k for k in range(min(_GREATEST // columns, count // 2), 0, -1) if count % k == 0), 1)
    rows = _Rows(nest, count, columns, joined)
    return rows if joined * columns >= _LEAST and _is_regular(region, rows) else None


def _is_regular(region: Region, rows: _Rows) -> bool:
    """Whether everything is contiguous, repeats in every row or is one element; reductions are over rows, and
    stored."""
    if region.reductions and (
        rows.nest.reduced != (0,) or not all(starts_neutral(reduction) for reduction in region.reductions)
    ):
        return False
    for expression in region.expressions():
        if isinstance(expression, Load) and not (
            rows.is_contiguous(expression.index)
            or rows.is_repeated(expression.index)
            or rows.is_one_element(expression.index)
        ):
            return False
        if isinstance(expression, Index) and not rows.is_one_element(expression.value):
            return False
    stored_alike = rows.is_repeated if region.reductions else rows.is_contiguous
    return all(isinstance(s.value, Reduce) == bool(region.reductions) and stored_alike(s.index) for s in region.stores)
