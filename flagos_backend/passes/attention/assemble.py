"""From a recognized candidate (recognize.py) to the attributes and operands of its custom calls, or why not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.custom_calls.attention import Attention
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import DotAlgorithm, Opcode, Precision
from flagos_backend.ir.types import ElementType
from flagos_backend.passes.attention.bands import ALL, Band, band_of_matrix, split, split_conjunction, two_valued
from flagos_backend.passes.attention.labels import (
    Labels,
    dims_of,
    dot_operand_labels,
    element_type_of,
    peel,
    relabel,
    same_value,
    scalar_of,
)
from flagos_backend.passes.attention.symbols import (
    BiasGradient,
    Cancelled,
    Candidate,
    Contraction,
    Factor,
    FactorGradient,
    Guard,
    Hide,
    Logits,
    Term,
)
from flagos_backend.passes.attention.values_gradients import output_of_no_values

_BATCH_LETTERS, _GROUP_LETTERS = "bhcijkln", "gfuvw"
# A fill this low gives a weight of exactly zero beside any logit that a program can mean.
LOW_FILL = -9.9e8  # what bf16 makes of -1e9 is above that
# Instructions that a bias is looked through for such a number; behind more there may be one.
_MAX_LOOKED_AT = 200
# What hides a logit in f16, and no less than any.
LOWEST_F16 = -65504.0
# Beside the fills above a logit of its type is rounded away; beside this one in f64 too.
_ABSORBS_F64 = -1e30


class NearMissError(Exception):
    """Why something that looks like an attention is not taken for one; the text goes to explain."""


@dataclass(frozen=True, slots=True)
class Result:
    """An array of the program that a call computes instead."""

    instruction: Instruction
    labels: Labels


@dataclass(frozen=True, slots=True)
class Matched:
    """What the calls need. ``bias`` and ``masks``: operands still to be combined; ``letters``: of every label."""

    of: Candidate
    attention: Attention
    query: Instruction
    key: Instruction
    value: Instruction
    biases: tuple[Term, ...]
    sink: Term | None
    masks: tuple[tuple[Term, bool], ...]
    letters: dict[int, str]
    output: Contraction
    zeroes_rows: bool  # of which no key is seen
    zeroes_fully_masked: bool  # rows of which every logit is -infinity
    zeroes_nan: bool  # rows whose weights are NaN
    factors: tuple[Factor, ...]  # of the queries

    @property
    def is_only_backward(self) -> bool:
        """Whether the program has no use for the output itself."""
        return self.of.output is None

    @property
    def result(self) -> Result:
        """The output, of a program that has a use for it."""
        if self.of.quotient is not None:
            return Result(self.of.quotient.instruction, self.of.quotient.labels)
        return Result(self.output.dot, self.output.labels_of_result)

    def dims(self, labels: Labels) -> str:
        return dims_text(self.letters, labels)


def assemble(candidate: Candidate) -> Matched:
    """Raises NearMissError."""
    if candidate.logits is None:
        raise NearMissError("there is no softmax")
    of = replace(candidate, logits=_with_hides_for_biases(candidate, candidate.logits))
    assert of.axis is not None and of.logits is not None
    if of.output is None and of.weighs_exponentials:
        raise NearMissError(_hinted(of, "values are weighted before the weights are divided by their sum"))
    output = of.output or _output_of_gradient(of)
    side = 0 if of.axis in of.sides[0] else 1
    key, query = of.sides[side], of.sides[1 - side]
    batch = [label for label in key if label is not None and label in query and label != of.channel]
    if set(key) - {None} != {*batch, of.axis, of.channel}:
        raise NearMissError("the key has a dimension besides position and channel that the query lacks")
    queries = [label for label in query if label is not None and label not in batch and label != of.channel]
    position = _position(of, queries)
    groups = [label for label in queries if label != position]
    value_channel = _value_channel(output, batch, of.axis)
    letters = {of.channel: "d", of.axis: "s", value_channel: "e"}
    if position is not None:
        letters[position] = "t"
    letters.update(zip(batch, _BATCH_LETTERS, strict=False))
    letters.update(zip(groups, _GROUP_LETTERS, strict=False))
    band, masks, fill = _hidden(of, position)
    factors = _factors_of_queries(of, query, of.dot, of.dot.operands[1 - side])
    # A row that sees no key is one of -infinity alone, where that is what hides.
    is_fully_masked = of.zeroes_fully_masked and fill == -math.inf
    zeroes_rows = of.zeroes_weights and bool(masks) and not is_fully_masked
    if zeroes_rows:
        fill = _fill_of_zero_rows(of, fill)
    band, biases = _bias_bands(of, position, band, masks)
    if of.adds_maximum and ((masks and math.isfinite(fill)) or any(_may_hide(of, term) for term in biases)):
        raise NearMissError("logsumexp of a row that sees no key has lost the sum beside what hides its keys")
    cap = None if of.logits.cap is None else abs(of.logits.cap)
    if not math.isfinite(of.logits.slope) or (cap is not None and not math.isfinite(cap)):
        raise NearMissError(f"its scale is {of.logits.slope:g}")
    attention = Attention(
        dims_text(letters, query),
        dims_text(letters, key),
        dims_text(letters, output.labels),
        dims_text(letters, output.labels_of_result if of.quotient is None else of.quotient.labels),
        of.logits.slope,
        fill,
        cap,
        upper=band.upper,
        lower=band.lower,
        added=bool(masks) and of.logits.hides != candidate.logits.hides,
        tensor_float=all(_may_round(dot) for dot in (of.dot, output.dot)),
    )
    operands = (of.dot.operands[1 - side], of.dot.operands[side], output.other)
    sink = _sink(of, batch + groups)
    if of.zeroes_fully_masked:
        _check_fully_masked_rows(of, zeroes_rows)
    if of.zeroes_nan and of.logits.sink is not None:
        raise NearMissError("weights that are NaN are set to zero, beside a sink")
    zeroes = (zeroes_rows, of.zeroes_fully_masked, of.zeroes_nan)
    return Matched(of, attention, *operands, biases, sink, masks, letters, output, *zeroes, factors)


def _factors_of_queries(of: Candidate, query: Labels, dot: Instruction, operand: Instruction) -> tuple[Factor, ...]:
    """What the product is multiplied with, its queries can be multiplied with before: in f32, or as roughly as the
    program rounds the product itself. In f16 they may leave the range where the product does not."""
    factors = of.logits.factors if of.logits is not None else ()
    if any(set(factor.term.labels) - {None, *query} for factor in factors):
        raise NearMissError("its logits are multiplied with another number for each key")
    element = element_type_of(operand)
    wide = element in (ElementType.F32, ElementType.F64)
    if factors and not wide and not (element is ElementType.BF16 and element_type_of(dot) is element):
        raise NearMissError(f"its queries of {element.name.lower()} would be rounded with what multiplies its logits")
    return factors


def _fill_of_zero_rows(of: Candidate, fill: float) -> float:
    """What hides where a row that sees no key has weights of zero, as jax.nn.softmax with ``where`` gives it: the calls
    have no such weights, so that calls.py sets the row to zero."""
    assert of.logits is not None
    if of.keeps_weights:
        raise NearMissError("hidden weights are set to zero in one place and not in another")
    if of.logits.sink is not None:
        raise NearMissError("hidden weights are set to zero beside a sink")
    if fill > _highest_fill(of):
        raise NearMissError(f"hidden weights are set to zero, though hidden logits are {fill:g} and count in the sum")
    if math.isfinite(fill) and any(_may_hide(of, term) for term in of.logits.biases):
        raise NearMissError("hidden weights are set to zero, and a bias may hide as much as the mask")
    return -math.inf


def _check_fully_masked_rows(of: Candidate, zeroes_rows: bool) -> None:
    assert of.logits is not None
    what = "weights are set to zero where every logit is -infinity"
    if of.keeps_fully_masked:
        raise NearMissError(f"{what} in one place and not in another")
    if of.logits.sink is not None:
        raise NearMissError(f"{what}, beside a sink")
    if zeroes_rows:
        raise NearMissError(f"{what}, and where a mask hides")


def _hinted(of: Candidate, reason: str) -> str:
    return reason if of.hint is None else f"{reason}: {of.hint}"


def _sink(of: Candidate, heads: list[int]) -> Term | None:
    sink = of.logits.sink if of.logits is not None else None
    if sink is None:
        return None
    if set(sink.term.labels) - {None, *heads}:
        raise NearMissError("its sink is another one for each query")
    return sink.term


def _may_round(dot: Instruction) -> bool:
    """Whether HLO lets a product of f32 be computed from operands rounded to TF32, as XLA does on GPUs."""
    attributes = dot.attributes_as(DotAttributes)
    of_f32 = all(element_type_of(operand) is ElementType.F32 for operand in dot.operands)
    return of_f32 and attributes.precision is Precision.DEFAULT and attributes.algorithm is DotAlgorithm.UNSET


def _output_of_gradient(of: Candidate) -> Contraction:
    """The output, as the gradient's statistics need it, of a program that computes only the gradients (its forward
    pass is elsewhere): the values are the side of the weights' gradient that has key positions."""
    if of.product_gradient is None and "value" in of.gradients:
        return output_of_no_values(of, of.gradients["value"])
    if of.product_gradient is None:
        raise NearMissError(_hinted(of, "no values are weighted by the softmax"))
    dot, labels = of.product_gradient.instruction, of.product_gradient.labels
    channel = _UNSEEN
    sides = dot_operand_labels(dot, labels, _contracted(dot, channel))
    side = 0 if of.axis in sides[0] else 1
    return Contraction(dot, dot.operands[side], sides[side], frozenset((of.axis or 0,)), sides[1 - side])


# Stands for the value's channel where no output dot gave it a label.
_UNSEEN = -1


def _contracted(dot: Instruction, label: int) -> Labels:
    dimensions = dot.attributes_as(DotAttributes).lhs_contracting
    return relabel([dims_of(dot.operands[0])[d] for d in dimensions], [label] * len(dimensions))


def dims_text(letters: dict[int, str], labels: Labels) -> str:
    return "".join("1" if label is None else letters[label] for label in labels)


def sizes_of(of: Candidate) -> dict[int, int]:
    sizes = {}
    for operand, labels in zip(of.dot.operands, of.sides, strict=True):
        sizes.update({label: size for label, size in zip(labels, dims_of(operand), strict=True) if label is not None})
    return sizes


def _position(of: Candidate, queries: list[int]) -> int | None:
    """Which dimension of the query counts positions: the one that a band speaks of, else the longest."""
    assert of.logits is not None and of.axis is not None
    for hide in of.logits.hides:
        for label in queries:
            if not split(hide.predicate, hide.visible, label, of.axis)[0].is_all:
                return label
    sizes = sizes_of(of)
    return max(queries, key=lambda label: sizes[label], default=None)


def _value_channel(output: Contraction, batch: list[int], axis: int) -> int:
    rest = [label for label in output.labels if label is not None and label not in (*batch, axis)]
    missing = [label for label in (*batch, axis) if label not in output.labels]
    if len(rest) != 1 or missing:
        raise NearMissError("the values have other batch dimensions than the keys")
    return rest[0]


def _hidden(of: Candidate, position: int | None) -> tuple[Band, tuple[tuple[Term, bool], ...], float]:
    assert of.logits is not None and of.axis is not None
    hides = of.logits.hides
    fills = {hide.fill for hide in hides}
    if len(fills) > 1:
        raise NearMissError(f"hidden logits have several values: {', '.join(map(str, sorted(fills)))}")
    fill = fills.pop() if fills else -math.inf
    # A row whose visible logits a bias makes as low as the fill sees its hidden keys too.
    beside_low_biases = math.isfinite(fill) and any(_may_hide(of, term) for term in of.logits.biases)
    band, masks = ALL, []
    for hide in hides:
        # Bands are skipped, so hidden weights must be exactly zero, and each row must see a key or be a mask's matter.
        found, rest = split(hide.predicate, hide.visible, position, of.axis)
        if (
            found.is_all
            or fill > _highest_fill(of)
            or beside_low_biases
            or not _sees_keys(of, band.meet(found), position)
        ):
            masks.append((hide.predicate, hide.visible))
        else:
            band = band.meet(found)
            masks += rest
    return band, tuple(masks), fill


def _sees_keys(of: Candidate, band: Band, position: int | None) -> bool:
    """Whether the band alone leaves every query position a key."""
    sizes = sizes_of(of)
    queries = 1 if position is None else sizes[position]
    keys = sizes[of.axis] if of.axis is not None else 1
    first_ok = band.upper is None or band.upper >= 0
    last_ok = band.lower is None or queries - 1 - band.lower <= keys - 1
    not_empty = band.upper is None or band.lower is None or band.upper + band.lower >= 0
    return first_ok and last_ok and not_empty


def _bias_bands(
    of: Candidate, position: int | None, band: Band, masks: tuple[tuple[Term, bool], ...]
) -> tuple[Band, tuple[Term, ...]]:
    """Biases that are zero inside a band and low outside become the band; the others stay."""
    assert of.logits is not None and of.axis is not None
    biases = of.logits.biases
    found = [None if masks else _band_of_bias(of, term, position) for term in biases]
    if any(b is None and _may_hide(of, term) for term, b in zip(biases, found, strict=True)):
        return band, biases  # in a row where both hide all keys, the lower of the two sums counts
    kept = []
    for term, of_bias in zip(biases, found, strict=True):
        if of_bias is None or not _sees_keys(of, band.meet(of_bias), position):
            kept.append(term)
        else:
            band = band.meet(of_bias)
    return band, tuple(kept)


def _with_hides_for_biases(of: Candidate, logits: Logits) -> Logits:
    """A bias that is zero or so low that nothing of a logit is left beside it, as the mask that it is: kernels know the
    rows that see no key of masks alone, and a mask of several parts may be a band and a small array."""
    low = [term for term in logits.biases if _may_hide(of, term)]
    if logits.hides or len(low) != 1:
        return logits
    (bias,) = low
    sign = math.copysign(1.0, bias.factor)
    found = two_valued(bias)
    found = found and found.mapped(lambda value: value * sign)
    # What was scaled after it was added hides as well as before: the logits were scaled with it.
    lowest = _ABSORBS_F64 if element_type_of(of.dot) is ElementType.F64 else _highest_fill(of)
    fill = 0.0 if found is None else min(found.holds, found.fails)
    found = found and found.failing_with(fill)
    if found is None or found.holds != 0 or not fill <= lowest:
        return logits
    fill *= abs(bias.factor)
    if not -math.inf < fill < 0:
        return logits
    predicates = (Term(*peel(t.instruction, t.labels, exact=True, broadcasts=True)) for t, _ in found.terms)
    hides = (Hide(term, visible, fill) for term, (_, visible) in zip(predicates, found.terms, strict=True))
    return replace(logits, biases=tuple(term for term in logits.biases if term is not bias), hides=tuple(hides))


def _may_hide(of: Candidate, bias: Term) -> bool:
    """Whether ``bias`` is made with a number that hides logits. What a caller passes is taken for one that does not."""
    seen, stack = {bias.instruction}, [bias.instruction]
    least = -_highest_fill(of) / max(1.0, abs(bias.factor))
    while stack:
        instruction = stack.pop()
        number = scalar_of(instruction) if instruction.opcode is Opcode.CONSTANT else None
        if (number is not None and abs(number) >= least) or len(seen) > _MAX_LOOKED_AT:
            return True
        new = [operand for operand in instruction.operands if operand not in seen]
        seen.update(new)
        stack += new
    return False


def _band_of_bias(of: Candidate, term: Term, position: int | None) -> Band | None:
    if position is None or of.axis is None:
        return None
    instruction, labels = peel(term.instruction, term.labels, exact=True, broadcasts=True)
    if instruction.opcode is Opcode.CONSTANT:
        array = constant_array(instruction)
        if array is None or array.dtype.kind != "f":
            return None
        visible = array == 0
        is_mask = bool((visible | (array * np.float64(term.factor) <= _highest_fill(of))).all())
        return band_of_matrix(visible, labels, position, of.axis) if is_mask else None
    found = two_valued(Term(instruction, labels))
    found = found and found.mapped(lambda value: value * term.factor)
    if found is None or 0 not in (found.holds, found.fails) or min(found.holds, found.fails) > _highest_fill(of):
        return None
    terms = found.conjuncts(found.holds == 0)
    band, rest = split_conjunction(terms, position, of.axis) if terms is not None else (ALL, [])
    return None if rest or band.is_all else band


def _highest_fill(of: Candidate) -> float:
    """The greatest number that hides a logit."""
    return max(LOW_FILL, LOWEST_F16) if element_type_of(of.dot) is ElementType.F16 else LOW_FILL


@dataclass(frozen=True, slots=True)
class MatchedGradients:
    """Gradients to take from one backward call, by their operand: "query", "key", "value"."""

    output_gradient: Instruction
    output_gradient_labels: Labels
    wanted: dict[str, Result]
    sink: Result | None
    factors: tuple[FactorGradient, ...]
    biases: tuple[BiasGradient, ...]
    cancelled: tuple[Cancelled, ...]


def assemble_gradients(matched: Matched) -> MatchedGradients | None:
    """What the backward call gives; None when the program asks for none. Raises NearMissError."""
    of = matched.of
    if not (of.gradients or of.sink_gradient or of.factor_gradients or of.bias_gradients or of.cancelled):
        return None
    if of.zeroes_nan:
        raise NearMissError("weights that are NaN are set to zero, but not where its gradients need them")
    if of.guard is Guard.INFINITE and "value" in of.gradients and not _is_bounded(of.logits):
        raise NearMissError(
            "its maximum is set to a number where it is infinite, so that weights beside an infinite logit are zero, "
            "which those of the values' gradient are not"
        )
    if any(found.seen_alone for found in of.cancelled):
        _check_that_seen_keys_cancel(of)
    value = of.gradients.get("value")
    if of.product_gradient is not None:
        source, labels = _output_gradient(matched, of.product_gradient)
        if value is not None and not same_value(value.other, _renamed(value, matched), source, labels):
            raise NearMissError("the values' gradient is taken from another array than the weights'")
    elif value is not None:
        source, labels = value.other, _renamed(value, matched)
    else:
        raise NearMissError("there is no gradient of the weights")
    for name, operand, operand_labels in (
        ("query", matched.key, _labels_of_side(of, matched.key)),
        ("key", matched.query, _labels_of_side(of, matched.query)),
    ):
        found = of.gradients.get(name)
        if found is None:
            continue
        theirs = _renamed_channel(found.labels, of.channel, of)
        if not same_value(found.other, theirs, operand, operand_labels):
            raise NearMissError(f"the gradient of the {name} is taken with another array than the attention's")
    channels = {"query": of.channel, "key": of.channel, "value": _channel_label(matched)}
    wanted = {
        name: Result(found.dot, _renamed_channel(found.labels_of_result, channels[name], of))
        for name, found in of.gradients.items()
    }
    sink = of.sink_gradient
    of_sink = None if sink is None else Result(sink.instruction, sink.labels)
    return MatchedGradients(
        source,
        labels,
        wanted,
        of_sink,
        tuple(of.factor_gradients),
        tuple(of.bias_gradients),
        tuple(of.cancelled),
    )


def _is_bounded(logits: Logits | None) -> bool:
    """Whether no logit is +infinity."""
    return logits is not None and logits.cap is not None and not logits.biases and logits.sink is None


def _check_that_seen_keys_cancel(of: Candidate) -> None:
    """The sum of the gradient of logits over the keys that a row sees is zero only if the others have no weight."""
    assert of.logits is not None
    fill = max((hide.fill for hide in of.logits.hides), default=-math.inf)
    what = "the gradient of its logits is summed over the keys that a row sees"
    if fill > _highest_fill(of):
        raise NearMissError(f"{what}, though hidden logits are {fill:g} and have weights")
    if math.isfinite(fill) and any(_may_hide(of, term) for term in of.logits.biases):
        raise NearMissError(f"{what}, and a bias may hide as much as the mask")


def _labels_of_side(of: Candidate, operand: Instruction) -> Labels:
    return of.sides[0] if operand is of.dot.operands[0] else of.sides[1]


def _output_gradient(matched: Matched, gradient: Term) -> tuple[Instruction, Labels]:
    """The operand of the weights' gradient that is not the values."""
    dot, output = gradient.instruction, matched.output
    channel = _channel_label(matched)
    sides = dot_operand_labels(dot, gradient.labels, _contracted(dot, channel))
    for side in (0, 1):
        if same_value(dot.operands[side], sides[side], output.other, output.labels):
            if matched.of.upstream is not None:
                return matched.of.upstream.instruction, matched.of.upstream.labels
            return dot.operands[1 - side], sides[1 - side]
    raise NearMissError("the gradient of the weights is not made with the attention's values")


def _channel_label(matched: Matched) -> int:
    return next(label for label, letter in matched.letters.items() if letter == "e")


def _renamed(contraction: Contraction, matched: Matched) -> Labels:
    """The labels of the output's gradient, its own channel being the values' channel."""
    return _renamed_channel(contraction.labels, _channel_label(matched), matched.of)


def _renamed_channel(labels: Labels, channel: int, of: Candidate) -> Labels:
    """``labels`` of an array beside a gradient, with the one that the product lacks called ``channel``."""
    known = {label for label in of.labels if label is not None}
    return tuple(label if label is None or label in known else channel for label in labels)
