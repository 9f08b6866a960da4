"""The pass: attentions that a module spells out become custom calls; what comes close is reported with the reason.

A match stands only when nothing but the calls needs its array of logits any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flagos_backend.ir.custom_calls.attention import Attention
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.assemble import (
    Matched,
    MatchedGradients,
    NearMissError,
    Result,
    assemble,
    assemble_gradients,
)
from flagos_backend.passes.attention.bias_gradients import note_gradients_of_biases
from flagos_backend.passes.attention.calls import CallBuilder, Replacements
from flagos_backend.passes.attention.groups import arranged, repetition_of, summed
from flagos_backend.passes.attention.labels import untransposed
from flagos_backend.passes.attention.recognize import Recognizer
from flagos_backend.passes.attention.symbols import Candidate
from flagos_backend.passes.rewrite import Substitution, rewrite_computations, with_operands


def match_attention(module: Module, notes: list[str]) -> Module:
    """``module`` with attentions as custom calls flagos.attention and flagos.attention_backward, and whatever that
    leaves unused still in place. ``notes`` receives a line for each match and each near miss, for explain."""
    effects = Effects()

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        matched = _match_computation(computation, effects, notes)
        substitution = Substitution(replaced)
        instructions = []
        for instruction in matched.instructions:
            for callee in instruction.called:
                replaced.setdefault(id(callee), callee)  # a call's own
            instructions.append(substitution.apply(instruction))
            substitution.record(instruction, instructions[-1])
        if not substitution.values:
            return matched
        return Computation(matched.name, tuple(instructions), substitution.value(matched.root))

    return rewrite_computations(module, transform)


@dataclass(slots=True, eq=False)
class _Attempt:
    of: Candidate
    matched: Matched
    gradients: MatchedGradients | None
    attention: Attention
    replacements: Replacements

    @property
    def note(self) -> str:
        what = "attention" if self.gradients is None else "attention and its gradients"
        rows = ", zero where a row sees no key" if self.matched.zeroes_rows else ""
        rows += ", zero where every logit is -infinity" if self.matched.zeroes_fully_masked else ""
        rows += ", zero where weights are NaN" if self.matched.zeroes_nan else ""
        factors = "".join(
            f", queries {'over' if factor.divides else 'times'} %{factor.term.instruction.name}"
            for factor in self.matched.factors
        )
        biases = () if self.gradients is None else self.gradients.biases
        over = "".join(f", that of a bias over {self.matched.dims(found.labels)}" for found in biases)
        if self.gradients is not None and self.gradients.cancelled:
            over += ", that of a bias for all keys zero"
        return f"{what} at %{self.of.dot.name}: {self.attention}{factors}{rows}{over}"


def _match_computation(computation: Computation, effects: Effects, notes: list[str]) -> Computation:
    recognizer = Recognizer(computation)
    users = _users(computation)
    note_gradients_of_biases(computation, recognizer, users)
    attempts = []
    for candidate in recognizer.candidates:
        if candidate.axis is None:
            continue
        try:
            attempts.append(_attempt(candidate, users))
        except NearMissError as reason:
            notes.append(_near_miss(candidate.dot, str(reason)))
    notes += _broken_softmaxes(computation, recognizer)
    while attempts:
        rewriting = _Rewriting(computation, effects, attempts)
        failed = [attempt for attempt in attempts if attempt.of.dot in rewriting.reached]
        if not failed:
            notes += [attempt.note for attempt in attempts]
            return rewriting.build()
        for attempt in failed:
            notes.append(_near_miss(attempt.of.dot, _other_user(attempt, computation, rewriting.reached)))
            attempts.remove(attempt)
    return computation


def _near_miss(dot: Instruction, reason: str) -> str:
    return f"no attention at %{dot.name}: {reason}"


def _attempt(candidate: Candidate, users: dict[Instruction, list[Instruction]]) -> _Attempt:
    matched = assemble(candidate)
    gradients = assemble_gradients(matched)
    repetition = repetition_of(matched)
    if gradients is None:
        if matched.is_only_backward:
            raise NearMissError("the program has no use for its output")
        builder = CallBuilder(matched, arranged(matched.result, users), repetition)
        return _Attempt(candidate, matched, None, *builder.forward())
    wanted = {name: arranged(result, users) for name, result in gradients.wanted.items()}
    if repetition is not None:
        sums = summed(wanted, repetition, matched, users)
        wanted, repetition = (wanted, None) if sums is None else (sums, repetition)
    source, labels = untransposed(gradients.output_gradient, gradients.output_gradient_labels)
    gradients = replace(gradients, wanted=wanted, output_gradient=source, output_gradient_labels=labels)
    # An output that nobody else reads lies as its gradient does.
    result = Result(source, labels) if matched.is_only_backward else arranged(matched.result, users)
    return _Attempt(
        candidate, matched, gradients, *CallBuilder(matched, result, repetition).forward_and_backward(gradients)
    )


def _users(computation: Computation) -> dict[Instruction, list[Instruction]]:
    users: dict[Instruction, list[Instruction]] = defaultdict(list)
    for instruction in computation.instructions:
        for operand in instruction.operands:
            users[operand].append(instruction)
    if computation.root in users:
        users[computation.root].append(computation.root)
    return users


def _broken_softmaxes(computation: Computation, recognizer: Recognizer) -> Iterable[str]:
    """A softmax over what was logits until something unknown changed them."""
    for instruction in computation.instructions:
        if instruction.opcode is Opcode.REDUCE and instruction.called[0].root.opcode is Opcode.MAXIMUM:
            reason = recognizer.broken.get(instruction.operands[0])
            if reason is not None:
                yield _near_miss(instruction, reason)


def _other_user(attempt: _Attempt, computation: Computation, reached: set[Instruction]) -> str:
    """Who keeps the array of logits alive."""
    members = attempt.of.members
    for instruction in computation.instructions:
        if instruction in reached and instruction not in members and instruction not in attempt.replacements:
            used = next((operand for operand in instruction.operands if operand in members), None)
            if used is not None:
                return f"{instruction.opcode} %{instruction.name} needs %{used.name}, which the call does not give"
    return f"the computation returns %{computation.root.name}"


class _Rewriting:
    """A computation with the replacements of some attempts: what of it is still reached, and itself."""

    def __init__(self, computation: Computation, effects: Effects, attempts: list[_Attempt]) -> None:
        self._computation = computation
        self._replaced: Replacements = {}
        for attempt in attempts:
            self._replaced.update(attempt.replacements)
        roots = [i for i in computation.instructions if i.opcode is Opcode.PARAMETER or effects.of(i)]
        self._order = self._topological([*roots, computation.root])
        self.reached = set(self._order)

    def _value(self, instruction: Instruction) -> Instruction:
        return self._replaced.get(instruction, instruction)

    def _topological(self, roots: list[Instruction]) -> list[Instruction]:
        order: list[Instruction] = []
        done: set[Instruction] = set()
        for root in roots:
            stack = [(self._value(root), False)]
            while stack:
                instruction, ready = stack.pop()
                if instruction in done:
                    continue
                if ready:
                    done.add(instruction)
                    order.append(instruction)
                    continue
                stack.append((instruction, True))
                stack += [(self._value(operand), False) for operand in reversed(instruction.operands)]
        return order

    def build(self) -> Computation:
        made: dict[Instruction, Instruction] = {}
        for instruction in self._order:
            operands = tuple(made[self._value(operand)] for operand in instruction.operands)
            same = all(a is b for a, b in zip(operands, instruction.operands, strict=True))
            made[instruction] = instruction if same else with_operands(instruction, operands, instruction.called)
        root = made[self._value(self._computation.root)]
        return Computation(self._computation.name, tuple(made.values()), root)
