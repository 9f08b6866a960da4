"""Logits less the maximum of their row, and less the logarithm of l: what weights are exponentials of. For
recognize.py."""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.passes.attention.algebra import alike
from flagos_backend.passes.attention.roles import hide_of, hides_of
from flagos_backend.passes.attention.symbols import (
    WEIGHTS,
    Logits,
    LogRowSum,
    Polynomial,
    RowMaximum,
    Shifted,
    Term,
    polynomial,
)


def shifted(logits: Logits, maximum: RowMaximum) -> Shifted | None:
    """Less the maximum of their row, all with the same guard: e is one array."""
    of = logits.of
    if maximum.of is not of or logits.labels != maximum.labels or not alike(logits, maximum.logits):
        return None
    of.guard = of.guard or maximum.guard
    return Shifted(of, logits.labels) if of.guard is maximum.guard else None


def with_maximum(logarithm: LogRowSum, maximum: RowMaximum) -> LogRowSum | None:
    of = logarithm.of
    same = maximum.of is of and maximum.logits == of.logits and maximum.guard is of.guard
    if not same or maximum.labels != logarithm.labels or logarithm.with_maximum:
        return None
    return replace(logarithm, with_maximum=True)


def less_log_sum(symbol: Shifted | Logits, logarithm: LogRowSum) -> Shifted | None:
    of, labels = symbol.of, symbol.labels
    if labels != logarithm.labels or logarithm.with_maximum is not isinstance(symbol, Logits):
        return None
    if isinstance(symbol, Logits):
        same = of.logits is not None and alike(symbol, of.logits)
        of.adds_maximum |= same
    else:
        same = symbol == Shifted(of, labels)
    return Shifted(of, labels, less_log_sum=True) if same else None


def infinite_where_hidden(symbol: Shifted, term: Term, visible: bool) -> Shifted | None:
    """As log_softmax is with ``where``."""
    hide = hide_of(symbol.of, term, visible)
    return None if hide is None else replace(symbol, zeroed=symbol.zeroed | {hide})


def zeroed_weights(symbol: Shifted) -> Polynomial:
    """The exponentials of logarithms of weights."""
    of = symbol.of
    finite = bool(symbol.zeroed) and symbol.zeroed == hides_of(of)
    return replace(polynomial(of, symbol.labels, {WEIGHTS: 1.0}, finite=finite), zeroed=symbol.zeroed)
