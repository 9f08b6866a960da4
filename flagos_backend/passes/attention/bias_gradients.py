"""Gradients of what is added to logits: those of the logits, summed over what shares it. Who asks for one is seen only
when a whole computation was recognized: what reads a gradient of logits and is no part of its attention. For match.py.

What is the same for all keys has none: with weights w and their gradient g a row of the gradient of the logits is
w (g - sum w g), whose sum is sum w g - sum w g, as weights add up to one. A program computes that as a number about as
large as its rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.groups import ARRANGEMENTS, Users, labels_of_sum
from flagos_backend.passes.attention.labels import element_type_of, moved
from flagos_backend.passes.attention.recognize import Recognizer
from flagos_backend.passes.attention.roles import scale_of_bias_gradient
from flagos_backend.passes.attention.symbols import BiasGradient, Cancelled, Candidate, Polynomial


def note_gradients_of_biases(computation: Computation, recognizer: Recognizer, users: Users) -> None:
    """Fills in ``bias_gradients`` of the candidates whose logits have a bias."""
    parts: dict[Candidate, set[Instruction]] = {}
    for instruction in computation.instructions:
        symbol = recognizer.symbols.get(instruction)
        if not isinstance(symbol, Polynomial) or symbol.of.logits is None or not symbol.of.logits.biases:
            continue
        of = symbol.of
        if of not in parts:
            parts[of] = {*of.members, *_results(of)}
        asking = [user for user in users.get(instruction, ()) if user not in parts[of]]
        if instruction is computation.root:
            asking.append(instruction)
        if asking and symbol.is_zero and not {of.axis, of.row} & set(symbol.labels):
            of.cancelled.append(Cancelled(instruction, symbol.labels, seen_alone=False))
        of.cancelled += _summed_over_keys(symbol, asking)
        scale = scale_of_bias_gradient(symbol) if asking else None
        if scale is not None:
            of.bias_gradients += _asked_for(BiasGradient(instruction, symbol.labels, scale), asking, of, users)


def _results(of: Candidate) -> Iterator[Instruction]:
    """What is made of the gradient of the logits otherwise."""
    for contraction in of.gradients.values():
        yield contraction.dot
    for factor in of.factor_gradients:
        yield factor.instruction
    if of.sink_gradient is not None:
        yield of.sink_gradient.instruction


def _summed_over_keys(symbol: Polynomial, asking: list[Instruction]) -> Iterator[Cancelled]:
    """Sums of the gradient of logits that the recognizer has no meaning for: of all keys, or of those that are seen."""
    of, sets_to_zero = symbol.of, bool(symbol.zeroed | symbol.partly)
    if symbol.scale_outside_cap() is None or of.axis not in symbol.labels or of.row != of.axis:
        return  # beside a sink keys have what it lacks
    for reduce in asking:
        labels = labels_of_sum(reduce, symbol.labels) if reduce.opcode is Opcode.REDUCE else None
        if labels is None or of.axis in labels:
            continue
        if not sets_to_zero or scale_of_bias_gradient(symbol) is not None:
            yield Cancelled(reduce, labels, seen_alone=sets_to_zero)


def _asked_for(whole: BiasGradient, asking: list[Instruction], of: Candidate, users: Users) -> Iterator[BiasGradient]:
    """The sums of it; or itself where anything else asks for it and a bias has all of its dimensions, as otherwise the
    calls would make an array that they are to spare."""
    if any(user.opcode is not Opcode.REDUCE or user is whole.instruction for user in asking):
        every = set(whole.labels)
        if of.logits is not None and any(every <= {None, *bias.labels} for bias in of.logits.biases):
            yield whole
        return
    for reduce in asking:
        labels = labels_of_sum(reduce, whole.labels)
        if labels is not None and of.axis in labels:
            yield _summed_on(replace(whole, instruction=reduce, labels=labels), of, users)


def _summed_on(found: BiasGradient, of: Candidate, users: Users) -> BiasGradient:
    """After the sums, the rearrangements and the rounding that alone use it: the kernel writes it like that."""
    while len(users[found.instruction]) == 1:
        (user,) = users[found.instruction]
        labels = None
        if user.opcode is Opcode.REDUCE:
            labels = labels_of_sum(user, found.labels)
        elif user.opcode in ARRANGEMENTS and element_type_of(user).is_float:
            labels = moved(user, found.labels)
        if labels is None or of.axis not in labels:
            break
        found = replace(found, instruction=user, labels=labels)
    return found
