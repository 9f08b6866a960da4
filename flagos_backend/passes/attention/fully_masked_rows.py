"""Rows of which every logit is -infinity, whatever made them so: a softmax of one is NaN, and programs that look at the
logits, as PyTorch's ``_safe_softmax`` does, set its weights to zero. For recognize.py."""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.ir.attributes import CompareAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.passes.attention.labels import Labels, scalar_of
from flagos_backend.passes.attention.symbols import FullyMasked, Logits, Polynomial, RowMaximum, Symbol


def compared(compare: Instruction, symbol: Symbol | None) -> FullyMasked | None:
    """Logits, or their greatest, compared with -infinity."""
    direction = compare.attributes_as(CompareAttributes).direction
    if direction not in (Comparison.EQ, Comparison.NE) or scalar_of(compare.operands[1]) != float("-inf"):
        return None
    holds = direction is Comparison.EQ
    if isinstance(symbol, RowMaximum) and isinstance(symbol.logits, Logits):
        return FullyMasked(symbol.of, symbol.labels, symbol.logits, holds, symbol.of.row)
    return FullyMasked(symbol.of, symbol.labels, symbol, holds) if isinstance(symbol, Logits) else None


def of_whole_row(
    opcode: Opcode, initial: float | None, symbol: FullyMasked, labels: Labels, axes: list[int | None]
) -> FullyMasked | None:
    """Whether all logits along ``axes`` are -infinity, or any is not; ``labels`` are those that are left."""
    wanted = (Opcode.AND, 1.0) if symbol.holds else (Opcode.OR, 0.0)
    if (opcode, initial) != wanted or symbol.row is not None or len(axes) != 1:
        return None
    return replace(symbol, labels=labels, row=axes[0])


def is_of_whole_row(predicate: FullyMasked) -> bool:
    """Whether it tells rows of which every logit that enters the softmax is -infinity."""
    logits = predicate.of.logits
    of_row = predicate.row is not None and predicate.row == predicate.of.row
    return of_row and logits is not None and replace(predicate.logits, labels=logits.labels) == logits


def zero_where_fully_masked(predicate: Symbol | None, symbol: Polynomial, chosen: bool) -> Polynomial | None:
    """``symbol`` where ``predicate`` is ``chosen``, and zero elsewhere."""
    if not isinstance(predicate, FullyMasked) or predicate.of is not symbol.of or predicate.labels != symbol.labels:
        return None
    return (
        replace(symbol, fully_masked_zero=True)
        if is_of_whole_row(predicate) and predicate.holds is not chosen
        else None
    )
