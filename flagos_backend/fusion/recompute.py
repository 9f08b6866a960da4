"""Which values are cheaper computed again where they are read than written and read back. Used by fuse.py, of
instructions, and by merge.py, of what regions store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.indexing import dims_of, movement_of
from flagos_backend.loop_ir.region import Apply, Expression, Load, Reduce, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite, unmoved

# What takes no more than a division does.
CHEAP = frozenset(
    {
        *(Opcode.ABS, Opcode.NEGATE, Opcode.SIGN, Opcode.NOT, Opcode.AND, Opcode.OR, Opcode.XOR),
        *(Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.MAXIMUM, Opcode.MINIMUM),
        *(Opcode.COMPARE, Opcode.SELECT, Opcode.CLAMP, Opcode.CONVERT, Opcode.BITCAST_CONVERT, Opcode.IS_FINITE),
    }
)
_MAX_OPERATIONS = 8
# Of operations that are computed again for the memory that their value would take, and of how many times less what they
# are made of is. An exponential of 32 bits takes a third of the time that reading it does.
_MAX_REMADE = 4
_REMADE_PART = 8


@dataclass(frozen=True, slots=True)
class Remaking:
    """``operations`` for each element, and the bytes of the arrays that they begin with."""

    operations: int
    loaded_bytes: int


def cost_of_remaking(
    instruction: Instruction,
    operands: Callable[[Instruction], Sequence[Instruction]],
    is_buffer: Callable[[Instruction], bool],
) -> Remaking | None:
    """Of ``instruction`` in a region that reads it: it is made by few fast operations of arrays so much smaller that
    reading those takes less time, and less memory, than writing it and reading it. Else None.

    So is what is spread along a new dimension. ``operands``: as of FlatComputation; ``is_buffer``: whether a value is
    in memory whatever this one is.
    """
    total = bytes_of(instruction)
    operations = loaded = 0
    waiting = [instruction]  # what is read at two places is computed at both
    while waiting:
        value = waiting.pop()
        if bytes_of(value) * _REMADE_PART <= total:
            loaded += bytes_of(value)
            continue
        moves = value.opcode is Opcode.IOTA or movement_of(value) is not None or _has_same_dims(value, operands)
        operations += not moves
        if is_buffer(value) or operations > _MAX_REMADE or not (moves or _is_fast(value)):
            return None
        waiting.extend(operands(value))
    return Remaking(operations, loaded)


def bytes_of(value: Instruction) -> int:
    """Of an array."""
    assert isinstance(value.shape, ArrayShape), value
    return value.shape.num_bytes


def _has_same_dims(value: Instruction, operands: Callable[[Instruction], Sequence[Instruction]]) -> bool:
    """Whether it is a reshape that brings or drops dimensions of size 1 alone, which takes no division."""
    if value.opcode is not Opcode.RESHAPE:
        return False
    ours, theirs = ([size for size in dims_of(v) if size != 1] for v in (value, *operands(value)))
    return ours == theirs


def _is_fast(value: Instruction) -> bool:
    is_narrow = isinstance(value.shape, ArrayShape) and value.shape.element_type.bytes <= 4
    return value.opcode in CHEAP or (value.opcode in (Opcode.EXP, Opcode.SQRT, Opcode.RSQRT) and is_narrow)


def recomputed(region: Region, store: Store, pool: Pool) -> Region | None:
    """A region that stores what ``store`` of ``region`` stores, from buffers alone; None where that is no gain.

    It is one when few cheap operations make the value from no more bytes than it has. The region's other results count
    as buffers.
    """
    others: dict[Expression, Store] = {
        s.value: s for s in region.stores if s is not store and not isinstance(s.value, Load)
    }
    value = _from_buffers(store.value, others, pool)
    if value is None:
        return None
    alone = Region(region.dims, (Store(store.target, value, store.index),))
    operations = [e for e in alone.expressions() if isinstance(e, Apply)]
    if len(operations) > _MAX_OPERATIONS or any(e.opcode not in CHEAP for e in operations):
        return None
    return alone if _loaded_bytes(alone) <= value.element_type.bytes * _points(alone) else None


def _from_buffers(value: Expression, others: dict[Expression, Store], pool: Pool) -> Expression | None:
    """``value`` with what other stores hold as loads; None when it needs a reduction that nobody stores."""
    reached: dict[Expression, None] = {}
    stack: list[tuple[Expression, bool]] = [(value, False)]
    while stack:
        expression, done = stack.pop()
        if expression in reached:
            continue
        if done or expression in others or isinstance(expression, Reduce):
            if isinstance(expression, Reduce) and expression not in others:
                return None
            reached[expression] = None
            continue
        stack.append((expression, True))
        stack.extend((operand, False) for operand in expression.operands)

    def load(expression: Expression) -> Expression | None:
        store = others.get(expression)
        return None if store is None else Load(expression.element_type, store.target, store.index)

    return rewrite(reached, pool, unmoved, lambda dims: dims, load)[value]


def _points(region: Region) -> int:
    (store,) = region.stores
    return prod(region.dims[d] for d in store.index.dims)


def _loaded_bytes(region: Region) -> int:
    """Of what varies as much as the result does: a row or a column beside it costs little."""
    points = _points(region)
    total = 0
    for expression in region.expressions():
        if isinstance(expression, Load):
            reach = prod(region.dims[d] for d in region.along(expression.index))
            total += expression.element_type.bytes * reach if reach * 8 > points else 0
    return total
