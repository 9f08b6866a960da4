"""Walks a computation once and says what its values are inside an attention, if anything: the heart of the match.

Each instruction is looked at with the symbols of its operands (symbols.py); what has no meaning gets none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from flagos_backend.ir.attributes import DimensionsAttributes, DotAttributes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.algebra import (
    added,
    as_polynomial,
    inverse,
    multiplied,
    number,
    scaled,
    scaled_logits,
    with_labels,
)
from flagos_backend.passes.attention.breaks import note_break
from flagos_backend.passes.attention.fully_masked_rows import of_whole_row
from flagos_backend.passes.attention.labels import (
    Labels,
    dims_of,
    dot_operand_labels,
    element_type_of,
    moved,
    peel,
    relabel,
    scalar_of,
)
from flagos_backend.passes.attention.logarithms import (
    infinite_where_hidden,
    less_log_sum,
    shifted,
    with_maximum,
    zeroed_weights,
)
from flagos_backend.passes.attention.quotients import Quotients
from flagos_backend.passes.attention.roles import (
    gradient_of_weights,
    note_gradient_of_factor,
    role,
    times_product,
    with_factor,
    zero_times_anything,
    zero_where_hidden,
)
from flagos_backend.passes.attention.row_tests import bounded, chosen, is_finite, tested, with_epsilon
from flagos_backend.passes.attention.sinks import appended, without_sink
from flagos_backend.passes.attention.symbols import (
    EXPONENTIALS,
    AbsoluteMaximum,
    Candidate,
    Contraction,
    FiniteMaximum,
    FullyMasked,
    Guard,
    Hide,
    Logits,
    LogRowSum,
    Polynomial,
    Powers,
    RowMaximum,
    Shifted,
    Symbol,
    Term,
    Tested,
    polynomial,
)


class Recognizer:
    """The ``symbols`` of one computation. ``candidates``: in order; ``broken``: where logits met something unknown."""

    def __init__(self, computation: Computation) -> None:
        self.candidates: list[Candidate] = []
        self.broken: dict[Instruction, str] = {}
        self.symbols: dict[Instruction, Symbol] = {}
        self._labels = itertools.count()
        self._quotients = Quotients(self.symbols)
        for instruction in computation.instructions:
            symbol = self._symbol(instruction)
            if symbol is not None:
                self.symbols[instruction] = symbol
                symbol.of.members[instruction] = None
            else:
                note_break(self.broken, self.symbols, instruction)
            self._quotients.note(instruction)

    def _symbol(self, instruction: Instruction) -> Symbol | None:
        rule = _RULES.get(instruction.opcode)
        return rule(self, instruction) if rule else None

    # ---- data movement ----

    def move(self, instruction: Instruction) -> Symbol | None:
        symbol = self.symbols.get(instruction.operands[0])
        if symbol is None or element_type_of(instruction).is_float is isinstance(symbol, _PREDICATES):
            return None
        labels = moved(instruction, symbol.labels)
        return None if labels is None else with_labels(symbol, labels)

    def broadcast(self, instruction: Instruction) -> Symbol | None:
        """A row's value repeated along the row again: the one label that is missing."""
        symbol = self.symbols.get(instruction.operands[0])
        if not isinstance(symbol, RowMaximum | LogRowSum | FullyMasked | Polynomial):
            return None
        dims = dims_of(instruction)
        of, dimensions = symbol.of, instruction.attributes_as(DimensionsAttributes).dimensions
        row = of.row
        if row != of.axis and any(dims[d] == of.keys() for d in range(len(dims)) if d not in dimensions):
            row = of.axis  # the sink's column was dropped already
        if row == of.axis and any(dims[d] not in (1, of.keys()) for d in range(len(dims)) if d not in dimensions):
            return None  # for all channels of the values: quotients.py
        labels: list[int | None] = [row] * len(dims)
        for label, dimension in zip(symbol.labels, dimensions, strict=True):
            labels[dimension] = label
        found = relabel(dims, labels)
        if _present(found) != _present(tuple(row if label == of.axis else label for label in of.labels)):
            return None
        return with_labels(symbol, found)

    # ---- sinks ----

    def concatenate(self, instruction: Instruction) -> Symbol | None:
        for place, operand in enumerate(instruction.operands):
            symbol = self.symbols.get(operand)
            if isinstance(symbol, Logits):
                return appended(instruction, symbol, place, next(self._labels))
        return None

    def slice(self, instruction: Instruction) -> Symbol | None:
        symbol = self.symbols.get(instruction.operands[0])
        sink = symbol.of.logits.sink if isinstance(symbol, Polynomial) and symbol.of.logits is not None else None
        labels = without_sink(instruction, symbol.labels, sink) if symbol is not None and sink is not None else None
        if not isinstance(symbol, Polynomial) or sink is None or labels is None:
            return None
        if sink.keys in labels:
            return with_labels(symbol, labels)
        if symbol.gradient_of_sink():
            symbol.of.sink_gradient = symbol.of.sink_gradient or Term(instruction, labels)
        return None

    # ---- reductions and contractions ----

    def reduce(self, instruction: Instruction) -> Symbol | None:
        symbol = self.symbols.get(instruction.operands[0]) if len(instruction.operands) == 2 else None
        opcode = reduced_with(instruction)
        if symbol is None or opcode is None:
            return self._quotients.row_dot(instruction) if opcode is Opcode.ADD else None
        reduced = instruction.attributes_as(DimensionsAttributes).dimensions
        labels = tuple(label for d, label in enumerate(symbol.labels) if d not in reduced)
        axes = [symbol.labels[d] for d in reduced if symbol.labels[d] is not None]
        initial = scalar_of(instruction.operands[1])
        if isinstance(symbol, FullyMasked):
            return of_whole_row(opcode, initial, symbol, labels, axes)
        if opcode is Opcode.MAXIMUM and initial == float("-inf") and len(axes) == 1:
            if isinstance(symbol, Logits) and symbol.sink is not None and axes != [symbol.sink.both]:
                joined = instruction.operands[0]
                self.broken[joined] = f"{joined.opcode} %{joined.name} joins logits along another dimension"
                return None
            if isinstance(symbol, Logits):
                return self._start_softmax(symbol, labels, axes[0])
            if isinstance(symbol, Shifted) and not symbol.less_log_sum and axes == [symbol.of.row]:
                return RowMaximum(symbol.of, labels, symbol)
        if isinstance(symbol, Polynomial) and opcode is Opcode.MAXIMUM and symbol.of.axis is None:
            other = instruction.operands[0]
            self.broken[other] = f"{other.opcode} %{other.name} is no soft cap of logits, though made with tanh"
        if isinstance(symbol, Polynomial) and opcode is Opcode.ADD and initial == 0 and symbol.times_product:
            note_gradient_of_factor(instruction, symbol, labels)
            return None
        if isinstance(symbol, Polynomial) and opcode is Opcode.ADD and initial == 0:
            return symbol if not axes and labels == symbol.labels else self._row_sum(symbol, labels, axes)
        return None

    @staticmethod
    def _start_softmax(symbol: Logits, labels: Labels, axis: int | None) -> RowMaximum | None:
        of = symbol.of
        if of.logits is not None and (of.logits is not symbol or of.row != axis):
            return None
        if symbol.sink is not None and symbol.sink.both != axis:
            return None
        of.logits, of.axis = symbol, axis if symbol.sink is None else symbol.sink.keys
        return RowMaximum(of, labels, symbol)

    @staticmethod
    def _row_sum(symbol: Polynomial, labels: Labels, axes: list[int | None]) -> Symbol | None:
        if not axes:
            return with_labels(symbol, labels)
        if axes != [symbol.of.row] or symbol.nan_zero:
            return None
        if symbol.zeroed and not symbol.partly and symbol.scale_outside_cap() is not None:
            return None  # zero only if hidden keys have no weight: bias_gradients.py
        if symbol.zeroed or symbol.partly:
            symbol.of.zeroes_weights = True
        terms: dict[Powers, float] = {}
        for powers, coefficient in symbol.terms:
            if powers.exponential != 1 or powers.gradient not in (0, 1) or powers.tanh:
                return None
            # sum of e is l; sum of g·e is l·r
            row = Powers(0, powers.row_sum + 1, 0, powers.row_dot + powers.gradient)
            terms[row] = terms.get(row, 0.0) + coefficient
        least = 0.0 if symbol.finite or symbol.zeroed or symbol.partly else 1.0
        row_sum = replace(polynomial(symbol.of, labels, terms, finite=symbol.finite), least=least)
        return replace(
            row_sum, factors=symbol.factors, upstream=symbol.upstream, fully_masked_zero=symbol.fully_masked_zero
        )

    def dot(self, instruction: Instruction) -> Symbol | None:
        for side, operand in enumerate(instruction.operands):
            symbol = self.symbols.get(operand)
            if isinstance(symbol, Polynomial) and self._contract(instruction, side, symbol):
                return None
        return self._quotients.gradient(instruction) or self._start_candidate(instruction)

    def _contract(self, dot: Instruction, side: int, symbol: Polynomial) -> bool:
        """Files a product of weights or of the logits' gradient with another array; False when it is none."""
        of, a = symbol.of, dot.attributes_as(DotAttributes)
        if of.row != of.axis and of.row in symbol.labels:
            return False  # a product with the sink's weight, too
        batches, contracting = (a.lhs_batch, a.rhs_batch), (a.lhs_contracting, a.rhs_contracting)
        contracted = [symbol.labels[d] for d in contracting[side]]
        mine = [label for d, label in enumerate(symbol.labels) if d not in batches[side] and d not in contracting[side]]
        other = dot.operands[1 - side]
        free = [d for d in range(len(dims_of(other))) if d not in batches[1 - side] and d not in contracting[1 - side]]
        channel = next(self._labels)
        theirs = relabel([dims_of(other)[d] for d in free], [channel] * len(free))
        if theirs.count(channel) != 1:
            return False
        batch = [symbol.labels[d] for d in batches[side]]
        result = tuple(batch + (mine + list(theirs) if side == 0 else list(theirs) + mine))
        labels = dot_operand_labels(dot, result, contracted)[1 - side]
        summed = frozenset(label for label in contracted if label is not None)
        found = self._quotients.with_upstream(symbol, other, labels)
        name = role(found[0] if found else symbol, summed)
        contraction = Contraction(dot, other, labels, summed, result)
        if name is None:
            if summed == {of.axis} and symbol.terms == ((EXPONENTIALS, 1.0),) and not symbol.factors:
                self._quotients.start(symbol, contraction)
            return False
        if found is not None:
            contraction = replace(contraction, other=found[1].instruction, labels=found[1].labels)
        if name == "output":
            of.output = of.output or contraction
        else:
            of.gradients.setdefault(name, contraction)
        return True

    def _start_candidate(self, dot: Instruction) -> Logits | None:
        a = dot.attributes_as(DotAttributes)
        if not element_type_of(dot).is_float or 0 in dims_of(dot):
            return None
        labels = relabel(dims_of(dot), [next(self._labels) for _ in dims_of(dot)])
        sizes = [dims_of(dot.operands[0])[d] for d in a.lhs_contracting]
        channel = next(self._labels)
        contracted = relabel(sizes, [channel] * len(sizes))
        if contracted.count(channel) != 1:
            return None
        candidate = Candidate(dot, labels, dot_operand_labels(dot, labels, contracted), channel)
        self.candidates.append(candidate)
        return Logits(candidate, labels)

    # ---- elementwise ----

    def exponential(self, instruction: Instruction) -> Symbol | None:
        symbol = self.symbols.get(instruction.operands[0])
        if not isinstance(symbol, Shifted):
            return None
        if symbol.less_log_sum:
            return zeroed_weights(symbol)
        found = polynomial(symbol.of, symbol.labels, {EXPONENTIALS: 1.0})
        guarded = symbol.of.guard is not Guard.NONE
        return replace(found, finite=guarded, fully_masked_zero=guarded)

    def absolute(self, instruction: Instruction) -> Symbol | None:
        symbol = self.symbols.get(instruction.operands[0])
        if isinstance(symbol, RowMaximum):
            return AbsoluteMaximum(symbol.of, symbol.labels)
        return symbol if isinstance(symbol, Polynomial) and symbol.is_row_sum else None

    def logarithm(self, instruction: Instruction) -> Symbol | None:
        symbol = self.symbols.get(instruction.operands[0])
        is_sum = isinstance(symbol, Polynomial) and symbol.is_row_sum
        return LogRowSum(symbol.of, symbol.labels) if symbol is not None and is_sum else None

    def finite(self, instruction: Instruction) -> Symbol | None:
        return is_finite(self.symbols.get(instruction.operands[0]))

    def tanh(self, instruction: Instruction) -> Symbol | None:
        """A soft cap, before anything is added or hidden."""
        symbol = self.symbols.get(instruction.operands[0])
        if not isinstance(symbol, Logits) or symbol.cap is not None or not symbol.is_product:
            return None
        return replace(symbol, cap=1.0)

    def negate(self, instruction: Instruction) -> Symbol | None:
        symbol = self.symbols.get(instruction.operands[0])
        if isinstance(symbol, Logits):
            return scaled_logits(symbol, -1.0)
        return scaled(symbol, -1.0) if isinstance(symbol, Polynomial) else None

    def maximum(self, instruction: Instruction) -> Symbol | None:
        for operand, other in _both_ways(instruction):
            symbol = self.symbols.get(operand)
            number = scalar_of(other)
            if isinstance(symbol, RowMaximum) and number == float("-inf"):
                return symbol
            if isinstance(symbol, Polynomial) and number is not None:
                return bounded(symbol, number, instruction)
        return None

    def add(self, instruction: Instruction) -> Symbol | None:
        found = self._sum(instruction, 1.0)
        if found is not None:
            return found
        for operand, other in _both_ways(instruction):
            symbol, beside = self.symbols.get(operand), self.symbols.get(other)
            if isinstance(symbol, Logits) and (beside is None or beside.of is not symbol.of):
                return self._with_bias(symbol, other)
            if isinstance(symbol, Polynomial) and (number_beside := scalar_of(other)) is not None:
                return with_epsilon(symbol, number_beside, instruction)
            if isinstance(symbol, LogRowSum) and isinstance(beside, RowMaximum):
                return with_maximum(symbol, beside)
        return None

    def subtract(self, instruction: Instruction) -> Symbol | None:
        a, b = (self.symbols.get(operand) for operand in instruction.operands)
        if isinstance(a, Polynomial) or isinstance(b, Polynomial):
            return self._sum(instruction, -1.0)
        capped = as_polynomial(b)
        if capped is not None and (one := number(capped, instruction.operands[0])) is not None:
            return added(one, capped, -1.0)
        if isinstance(a, Logits) and isinstance(b, RowMaximum):
            return shifted(a, b)
        if isinstance(a, Shifted) and isinstance(b, RowMaximum) and isinstance(b.logits, Shifted):
            return a if a.of is b.of and a.labels == b.labels else None  # it is zero, or NaN as they are
        if isinstance(a, Shifted | Logits) and isinstance(b, LogRowSum) and b.of is a.of:
            return less_log_sum(a, b)
        if isinstance(a, Logits) and (b is None or b.of is not a.of):
            return self._with_bias(a, instruction.operands[1], -1.0)
        return None

    def _sum(self, instruction: Instruction, sign: float) -> Polynomial | None:
        """Sum or difference of polynomials; one side may be the gradient of the weights, a number or capped logits."""
        left, right = instruction.operands
        a, b = self.symbols.get(left), self.symbols.get(right)
        if isinstance(b, Polynomial):
            a = as_polynomial(a) or number(b, left) or gradient_of_weights(b, left)
        elif isinstance(a, Polynomial):
            b = as_polynomial(b) or number(a, right) or gradient_of_weights(a, right)
        return added(a, b, sign) if isinstance(a, Polynomial) and isinstance(b, Polynomial) else None

    def multiply(self, instruction: Instruction) -> Symbol | None:
        a, b = (self.symbols.get(operand) for operand in instruction.operands)
        left, right = as_polynomial(a), as_polynomial(b)
        if left is not None and right is not None:
            return multiplied(left, right)
        for symbol in (a, b):
            if isinstance(symbol, Polynomial) and symbol.is_zero:
                return zero_times_anything(symbol)
        for operand, other in _both_ways(instruction):
            symbol, scalar = self.symbols.get(operand), scalar_of(other)
            beside = self.symbols.get(other)
            if isinstance(symbol, Polynomial) and isinstance(beside, Logits) and beside.of is symbol.of:
                return times_product(symbol, beside)
            if isinstance(symbol, Polynomial) and scalar is None:
                return self._with_gradient(symbol, other) or with_factor(symbol, other, divides=False)
            if isinstance(symbol, Polynomial) and scalar is not None:
                return scaled(symbol, scalar)
            if isinstance(symbol, Logits) and scalar is not None:
                return scaled_logits(symbol, scalar)
        for operand, other in _both_ways(instruction):
            symbol = self.symbols.get(operand)
            if isinstance(symbol, Logits) and other not in self.symbols:
                return with_factor(symbol, other, divides=False)
        return None

    def divide(self, instruction: Instruction) -> Symbol | None:
        above, below = instruction.operands
        a, b = self.symbols.get(above), self.symbols.get(below)
        scalar = scalar_of(below)
        if isinstance(a, Polynomial) and a.is_zero:
            return zero_times_anything(a)
        if isinstance(a, Polynomial) and scalar:
            return scaled(a, 1.0 / scalar)
        if isinstance(a, Logits) and scalar:
            return scaled_logits(a, 1.0 / scalar)
        if isinstance(a, Logits | Polynomial) and b is None and scalar is None:
            return with_factor(a, below, divides=True)
        inverted = inverse(b) if isinstance(b, Polynomial) else None
        if inverted is None:
            return None
        if isinstance(a, Polynomial):
            return multiplied(a, inverted)
        one = scalar_of(above)
        return self._with_gradient(inverted, above) if one is None else scaled(inverted, one)

    def select(self, instruction: Instruction) -> Symbol | None:
        predicate, on_true, on_false = instruction.operands
        if dims_of(predicate) != dims_of(instruction):
            return None
        if isinstance(self.symbols.get(predicate), _PREDICATES):
            return chosen(instruction, self.symbols)
        for kept, filled, visible in ((on_true, on_false, True), (on_false, on_true, False)):
            symbol, fill = self.symbols.get(kept), scalar_of(filled)
            if symbol is None or fill is None:
                continue
            term = Term(*peel(predicate, symbol.labels, exact=True, broadcasts=True))
            if isinstance(symbol, Logits) and symbol.sink is None:
                hide = Hide(term, visible, fill)
                return replace(symbol, hides=(*symbol.hides, hide))
            if isinstance(symbol, Polynomial) and fill == 0:
                return zero_where_hidden(symbol, term, visible)
            if isinstance(symbol, Shifted) and symbol.less_log_sum and fill == float("-inf"):
                return infinite_where_hidden(symbol, term, visible)
        return None

    def compare(self, instruction: Instruction) -> Symbol | None:
        return tested(instruction, self.symbols)

    @staticmethod
    def _with_bias(symbol: Logits, other: Instruction, factor: float = 1.0) -> Logits | None:
        if symbol.sink is not None:
            return None
        if symbol.hides and any(hide.fill != float("-inf") for hide in symbol.hides):
            return None  # a bias on top of a finite fill changes rows that see no key
        term = Term(*peel(other, symbol.labels, exact=True, broadcasts=True), factor)
        return replace(symbol, biases=(*symbol.biases, term))

    def _with_gradient(self, symbol: Polynomial, other: Instruction) -> Polynomial | None:
        gradient = gradient_of_weights(symbol, other)
        return None if gradient is None else multiplied(symbol, gradient)


def reduced_with(instruction: Instruction) -> Opcode | None:
    """The operation that a reduce of one array combines with, when it is one on its two parameters."""
    callee = instruction.called[0]
    plain = set(callee.root.operands) == set(callee.parameters) and len(callee.parameters) == 2
    return callee.root.opcode if plain else None


def _both_ways(instruction: Instruction) -> tuple[tuple[Instruction, Instruction], tuple[Instruction, Instruction]]:
    a, b = instruction.operands
    return (a, b), (b, a)


def _present(labels: Labels) -> list[int]:
    return sorted(label for label in labels if label is not None)


_PREDICATES = FullyMasked | FiniteMaximum | Tested
_RULES: dict[Opcode, Callable[[Recognizer, Instruction], Symbol | None]] = {
    Opcode.ABS: Recognizer.absolute,
    Opcode.ADD: Recognizer.add,
    Opcode.BROADCAST: Recognizer.broadcast,
    Opcode.COMPARE: Recognizer.compare,
    Opcode.CONCATENATE: Recognizer.concatenate,
    Opcode.CONVERT: Recognizer.move,
    Opcode.COPY: Recognizer.move,
    Opcode.DIVIDE: Recognizer.divide,
    Opcode.DOT: Recognizer.dot,
    Opcode.EXP: Recognizer.exponential,
    Opcode.IS_FINITE: Recognizer.finite,
    Opcode.LOG: Recognizer.logarithm,
    Opcode.MAXIMUM: Recognizer.maximum,
    Opcode.MULTIPLY: Recognizer.multiply,
    Opcode.NEGATE: Recognizer.negate,
    Opcode.REDUCE: Recognizer.reduce,
    Opcode.RESHAPE: Recognizer.move,
    Opcode.SELECT: Recognizer.select,
    Opcode.SLICE: Recognizer.slice,
    Opcode.SUBTRACT: Recognizer.subtract,
    Opcode.TANH: Recognizer.tanh,
    Opcode.TRANSPOSE: Recognizer.move,
}
