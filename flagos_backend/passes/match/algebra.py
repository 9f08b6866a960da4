"""Arithmetic of what recognize.py knows: logits that are scaled, polynomials that are added and multiplied."""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.ir.hlo import Instruction
from flagos_backend.passes.match.labels import Labels, scalar_of
from flagos_backend.passes.match.symbols import Logits, Polynomial, Powers, Shifted, Symbol, polynomial


def alike(a: Logits, b: Logits | Shifted) -> bool:
    """The same logits, in whatever arrangement."""
    return replace(a, labels=b.labels) == b


def with_labels(symbol: Symbol, labels: Labels) -> Symbol:
    return replace(symbol, labels=labels)


def as_polynomial(symbol: Symbol | None) -> Polynomial | None:
    """Capped logits, which tanh's derivative is made of, are a polynomial, too."""
    if isinstance(symbol, Logits) and symbol.cap is not None and symbol.is_product:
        return polynomial(symbol.of, symbol.labels, {Powers(tanh=1): symbol.cap})
    return symbol if isinstance(symbol, Polynomial) else None


def number(beside: Polynomial, other: Instruction) -> Polynomial | None:
    """The number that ``other`` is everywhere, ``beside`` a polynomial of tanh."""
    value = scalar_of(other)
    if value is None or any(powers != Powers(tanh=powers.tanh) for powers, _ in beside.terms):
        return None
    return polynomial(beside.of, beside.labels, {Powers(): value})


def scaled(symbol: Polynomial, factor: float) -> Polynomial | None:
    if factor == 0:
        return None
    terms = {powers: coefficient * factor for powers, coefficient in symbol.terms}
    return polynomial(symbol.of, symbol.labels, terms, symbol.zeroed)


def scaled_logits(symbol: Logits, factor: float) -> Logits | None:
    if symbol.sink is not None or factor == 0:
        return None
    hides = tuple(replace(hide, fill=hide.fill * factor) for hide in symbol.hides)
    biases = tuple(replace(term, factor=term.factor * factor) for term in symbol.biases)
    if symbol.cap is not None:
        return replace(symbol, cap=symbol.cap * factor, biases=biases, hides=hides)
    return replace(symbol, scale=symbol.scale * factor, biases=biases, hides=hides)


def added(a: Polynomial, b: Polynomial, sign: float) -> Polynomial | None:
    if a.of is b.of and a.labels == b.labels and b.is_zero:
        return a
    if a.of is b.of and a.labels == b.labels and a.is_zero:
        return scaled(b, sign)
    if a.of is not b.of or a.labels != b.labels or a.zeroed != b.zeroed:
        return None
    terms = dict(a.terms)
    for powers, coefficient in b.terms:
        terms[powers] = terms.get(powers, 0.0) + sign * coefficient
    return polynomial(a.of, a.labels, terms, a.zeroed)


def multiplied(a: Polynomial, b: Polynomial) -> Polynomial | None:
    if a.of is not b.of or a.labels != b.labels:
        return None
    terms: dict[Powers, float] = {}
    for left, x in a.terms:
        for right, y in b.terms:
            powers = left.times(right)
            terms[powers] = terms.get(powers, 0.0) + x * y
    return polynomial(a.of, a.labels, terms, a.zeroed | b.zeroed)
