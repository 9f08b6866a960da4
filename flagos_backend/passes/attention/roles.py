"""What an array is that the program makes of weights or of the gradient of logits: what a call has to give. And what
hides and factors make of them on the way there. For recognize.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.labels import Labels, dims_of, peel, scalar_of
from flagos_backend.passes.attention.quotients import upstream_of
from flagos_backend.passes.attention.sinks import unpadded
from flagos_backend.passes.attention.symbols import (
    EXPONENTIALS,
    Candidate,
    Factor,
    FactorGradient,
    Hide,
    Logits,
    Polynomial,
    Powers,
    Term,
    polynomial,
)


def role(symbol: Polynomial, summed: frozenset[int]) -> str | None:
    """Which result a product with ``symbol`` is that sums over ``summed``."""
    over_keys = summed == {symbol.of.axis}
    if symbol.coefficient() == 1.0:
        symbol.of.zeroes_weights |= bool(symbol.zeroed | symbol.partly)
        symbol.of.zeroes_nan |= symbol.nan_zero
        _note_rows(symbol)
        return "output" if over_keys else "value"
    is_exponentials = [powers for powers, _ in symbol.terms] == [EXPONENTIALS] and not symbol.factors
    symbol.of.weighs_exponentials |= over_keys and is_exponentials
    logits = symbol.of.logits
    if logits is None or Counter(symbol.factors) != Counter(logits.factors):
        return None
    return ("query" if over_keys else "key") if _is_gradient(symbol) else None


def note_gradient_of_factor(reduce: Instruction, symbol: Polynomial, labels: Labels) -> None:
    """``reduce`` sums a gradient of logits times their product, over keys and what else is not in ``labels``."""
    of = symbol.of
    if not {of.axis, of.row} & set(labels) and _is_gradient(symbol, product=1):
        of.factor_gradients.append(FactorGradient(reduce, labels, symbol.factors))


def scale_of_bias_gradient(symbol: Polynomial) -> float | None:
    """How many times the gradient of what is added to the logits it is; None where it is another array."""
    scale = symbol.scale_outside_cap()
    return scale if scale is not None and _is_zero_where_hidden(symbol) else None


def _is_gradient(symbol: Polynomial, product: int = 0) -> bool:
    """Whether it is that of the logits, zero where a key is hidden."""
    of, scale = symbol.of, symbol.gradient_scale(product)
    if scale is None or of.logits is None or abs(scale - of.logits.slope) > 1e-6 * abs(of.logits.slope):
        return False
    return _is_zero_where_hidden(symbol)


def _is_zero_where_hidden(symbol: Polynomial) -> bool:
    """Whether the program sets it to zero there, or its weights; which of the two is noted."""
    if symbol.zeroed | symbol.partly != hides_of(symbol.of):
        return False
    symbol.of.zeroes_weights |= bool(symbol.partly)
    _note_rows(symbol)
    return True


def _note_rows(symbol: Polynomial) -> None:
    symbol.of.keeps_weights |= symbol.zeroed != hides_of(symbol.of)
    symbol.of.zeroes_fully_masked |= symbol.fully_masked_zero
    symbol.of.keeps_fully_masked |= not symbol.fully_masked_zero


def hides_of(of: Candidate) -> frozenset[Hide]:
    return frozenset(of.logits.hides if of.logits else ())


# ---- the gradient of weights ----


def gradient_of_weights(symbol: Polynomial, other: Instruction) -> Polynomial | None:
    """``other``, beside ``symbol``, as the gradient of the weights: a product, and the only such one."""
    of, sign = symbol.of, 1.0
    while other.opcode is Opcode.NEGATE:
        other, sign = other.operands[0], -sign
    term = unpadded(of, Term(*peel(other, symbol.labels, exact=False)))
    if of.row != of.axis and of.row in term.labels:
        return None
    term, zeroed = without_zeroes(of, Term(*peel(term.instruction, term.labels, exact=False)))
    if term.instruction.opcode is not Opcode.DOT or (of.product_gradient or term) != term:
        return None
    if of.weighted is not None:
        of.upstream = of.upstream or upstream_of(of, term)
        if of.upstream is None:
            return None
    of.product_gradient = term
    gradient = polynomial(of, symbol.labels, {Powers(gradient=1): sign}, finite=True)
    return replace(gradient, zeroed=zeroed, upstream=of.upstream, fully_masked_zero=True)


# ---- factors ----


def with_factor(symbol: Logits | Polynomial, other: Instruction, *, divides: bool) -> Logits | Polynomial | None:
    """``symbol`` times an array, or divided by it, that is the same for all keys. Of logits it is known only later
    whether it is (assemble.py); they must be no more than a product yet."""
    factor = Factor(Term(*peel(other, symbol.labels, exact=True, broadcasts=True)), divides)
    if isinstance(symbol, Polynomial):
        per_key = {symbol.of.axis, symbol.of.row} & set(factor.term.labels)
        return None if per_key else replace(symbol, factors=(*symbol.factors, factor))
    if not symbol.is_product or symbol.cap is not None or set(symbol.labels) <= {None, *factor.term.labels}:
        return None
    return replace(symbol, factors=(*symbol.factors, factor))


def times_product(symbol: Polynomial, logits: Logits) -> Polynomial | None:
    """As the gradient of a factor begins."""
    if logits.labels != symbol.labels or not logits.is_product or logits.cap is not None:
        return None
    terms = tuple((p._replace(product=p.product + 1), c * logits.scale) for p, c in symbol.terms)
    return replace(symbol, terms=terms, factors=(*symbol.factors, *logits.factors))


# ---- hides ----


def zero_where_hidden(symbol: Polynomial, term: Term, visible: bool) -> Polynomial | None:
    """A select of the backward pass, hidden logits have no gradient; or of the weights."""
    hide = hide_of(symbol.of, term, visible)
    if hide is None:
        return None
    zeroed = symbol.zeroed | {hide}
    finite = symbol.finite or zeroed == hides_of(symbol.of)
    return replace(symbol, zeroed=zeroed, partly=symbol.partly - zeroed, finite=finite)


def without_zeroes(of: Candidate, term: Term) -> tuple[Term, frozenset[Hide]]:
    """The gradient of weights that were set to zero where a key is hidden, before it was set to zero there too; and
    where it was."""
    if term.instruction.opcode is not Opcode.SELECT:
        return term, frozenset()
    predicate, on_true, on_false = term.instruction.operands
    for kept, other, visible in ((on_true, on_false, True), (on_false, on_true, False)):
        if scalar_of(other) == 0 and dims_of(predicate) == dims_of(kept):
            hide = hide_of(of, Term(*peel(predicate, term.labels, exact=True, broadcasts=True)), visible)
            if hide is not None:
                of.zeroes_weights = True
                source, zeroed = without_zeroes(of, Term(*peel(kept, term.labels, exact=False)))
                return source, zeroed | {hide}
    return term, frozenset()


def zero_times_anything(zero: Polynomial) -> Polynomial:
    """The product of nothing and of something that may be infinite in rows that see no key."""
    return replace(zero, zeroed=frozenset(), finite=False)


def hide_of(of: Candidate, term: Term, visible: bool) -> Hide | None:
    hides = of.logits.hides if of.logits else ()
    return next((hide for hide in hides if hide.predicate == term and hide.visible is visible), None)
