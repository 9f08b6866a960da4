"""What values inside an attention stand for: the vocabulary of recognize.py.

Everything between the logits of a softmax and its gradients is a sum of monomials in four symbols, so the many ways to
write a softmax and its derivative have one normal form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from flagos_backend.ir.hlo import Instruction
from flagos_backend.passes.attention.labels import Labels, dims_of


@dataclass(frozen=True, slots=True)
class Term:
    """An array that broadcasts over the logits: a bias, or a predicate. ``labels`` names its own dimensions; a bias is
    added ``factor`` times."""

    instruction: Instruction
    labels: Labels
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Factor:
    """An array that multiplies or ``divides`` another, and is the same for all keys."""

    term: Term
    divides: bool


@dataclass(frozen=True, slots=True)
class Hide:
    """select: logits become ``fill`` where the predicate is not ``visible``."""

    predicate: Term
    visible: bool
    fill: float


@dataclass(frozen=True, slots=True)
class Sink:
    """One more logit a row. ``keys`` labels key positions, ``both`` those and the sink, which is ``first`` or last."""

    term: Term
    keys: int
    both: int
    first: bool


@dataclass(frozen=True, slots=True)
class Contraction:
    """A dot of something of an attention with another array, whose dimensions ``labels`` names. ``contracted``: what
    it sums over; ``labels_of_result``: the dot's own dimensions."""

    dot: Instruction
    other: Instruction
    labels: Labels
    contracted: frozenset[int]
    labels_of_result: Labels


@dataclass(frozen=True, slots=True)
class FactorGradient:
    """The gradient of the logits times the product, times ``factors``, summed into ``instruction``."""

    instruction: Instruction
    labels: Labels
    factors: tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class BiasGradient:
    """``scale`` times the gradient of the logits outside of their soft cap, summed over the dimensions that ``labels``
    lacks."""

    instruction: Instruction
    labels: Labels
    scale: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The gradient of the logits, summed over keys: of a softmax zero, or NaN in a row that has such a number.
    ``seen_alone``: hidden keys are zero in it, all of them in a row that sees no key."""

    instruction: Instruction
    labels: Labels
    seen_alone: bool


class Guard(Enum):
    """Which maxima of rows a number stands for, so that e is zero in a row of -infinity alone: none, those of
    -infinity, or all that are not finite."""

    NONE = "none"
    FULLY_MASKED = "fully_masked"
    INFINITE = "infinite"


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
    weighted: Contraction | None = None  # values weighted with e
    quotient: Term | None = None  # that divided by l, where it is the output
    product_gradient: Term | None = None  # gradient of the weights, before the softmax's derivative
    upstream: Term | None = None  # gradient of the output, where that of the weights is made of its quotient by l
    gradients: dict[str, Contraction] = field(default_factory=dict)
    sink_gradient: Term | None = None  # of each row's sink
    factor_gradients: list[FactorGradient] = field(default_factory=list)
    bias_gradients: list[BiasGradient] = field(default_factory=list)
    cancelled: list[Cancelled] = field(default_factory=list)
    zeroes_weights: bool = False  # weights of hidden keys are set to zero, also those of a row that sees no key
    keeps_weights: bool = False  # of some product they are not, or only those of a row that sees a key
    zeroes_fully_masked: bool = False  # weights of a row of which every logit is -infinity are set to zero
    keeps_fully_masked: bool = False  # of some product they are NaN
    zeroes_nan: bool = False  # weights that are NaN are set to zero
    weighs_exponentials: bool = False  # values are weighted with e, and divided by its sum only then, if at all
    guard: Guard | None = None  # of the maximum that e is made with
    adds_maximum: bool = False  # the logarithm of l is added to the maximum, and the sum taken off logits
    hint: str | None = None  # what was seen that no attention has
    members: dict[Instruction, None] = field(default_factory=dict)  # instructions that only this attention needs

    @property
    def row(self) -> int | None:
        """The label that the softmax is over: key positions, and the sink where there is one."""
        return self.axis if self.logits is None or self.logits.sink is None else self.logits.sink.both

    def keys(self) -> int | None:
        """How many there are."""
        return None if self.axis is None else dims_of(self.dot)[self.labels.index(self.axis)]


@dataclass(frozen=True, slots=True)
class Logits:
    """where(visible, scale * product + biases, fill) on the way into a softmax; with ``cap``
    cap * tanh(scale * product) in the place of scale * product. The product is that of queries and keys and of
    ``factors``."""

    of: Candidate
    labels: Labels
    scale: float = 1.0
    biases: tuple[Term, ...] = ()
    hides: tuple[Hide, ...] = ()
    cap: float | None = None
    sink: Sink | None = None
    factors: tuple[Factor, ...] = ()

    @property
    def slope(self) -> float:
        """What the gradient of the logits is multiplied with on the way to the product, beside tanh's derivative."""
        return self.scale if self.cap is None else self.scale * self.cap

    @property
    def is_product(self) -> bool:
        """Whether nothing was added, hidden or joined yet."""
        return not self.biases and not self.hides and self.sink is None


@dataclass(frozen=True, slots=True)
class Shifted:
    """Logits less the maximum of their row, and ``less_log_sum``: logarithms of weights, which are -infinity where
    ``zeroed`` hides."""

    of: Candidate
    labels: Labels
    less_log_sum: bool = False
    zeroed: frozenset[Hide] = frozenset()


@dataclass(frozen=True, slots=True)
class RowMaximum:
    of: Candidate
    labels: Labels
    logits: Logits | Shifted
    guard: Guard = Guard.NONE


@dataclass(frozen=True, slots=True)
class LogRowSum:
    """The logarithm of l, and ``with_maximum`` the row's maximum: logsumexp of the logits."""

    of: Candidate
    labels: Labels
    with_maximum: bool = False


@dataclass(frozen=True, slots=True)
class FullyMasked:
    """Whether logits are -infinity, or, unless it ``holds``, are not; all of a row along ``row``, if there is one."""

    of: Candidate
    labels: Labels
    logits: Logits
    holds: bool
    row: int | None = None


@dataclass(frozen=True, slots=True)
class AbsoluteMaximum:
    """The magnitude of a row's maximum."""

    of: Candidate
    labels: Labels


@dataclass(frozen=True, slots=True)
class FiniteMaximum:
    """Whether a row's maximum is finite, or, unless it ``holds``, is not; NaN may count as either."""

    of: Candidate
    labels: Labels
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Tested:
    """A comparison of l, or of weights: what it is where l is one or more, where it is zero, and where it is NaN."""

    of: Candidate
    labels: Labels
    holds: bool
    at_zero: bool
    at_nan: bool
    weights: Polynomial | None = None


class Powers(NamedTuple):
    """exponential: e = exp(shifted logits). row_sum: l = sum of e. gradient: g = gradient of the weights e/l.
    row_dot: r = sum of g·e/l over a row. tanh: h, of logits with a soft cap. product: of queries and keys alone."""

    exponential: int = 0
    row_sum: int = 0
    gradient: int = 0
    row_dot: int = 0
    tanh: int = 0
    product: int = 0

    def times(self, other: Powers) -> Powers:
        return Powers(*(a + b for a, b in zip(self, other, strict=True)))

    def inverse(self) -> Powers:
        return Powers(*(-power for power in self))


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients of monomials, none zero. What it is at hidden keys counts in rows that see no key, as e is zero
    there in all others. ``zeroed``: the hides at whose hidden keys it is zero, whatever the row sees. ``partly``: those
    at whose hidden keys the same monomials have other coefficients. ``finite``: no infinity and no NaN, whatever the
    row sees. ``factors``: of all of it. ``upstream``: the gradient of the output that r was made of, if it was made of
    that and not of g. ``fully_masked_zero``: in a row of which every logit is -infinity e/l is zero in it and not NaN.
    ``nan_zero``: weights of which those that are NaN were set to zero. ``least``: of l and its powers, no row has less,
    though it may be NaN; also of the numbers that a choice by l is between."""

    of: Candidate
    labels: Labels
    terms: tuple[tuple[Powers, float], ...]
    zeroed: frozenset[Hide] = frozenset()
    partly: frozenset[Hide] = frozenset()
    finite: bool = False
    factors: tuple[Factor, ...] = ()
    upstream: Term | None = None
    fully_masked_zero: bool = False
    nan_zero: bool = False
    least: float = 1.0

    @property
    def is_zero(self) -> bool:
        """Whether everything cancelled, as in what a gradient sends through the maximum."""
        return not self.terms

    @property
    def times_product(self) -> bool:
        return any(powers.product for powers, _ in self.terms)

    @property
    def is_row_sum(self) -> bool:
        return self.terms == ((Powers(row_sum=1), 1.0),) and not self.factors

    def coefficient(self) -> float | None:
        """c, when this is c·e/l: the weights."""
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == WEIGHTS and not self.factors else None

    def gradient_scale(self, product: int = 0) -> float | None:
        """c, when this is c·(e/l)(g - r): the gradient of the logits; with a cap c·(e/l)(g - r)(1 - h²), that of what
        tanh was taken of. ``product``: times that power of the product. Factors do not count."""
        found = dict(self.terms)
        weighted, row = (powers._replace(product=product) for powers in (_WEIGHTED_GRADIENT, _WEIGHTED_ROW_DOT))
        c = found.get(weighted)
        if c is None:
            return None
        wanted = {weighted: c, row: -c}
        if self.of.logits is not None and self.of.logits.cap is not None:
            wanted |= {powers.times(Powers(tanh=2)): -factor for powers, factor in wanted.items()}
        return c if found == wanted else None

    def scale_outside_cap(self) -> float | None:
        """c, when this is c·(e/l)(g - r): the gradient of logits before the derivative of their cap."""
        c = dict(self.terms).get(_WEIGHTED_GRADIENT)
        wanted = {} if c is None else {_WEIGHTED_GRADIENT: c, _WEIGHTED_ROW_DOT: -c}
        return c if dict(self.terms) == wanted and not self.factors else None

    def gradient_of_sink(self) -> bool:
        """Whether this is (e/l)(g - r), before the cap of the keys' logits and what hid them."""
        return not (self.zeroed or self.partly) and self.scale_outside_cap() == 1.0


@dataclass(frozen=True, slots=True)
class Weighted:
    """coefficient · l ** row_sum, over rows and the values' channel; ``is_product``: times the values weighted with e;
    ``upstream``: times this array."""

    of: Candidate
    labels: Labels
    coefficient: float = 1.0
    row_sum: int = 0
    is_product: bool = False
    upstream: Term | None = None


EXPONENTIALS, WEIGHTS = Powers(1), Powers(1, -1)
_WEIGHTED_GRADIENT, _WEIGHTED_ROW_DOT = Powers(1, -1, 1, 0), Powers(1, -1, 0, 1)

_Comparison = FullyMasked | FiniteMaximum | Tested
Symbol = Logits | RowMaximum | AbsoluteMaximum | Shifted | LogRowSum | Polynomial | _Comparison


def polynomial(of: Candidate, labels: Labels, terms: dict[Powers, float], *, finite: bool = False) -> Polynomial:
    return Polynomial(of, labels, terms_of(terms), finite=finite)


def terms_of(terms: dict[Powers, float]) -> tuple[tuple[Powers, float], ...]:
    return tuple(sorted((p, c) for p, c in terms.items() if c))
