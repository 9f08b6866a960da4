"""Two sums over the same elements that are added, as one sum: at each reduction all warps of a row wait for one
another. Just before a region is written down for an accelerator."""

from __future__ import annotations

from collections import Counter

from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.literals import starts_neutral
from flagos_backend.loop_ir.region import Apply, Expression, Reduce, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced


def joined(region: Region) -> Region:
    """``region`` itself where no sums are added, or what is used elsewhere too."""
    expressions = region.expressions()
    uses = Counter(operand for e in expressions for operand in e.operands)
    uses.update(region.roots())
    return replaced(region, {e for e in expressions if _adds_sums(e, uses)}, _one_sum)


def _one_sum(expression: Expression, moved: Moved, pool: Pool) -> Expression:
    one, other = expression.operands
    assert isinstance(one, Reduce) and isinstance(other, Reduce)
    terms = pool.apply(Apply(one.element_type, Opcode.ADD, ()), (moved[one.value], moved[other.value]))
    return pool.reduce(one, terms, moved[one.initial], one.dims)


def _adds_sums(expression: Expression, uses: Counter[Expression]) -> bool:
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.ADD or expression.detail:
        return False
    one, other = expression.operands
    return (
        isinstance(one, Reduce)
        and isinstance(other, Reduce)
        and one.dims == other.dims
        and all(sum_.combine is Opcode.ADD and starts_neutral(sum_) and uses[sum_] == 1 for sum_ in (one, other))
    )
