"""What values inside an attention stand for: the vocabulary of recognize.py.

Everything between the logits of a softmax and its gradients is a sum of monomials in four symbols, so the many ways to
write a softmax and its derivative have one normal form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from flagos_backend.ir.hlo import Instruction
from flagos_backend.passes.match.labels import Labels


@dataclass(frozen=True, slots=True)
class Term:
    """An array that broadcasts over the logits: a bias, or a predicate. ``labels`` names its own dimensions."""

    instruction: Instruction
    labels: Labels


@dataclass(frozen=True, slots=True)
class Hide:
    """select: logits become ``fill`` where the predicate is not ``visible``."""

    predicate: Term
    visible: bool
    fill: float


@dataclass(frozen=True, slots=True)
class Contraction:
    """A dot of something of an attention with another array, whose dimensions ``labels`` names. ``contracted``: what
    it sums over; ``labels_of_result``: the dot's own dimensions."""

    dot: Instruction
    other: Instruction
    labels: Labels
    contracted: frozenset[int]
    labels_of_result: Labels


@dataclass(slots=True, eq=False)
class Candidate:
    """An attention in the making: everything that was recognized around one product of queries and keys."""

    dot: Instruction
    labels: Labels
    sides: tuple[Labels, Labels]  # labels of the product's operands
    channel: int  # the label that the product contracts
    logits: Logits | None = None  # what enters the softmax
    axis: int | None = None  # the label of key positions
    output: Contraction | None = None
    product_gradient: Term | None = None  # gradient of the weights, before the softmax's derivative
    gradients: dict[str, Contraction] = field(default_factory=dict)
    zeroes_weights: bool = False  # weights of hidden keys are set to zero, also those of a row that sees no key
    members: dict[Instruction, None] = field(default_factory=dict)  # instructions that only this attention needs


@dataclass(frozen=True, slots=True)
class Logits:
    """where(visible, scale * product + biases, fill) on the way into a softmax."""

    of: Candidate
    labels: Labels
    scale: float = 1.0
    biases: tuple[Term, ...] = ()
    hides: tuple[Hide, ...] = ()


@dataclass(frozen=True, slots=True)
class RowMaximum:
    of: Candidate
    labels: Labels
    logits: Logits


@dataclass(frozen=True, slots=True)
class Shifted:
    """Logits less the maximum of their row."""

    of: Candidate
    labels: Labels


class Powers(NamedTuple):
    """exponential: e = exp(shifted logits). row_sum: l = sum of e. gradient: g = gradient of the weights e/l.
    row_dot: r = sum of g·e/l over a row."""

    exponential: int = 0
    row_sum: int = 0
    gradient: int = 0
    row_dot: int = 0

    def times(self, other: Powers) -> Powers:
        return Powers(*(a + b for a, b in zip(self, other, strict=True)))

    def inverse(self) -> Powers:
        return Powers(*(-power for power in self))


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients of monomials, none zero. ``zeroed``: the hides in whose hidden places it was set to zero."""

    of: Candidate
    labels: Labels
    terms: tuple[tuple[Powers, float], ...]
    zeroed: frozenset[Hide] = frozenset()

    @property
    def is_zero(self) -> bool:
        """Whether everything cancelled, as in what a gradient sends through the maximum."""
        return not self.terms

    def coefficient(self) -> float | None:
        """c, when this is c·e/l: the weights."""
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == WEIGHTS else None

    def gradient_scale(self) -> float | None:
        """c, when this is c·(e/l)(g - r): the gradient of the logits."""
        found = dict(self.terms)
        c = found.get(LOGITS_GRADIENT[0])
        if len(found) != 2 or c is None or found.get(LOGITS_GRADIENT[1]) != -c:
            return None
        return c


WEIGHTS = Powers(1, -1)
LOGITS_GRADIENT = (Powers(1, -1, 1, 0), Powers(1, -1, 0, 1))

Symbol = Logits | RowMaximum | Shifted | Polynomial


def polynomial(
    of: Candidate, labels: Labels, terms: dict[Powers, float], zeroed: frozenset[Hide] = frozenset()
) -> Polynomial:
    return Polynomial(of, labels, tuple(sorted((p, c) for p, c in terms.items() if c)), zeroed)
