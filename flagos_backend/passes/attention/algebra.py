"""Arithmetic of what recognize.py knows: logits that are scaled, polynomials that are added and multiplied."""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.ir.hlo import Instruction
from flagos_backend.passes.attention.labels import Labels, scalar_of
from flagos_backend.passes.attention.symbols import (
    Factor,
    Hide,
    Logits,
    Polynomial,
    Powers,
    Shifted,
    Symbol,
    polynomial,
    terms_of,
)

# Below it a number of f32 may be flushed to zero, or its inverse be infinite.
_LEAST_NORMAL = 2.0**-126


def alike(a: Logits, b: Logits | Shifted) -> bool:
    """The same logits, in whatever arrangement."""
    return replace(a, labels=b.labels) == b


def with_labels(symbol: Symbol, labels: Labels) -> Symbol:
    return replace(symbol, labels=labels)


def as_polynomial(symbol: Symbol | None) -> Polynomial | None:
    """Capped logits, which tanh's derivative is made of, are a polynomial, too."""
    if isinstance(symbol, Logits) and symbol.cap is not None and symbol.is_product:
        tanh = polynomial(symbol.of, symbol.labels, {Powers(tanh=1): symbol.cap}, finite=True)
        return replace(tanh, fully_masked_zero=True)
    return symbol if isinstance(symbol, Polynomial) else None


def number(beside: Polynomial, other: Instruction) -> Polynomial | None:
    """The number that ``other`` is everywhere, ``beside`` a polynomial of tanh."""
    value = scalar_of(other)
    if value is None or any(powers != Powers(tanh=powers.tanh) for powers, _ in beside.terms):
        return None
    return replace(polynomial(beside.of, beside.labels, {Powers(): value}, finite=True), fully_masked_zero=True)


def inverse(symbol: Polynomial) -> Polynomial | None:
    """One divided by it; None where that is no monomial."""
    if len(symbol.terms) != 1 or symbol.zeroed or symbol.partly or symbol.factors or symbol.nan_zero:
        return None
    powers, coefficient = symbol.terms[0]
    # What never vanishes is divided by as any number is.
    is_number = powers == Powers(row_sum=powers.row_sum) and symbol.least > 0
    found = polynomial(
        symbol.of, symbol.labels, {powers.inverse(): 1.0 / coefficient}, finite=symbol.finite and is_number
    )
    return replace(found, fully_masked_zero=symbol.fully_masked_zero and is_number)


def scaled(symbol: Polynomial, factor: float) -> Polynomial | None:
    if factor == 0:
        return None
    return replace(symbol, terms=terms_of({powers: coefficient * factor for powers, coefficient in symbol.terms}))


def scaled_logits(symbol: Logits, factor: float) -> Logits | None:
    if symbol.sink is not None or factor == 0:
        return None
    hides = tuple(replace(hide, fill=hide.fill * factor) for hide in symbol.hides)
    biases = tuple(replace(term, factor=term.factor * factor) for term in symbol.biases)
    if symbol.cap is not None:
        return replace(symbol, cap=symbol.cap * factor, biases=biases, hides=hides)
    return replace(symbol, scale=symbol.scale * factor, biases=biases, hides=hides)


def added(a: Polynomial, b: Polynomial, sign: float) -> Polynomial | None:
    if a.of is not b.of or a.labels != b.labels or not (a.factors == b.factors or a.is_zero or b.is_zero):
        return None
    if not _same_upstream(a, b) or a.nan_zero or b.nan_zero:
        return None
    terms = dict(a.terms)
    for powers, coefficient in b.terms:
        terms[powers] = terms.get(powers, 0.0) + sign * coefficient
    # Where only one of them is zero the sum is the other, unless that is nothing anyway.
    differ = (frozenset() if b.is_zero else b.zeroed - a.zeroed) | (frozenset() if a.is_zero else a.zeroed - b.zeroed)
    factors = b.factors if a.is_zero else a.factors
    return _combined(a, b, terms, a.zeroed & b.zeroed, a.partly | b.partly | differ, factors)


def multiplied(a: Polynomial, b: Polynomial) -> Polynomial | None:
    if a.of is not b.of or a.labels != b.labels or not _same_upstream(a, b) or a.nan_zero or b.nan_zero:
        return None
    least = a.least * b.least
    if 0 < least < _LEAST_NORMAL:
        return None
    terms: dict[Powers, float] = {}
    for left, x in a.terms:
        for right, y in b.terms:
            powers = left.times(right)
            terms[powers] = terms.get(powers, 0.0) + x * y
    # Zero times what may be infinite is not zero.
    zeroed = (a.zeroed if b.finite else frozenset()) | (b.zeroed if a.finite else frozenset())
    found = _combined(a, b, terms, zeroed, a.partly | b.partly | a.zeroed | b.zeroed, a.factors + b.factors)
    return None if found is None else replace(found, least=least)


def _same_upstream(a: Polynomial, b: Polynomial) -> bool:
    return a.upstream is None or b.upstream is None or a.upstream == b.upstream


def _combined(
    a: Polynomial,
    b: Polynomial,
    terms: dict[Powers, float],
    zeroed: frozenset[Hide],
    partly: frozenset[Hide],
    factors: tuple[Factor, ...],
) -> Polynomial | None:
    """None where monomials cancel, but not at all hidden keys: they would be forgotten."""
    partly -= zeroed
    if partly and 0.0 in terms.values():
        return None
    upstream = a.upstream or b.upstream
    finite, fully_masked_zero = a.finite and b.finite, a.fully_masked_zero and b.fully_masked_zero
    return Polynomial(a.of, a.labels, terms_of(terms), zeroed, partly, finite, factors, upstream, fully_masked_zero)
