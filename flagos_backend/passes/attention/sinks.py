"""A sink: one more logit a row, beside those of the keys, whose weight is dropped after the softmax. The label of the
dimension that holds both is another than that of key positions. For recognize.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from flagos_backend.ir.attributes import DimensionAttributes, PadAttributes, SliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.labels import Labels, dims_of, peel, scalar_of
from flagos_backend.passes.attention.symbols import Candidate, Logits, Sink, Term

T = TypeVar("T")


def appended(concatenate: Instruction, logits: Logits, place: int, both: int) -> Logits | None:
    """``logits``, operand ``place`` of a concatenation, and one more column; ``both`` labels their dimension."""
    dimension = concatenate.attributes_as(DimensionAttributes).dimension
    keys = logits.labels[dimension]
    if len(concatenate.operands) != 2 or logits.sink is not None or keys is None:
        return None
    column = concatenate.operands[1 - place]
    if dims_of(column)[dimension] != 1:
        return None
    labels = _with(logits.labels, dimension, None)
    term = Term(*peel(column, labels, exact=True, broadcasts=True))
    return replace(logits, labels=_with(logits.labels, dimension, both), sink=Sink(term, keys, both, place == 1))


def without_sink(slice_: Instruction, labels: Labels, sink: Sink) -> Labels | None:
    """Labels of a slice of weights: of those of the keys, or of the sink's alone; None for another."""
    if sink.both not in labels:
        return None
    dimension = labels.index(sink.both)
    a, old = slice_.attributes_as(SliceAttributes), dims_of(slice_.operands[0])
    for label, (start, limit) in zip((sink.keys, None), _columns(old[dimension], sink), strict=True):
        if (
            a.starts == _with((0,) * len(old), dimension, start)
            and a.limits == _with(old, dimension, limit)
            and set(a.strides) == {1}
        ):
            return _with(labels, dimension, label)
    return None


def unpadded(of: Candidate, term: Term) -> Term:
    """The gradient of the keys' weights, of that of all, which is zero for the sink's."""
    sink = of.logits.sink if of.logits is not None else None
    if sink is None or sink.both not in term.labels or term.instruction.opcode is not Opcode.PAD:
        return term
    dimension = term.labels.index(sink.both)
    a, nothing = term.instruction.attributes_as(PadAttributes), (0,) * len(term.labels)
    one = _with(nothing, dimension, 1)
    wanted = PadAttributes(one if sink.first else nothing, nothing if sink.first else one, nothing)
    if a != wanted or scalar_of(term.instruction.operands[1]) != 0:
        return term
    return Term(term.instruction.operands[0], _with(term.labels, dimension, sink.keys))


def _columns(size: int, sink: Sink) -> tuple[tuple[int, int], tuple[int, int]]:
    """Those of the keys, and that of the sink."""
    return ((1, size), (0, 1)) if sink.first else ((0, size - 1), (size - 1, size))


def _with(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
