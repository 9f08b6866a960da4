"""Whether flagos and XLA agree on a program: equal up to what rounding, amplified by the program itself, explains."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flagos_backend.ir.hlo import Module
from tools.fuzz.engines import ArgumentChanged, Flagos, Xla
from tools.fuzz.noise import disturb
from tools.fuzz.oracle import widened

Array = np.ndarray[Any, Any]

_SLACK = 4.0  # times the scatter of the disturbed runs
_ULPS = 4


class Kind(enum.StrEnum):
    EQUAL = "equal"  # up to a few units in the last place
    ROUNDING = "explained by rounding"
    WIDER = "explained by XLA's results in wider types"
    FLUSHING = "explained by flushed subnormal numbers"
    EMITTERS = "explained by XLA's newer emitters"
    ORACLE_REFUSES = "refused by XLA"
    DIFFERENT = "different"
    CHANGED = "an argument changed"
    REFUSED = "refused by flagos"
    CRASHED = "crash"
    HUNG = "hang"


class Engine(enum.StrEnum):
    FLAGOS = "flagos"
    XLA = "xla"


# In this order, each with its number of disturbed runs.
_EXPLANATIONS = ((Kind.ROUNDING, 6), (Kind.WIDER, 6), (Kind.FLUSHING, 8))

# Written to standard error before an engine runs, so that a crash can be told whose it was.
RUNNING = "[fuzz] running on {}"


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    message: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in (Kind.DIFFERENT, Kind.CHANGED, Kind.REFUSED, Kind.CRASHED, Kind.HUNG)


class Judge:
    """Runs programs on both engines, in this process."""

    def __init__(self) -> None:
        self._flagos = Flagos()
        self._xla = Xla()

    def judge(self, module: Module, arguments: Sequence[Array]) -> Verdict:
        _announce(Engine.XLA)
        try:
            theirs = self._xla.run(module, arguments)
        except Exception as error:  # whatever the oracle does not take says nothing about flagos
            return Verdict(Kind.ORACLE_REFUSES, _first_line(error))
        _announce(Engine.FLAGOS)
        try:
            ours = self._flagos.run(module, arguments)
        except ArgumentChanged as error:
            return Verdict(Kind.CHANGED, str(error))
        except Exception as error:  # any error is the finding
            return Verdict(Kind.REFUSED, f"{type(error).__name__}: {error}")
        wrong = [number for number, pair in enumerate(zip(ours, theirs, strict=True)) if not _close(*pair)]
        if not wrong:
            return Verdict(Kind.EQUAL)
        _announce(Engine.XLA)
        return self._explain(module, arguments, ours, theirs)

    def _explain(self, module: Module, arguments: Sequence[Array], ours: list[Array], theirs: list[Array]) -> Verdict:
        """Whether each element lies where the oracle's runs scatter, of the program or of its form in wider types."""
        around_theirs = [_Range(array) for array in theirs]
        unexplained = [np.ones_like(_held(known, array)) for known, array in zip(around_theirs, ours, strict=True)]
        for kind, runs in _EXPLANATIONS:
            form, allowed = module, around_theirs
            if kind is Kind.WIDER:
                form = widened(module)
                allowed = [_Range(array) for array in self._xla.run(form, arguments)]
            for run in range(runs):
                disturbed = disturb(form, run, flush=kind is Kind.FLUSHING)
                for known, array in zip(allowed, self._xla.run(disturbed, arguments), strict=True):
                    known.add(array)
            for rest, known, array in zip(unexplained, allowed, ours, strict=True):
                rest &= ~_held(known, array)
            if not any(rest.any() for rest in unexplained):
                return Verdict(kind)
        number = next(number for number, rest in enumerate(unexplained) if rest.any())
        return Verdict(Kind.DIFFERENT, _difference(number, ours[number], theirs[number], unexplained[number]))


def _announce(engine: Engine) -> None:
    print(RUNNING.format(engine), file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _is_exact(array: Array) -> bool:
    return array.dtype.kind in "biu" or array.dtype in (ml_dtypes.int4, ml_dtypes.uint4)


def _parts(array: Array) -> Array:
    """Real and imaginary parts side by side, as float64."""
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], -1).astype(np.float64)
    return array.astype(np.float64)


def _ulp(array: Array) -> float:
    """The relative distance of neighbouring numbers."""
    if array.dtype.kind == "c":
        return float(np.finfo(array.real.dtype).eps)
    return float(ml_dtypes.finfo(array.dtype).eps)


def _tiny(array: Array) -> float:
    dtype = array.real.dtype if array.dtype.kind == "c" else array.dtype
    return float(ml_dtypes.finfo(dtype).tiny)


def _close(ours: Array, theirs: Array) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if _is_exact(ours):
        return bool(np.array_equal(ours, theirs))
    a, b = _parts(ours), _parts(theirs)
    with np.errstate(all="ignore"):
        near = np.abs(a - b) <= _ULPS * _ulp(ours) * np.abs(b)
    return bool(((a == b) | (np.isnan(a) & np.isnan(b)) | near).all())


class _Range:
    """For each element the least and the greatest value that the oracle's runs gave, and whether any was NaN."""

    def __init__(self, array: Array) -> None:
        self._exact = _is_exact(array)
        self._reference = array
        # What XLA flushes; numbers of 16 bits it computes as wider ones.
        self._flushed = 4 * _tiny(array) if not self._exact and array.dtype != np.float16 else 0.0
        values = array if self._exact else _parts(array)
        self.low, self.high = values.copy(), values.copy()
        self.nan = np.zeros(values.shape, bool) if self._exact else np.isnan(values)

    def add(self, array: Array) -> None:
        values = array if self._exact else _parts(array)
        if not self._exact:
            self.nan |= np.isnan(values)
            self.low, self.high = np.fmin(self.low, values), np.fmax(self.high, values)
        else:
            self.low, self.high = np.minimum(self.low, values), np.maximum(self.high, values)

    def holds(self, ours: Array) -> Array:
        """Elementwise whether the value lies in the range, widened by its own width and a few ulps."""
        if ours.dtype != self._reference.dtype or ours.shape != self._reference.shape:
            return np.zeros(1, bool)
        if self._exact:
            return np.asarray((self.low <= ours) & (ours <= self.high))
        values = _parts(ours)
        with np.errstate(all="ignore"):
            size = np.fmax(np.abs(self.low), np.abs(self.high))
            margin = _SLACK * (self.high - self.low) + _ULPS * _ulp(ours) * size + self._flushed
            inside = (values >= self.low - margin) & (values <= self.high + margin)
        return np.asarray(self.nan | (values == self.low) | (values == self.high) | inside)


def _held(known: _Range, array: Array) -> Array:
    """``known.holds``, with one truth value for both parts of a complex number."""
    held = known.holds(array)
    return np.asarray(held.all(-1)) if held.ndim > array.ndim else held


def _difference(number: int, ours: Array, theirs: Array, outside: Array) -> str:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return f"output {number}: {ours.dtype}{list(ours.shape)} instead of {theirs.dtype}{list(theirs.shape)}"
    where = tuple(map(int, np.argwhere(outside)[0]))
    text = f"output {number} ({ours.dtype}{list(ours.shape)}): {int(outside.sum())} of {ours.size} elements differ"
    return f"{text}, first at {list(where)}: {ours[where]} instead of {theirs[where]}"
