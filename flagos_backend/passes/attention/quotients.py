"""Attentions that weigh the values with e and divide by its sum l after that: what is made of the product on the way to
the output, and of the output's gradient on the way back. Arrays over rows and the values' channel, where recognize.py
has those over rows and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from flagos_backend.ir.attributes import DimensionsAttributes, DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.labels import (
    Labels,
    dims_of,
    dot_operand_labels,
    element_type_of,
    moved,
    peel,
    relabel,
    same_value,
    scalar_of,
)
from flagos_backend.passes.attention.symbols import (
    Candidate,
    Contraction,
    Polynomial,
    Powers,
    Symbol,
    Term,
    Weighted,
    polynomial,
)


class Quotients:
    """Of one computation, beside the ``symbols`` that its recognizer finds."""

    def __init__(self, symbols: Mapping[Instruction, Symbol]) -> None:
        self._symbols = symbols
        self._found: dict[Instruction, Weighted] = {}

    def start(self, symbol: Polynomial, contraction: Contraction) -> None:
        """A product of e with an array: the values, if it is divided by l."""
        of = symbol.of
        if of.weighted is None and not (symbol.zeroed or symbol.partly or symbol.fully_masked_zero):
            of.weighted, of.keeps_fully_masked = contraction, True
            of.keeps_weights |= of.logits is not None and bool(of.logits.hides)
            self._found[contraction.dot] = Weighted(of, contraction.labels_of_result, is_product=True)

    def note(self, instruction: Instruction) -> None:
        """Looks at an instruction after the recognizer has."""
        rule = _RULES.get(instruction.opcode)
        found = rule(self, instruction) if rule is not None else None
        if found is None:
            return
        self._found[instruction] = found
        of = found.of
        of.members[instruction] = None
        if found == Weighted(of, found.labels, 1.0, -1, is_product=True) and of.output is None:
            of.output, of.quotient = of.weighted, Term(instruction, found.labels)

    def _look(self, instruction: Instruction) -> Weighted | None:
        """Powers of l may stand before the product that says what the values are."""
        found = self._found.get(instruction)
        if found is None and instruction.opcode in _MOVES:
            found = _RULES[instruction.opcode](self, instruction)
        return found

    # ---- elementwise ----

    def _broadcast(self, instruction: Instruction) -> Weighted | None:
        """A power of l, for all channels."""
        symbol = self._symbols.get(instruction.operands[0])
        if not isinstance(symbol, Polynomial) or symbol.of.weighted is None or len(symbol.terms) != 1:
            return None
        (powers, coefficient) = symbol.terms[0]
        if powers != Powers(row_sum=powers.row_sum) or symbol.zeroed or symbol.partly or symbol.factors:
            return None
        dims, weighted = dims_of(instruction), symbol.of.weighted
        labels: list[int | None] = [_channel_of(symbol.of)] * len(dims)
        for label, dimension in zip(
            symbol.labels, instruction.attributes_as(DimensionsAttributes).dimensions, strict=True
        ):
            labels[dimension] = label
        found = relabel(dims, labels)
        if set(found) - {None} != set(weighted.labels_of_result) - {None}:
            return None
        return Weighted(symbol.of, found, coefficient, powers.row_sum)

    def _move(self, instruction: Instruction) -> Weighted | None:
        found = self._look(instruction.operands[0])
        labels = moved(instruction, found.labels) if found and element_type_of(instruction).is_float else None
        return replace(found, labels=labels) if found and labels is not None else None

    def _negate(self, instruction: Instruction) -> Weighted | None:
        found = self._look(instruction.operands[0])
        return None if found is None else replace(found, coefficient=-found.coefficient)

    def _multiply(self, instruction: Instruction) -> Weighted | None:
        left, right = instruction.operands
        a, b = self._look(left), self._look(right)
        if a is not None and b is not None:
            return _product(a, b)
        if a is not None:
            return self._times(a, right)
        return None if b is None else self._times(b, left)

    def _divide(self, instruction: Instruction) -> Weighted | None:
        above, below = instruction.operands
        a, b = self._look(above), self._look(below)
        if b is None:
            scalar = scalar_of(below)
            return replace(a, coefficient=a.coefficient / scalar) if a is not None and scalar else None
        if b.is_product or b.upstream is not None:
            return None
        inverse = replace(b, coefficient=1.0 / b.coefficient, row_sum=-b.row_sum)
        return self._times(inverse, above) if a is None else _product(a, inverse)

    def _times(self, found: Weighted, other: Instruction) -> Weighted | None:
        """Times a number, or an array that is none of the attention's: the gradient of the output, if anything."""
        scalar = scalar_of(other)
        if scalar is not None:
            return replace(found, coefficient=found.coefficient * scalar) if scalar else None
        symbol = self._symbols.get(other)
        if found.upstream is not None or (symbol is not None and symbol.of is found.of):
            return None
        array, labels = peel(other, found.labels, exact=True)
        coefficient = found.coefficient
        while array.opcode is Opcode.NEGATE:
            array, labels = peel(array.operands[0], labels, exact=True)
            coefficient = -coefficient
        return replace(found, coefficient=coefficient, upstream=Term(array, labels))

    # ---- what the recognizer asks ----

    def row_dot(self, reduce: Instruction) -> Polynomial | None:
        """The sum of an array over the channel, where that is r times a power of l: the output's gradient times the
        output is the weights' gradient times the weights."""
        found = self._found.get(reduce.operands[0])
        if found is None or found.upstream is None or not found.is_product or scalar_of(reduce.operands[1]) != 0:
            return None
        reduced = reduce.attributes_as(DimensionsAttributes).dimensions
        if {found.labels[d] for d in reduced} - {None} != {_channel_of(found.of)}:
            return None
        labels = tuple(label for d, label in enumerate(found.labels) if d not in reduced)
        powers = Powers(row_sum=found.row_sum + 1, row_dot=1)
        return replace(polynomial(found.of, labels, {powers: found.coefficient}), upstream=found.upstream)

    def gradient(self, dot: Instruction) -> Polynomial | None:
        """The product of the output's gradient, times a power of l, with the values."""
        for side, operand in enumerate(dot.operands):
            found = self._found.get(operand)
            if found is not None and found.upstream is not None and not found.is_product:
                return self._gradient(dot, side, found, found.upstream)
        return None

    @staticmethod
    def _gradient(dot: Instruction, side: int, found: Weighted, upstream: Term) -> Polynomial | None:
        of, a, other = found.of, dot.attributes_as(DotAttributes), dot.operands[1 - side]
        batches, contracting = (a.lhs_batch, a.rhs_batch), (a.lhs_contracting, a.rhs_contracting)
        contracted = [found.labels[d] for d in contracting[side]]
        mine = [label for d, label in enumerate(found.labels) if d not in batches[side] and d not in contracting[side]]
        free = [d for d in range(len(dims_of(other))) if d not in batches[1 - side] and d not in contracting[1 - side]]
        theirs = relabel([dims_of(other)[d] for d in free], [of.axis] * len(free))
        batch = [found.labels[d] for d in batches[side]]
        labels = tuple(batch + (mine + list(theirs) if side == 0 else list(theirs) + mine))
        values = dot_operand_labels(dot, labels, contracted)[1 - side]
        assert of.weighted is not None
        if not same_value(other, values, of.weighted.other, of.weighted.labels):
            return None
        term = Term(dot, labels)
        if (of.product_gradient or term) != term:
            return None
        of.product_gradient, of.upstream = term, upstream
        powers = Powers(gradient=1, row_sum=found.row_sum)
        return replace(polynomial(of, labels, {powers: found.coefficient}), upstream=upstream)

    def with_upstream(self, symbol: Polynomial, other: Instruction, labels: Labels) -> tuple[Polynomial, Term] | None:
        """``symbol`` times the power of l in ``other``, and the output's gradient in that: of a product of them. The
        channel is another in ``labels``, which are those of ``other``, than here."""
        found = self._found.get(other)
        if found is None or found.of is not symbol.of or found.upstream is None or found.is_product:
            return None
        channel = _channel_of(found.of)
        known = {label for label in symbol.of.labels if label is not None}
        if found.labels != tuple(label if label is None or label in known else channel for label in labels):
            return None
        power = Powers(row_sum=found.row_sum)
        terms = tuple((powers.times(power), c * found.coefficient) for powers, c in symbol.terms)
        return replace(symbol, terms=terms), found.upstream


def _product(a: Weighted, b: Weighted) -> Weighted | None:
    if a.of is not b.of or a.labels != b.labels or (a.is_product and b.is_product) or (a.upstream and b.upstream):
        return None
    upstream = a.upstream or b.upstream
    is_product = a.is_product or b.is_product
    return Weighted(a.of, a.labels, a.coefficient * b.coefficient, a.row_sum + b.row_sum, is_product, upstream)


def upstream_of(of: Candidate, gradient: Term) -> Term | None:
    """The gradient of the output, which makes that of the weights with the values; None where ``gradient`` is another
    product."""
    dot, weighted = gradient.instruction, of.weighted
    assert weighted is not None
    dimensions = dot.attributes_as(DotAttributes).lhs_contracting
    sizes = [dims_of(dot.operands[0])[d] for d in dimensions]
    sides = dot_operand_labels(dot, gradient.labels, relabel(sizes, [_channel_of(of)] * len(sizes)))
    for side in (0, 1):
        if same_value(dot.operands[side], sides[side], weighted.other, weighted.labels):
            return Term(*peel(dot.operands[1 - side], sides[1 - side], exact=True))
    return None


def _channel_of(of: Candidate) -> int | None:
    """The values' channel: what values weighted with e have a dimension for and weights have not."""
    labels = () if of.weighted is None else of.weighted.labels_of_result
    return next((label for label in labels if label is not None and label not in of.labels), None)


_MOVES = frozenset({Opcode.BROADCAST, Opcode.CONVERT, Opcode.COPY, Opcode.RESHAPE, Opcode.TRANSPOSE})
_RULES: dict[Opcode, Callable[[Quotients, Instruction], Weighted | None]] = {
    Opcode.BROADCAST: Quotients._broadcast,
    Opcode.CONVERT: Quotients._move,
    Opcode.COPY: Quotients._move,
    Opcode.DIVIDE: Quotients._divide,
    Opcode.MULTIPLY: Quotients._multiply,
    Opcode.NEGATE: Quotients._negate,
    Opcode.RESHAPE: Quotients._move,
    Opcode.TRANSPOSE: Quotients._move,
}
