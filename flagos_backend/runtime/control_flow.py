"""The kernels of while and conditional, made by plan.py from the plans of their computations. Each takes the slots of
the plan it stands in, so that storage can be given up before the loop is over."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from flagos_backend.kernels.reference.registry import Run, Value

# Runs a plan: takes its flat arguments, emptying the list, and returns its flat results.
Callee = Callable[[Run, list[Any]], list[Any]]
SlotKernel = Callable[[Run, list[Any]], None]


def owned_copy(run: Run, value: torch.Tensor) -> torch.Tensor:
    """``value`` in new row-major storage."""
    return value.clone(memory_format=torch.contiguous_format)


class ControlFlow(abc.ABC):
    """A kernel that runs plans. ``callees``: in the order of the step's nested plans. ``ran``: the numbers of those
    that ran so far."""

    def __init__(self, callees: tuple[Callee, ...]) -> None:
        self.callees = callees
        self.ran: set[int] = set()

    @abc.abstractmethod
    def __call__(self, run: Run, values: list[Any]) -> None: ...

    def over(self, callees: Sequence[Callee]) -> Self:
        """The same of plans that compute the same in another way."""
        changed = copy.copy(self)
        changed.callees = tuple(callees)
        return changed


@dataclass(frozen=True, slots=True)
class Copies:
    """What a loop copies because its body writes over it and must not share it, by the number of the value: before it
    begins, and at each turn. ``dying``: slots that are given up when it begins."""

    dying: tuple[int, ...]
    first: tuple[int, ...]
    each_turn: tuple[int, ...]

    def begin(self, run: Run, values: list[Any], operands: Sequence[int]) -> list[Any]:
        state = [values[slot] for slot in operands]
        for slot in self.dying:
            values[slot] = None
        return self._copied(run, state, self.first)

    def after_turn(self, run: Run, state: list[Any]) -> list[Any]:
        return self._copied(run, state, self.each_turn)

    @staticmethod
    def _copied(run: Run, state: list[Any], numbers: Sequence[int]) -> list[Any]:
        for number in numbers:
            state[number] = owned_copy(run, state[number])
        return state


class While(ControlFlow):
    """``callees``: whether there is a first turn; and a turn, whose last result says whether there is another one."""

    def __init__(
        self, callees: tuple[Callee, ...], operands: Sequence[int], results: Sequence[int], copies: Copies
    ) -> None:
        super().__init__(callees)
        self._operands = operands
        self._results = results
        self._copies = copies

    def __call__(self, run: Run, values: list[Any]) -> None:
        condition, turn = self.callees
        state = self._copies.begin(run, values, self._operands)
        (another,) = condition(run, state.copy())
        self.ran.add(0)
        while another.item():
            self.ran.add(1)
            *state, another = turn(run, state)
            state = self._copies.after_turn(run, state)
        for slot, value in zip(self._results, state, strict=True):
            values[slot] = value


class CountedLoop(ControlFlow):
    """``callees``: the body, which runs ``trip_count`` times on its own results."""

    def __init__(
        self,
        callees: tuple[Callee, ...],
        operands: Sequence[int],
        results: Sequence[int],
        copies: Copies,
        trip_count: int,
    ) -> None:
        super().__init__(callees)
        self.trip_count = trip_count
        self._operands = operands
        self._results = results
        self._copies = copies

    def __call__(self, run: Run, values: list[Any]) -> None:
        (body,) = self.callees
        state = self._copies.begin(run, values, self._operands)
        turns = self.trip_count  # may be more than range() takes
        if turns:
            self.ran.add(0)
        while turns > 0:
            state = self._copies.after_turn(run, body(run, state))
            turns -= 1
        for slot, value in zip(self._results, state, strict=True):
            values[slot] = value


class Conditional(ControlFlow):
    """``callees``: the branches. A PRED selector takes the first when true, an integer that one, or out of range the
    last."""

    def __init__(
        self,
        callees: tuple[Callee, ...],
        selector: int,
        operands: Sequence[Sequence[int]],
        results: Sequence[int],
        dying: Sequence[int],
        copied_first: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(callees)
        self._selector = selector
        self._operands = operands
        self._results = results
        self._dying = dying
        self._copied_first = copied_first

    def __call__(self, run: Run, values: list[Any]) -> None:
        last = len(self.callees) - 1
        choice = values[self._selector].item()
        if choice is True:
            index = 0
        elif choice is False:
            index = 1
        else:
            index = choice if 0 <= choice <= last else last
        self.ran.add(index)
        arguments = [values[slot] for slot in self._operands[index]]
        for slot in self._dying:
            values[slot] = None
        for leaf in self._copied_first[index]:
            arguments[leaf] = owned_copy(run, arguments[leaf])
        for slot, value in zip(self._results, self.callees[index](run, arguments), strict=True):
            values[slot] = value


def lifted_while(condition: Callee, body: Callee, operands: Sequence[int], results: Sequence[int]) -> SlotKernel:
    """while of a scalar function on arrays: every element goes round until its own condition fails."""

    def run_while(run: Run, values: list[Any]) -> None:
        state = [values[slot] for slot in operands]
        active = condition(run, state.copy())[0]
        while active.any():
            state = [select(active, new, old) for new, old in zip(body(run, state.copy()), state, strict=True)]
            active = active & condition(run, state.copy())[0]
        for slot, value in zip(results, state, strict=True):
            values[slot] = value

    return run_while


def lifted_conditional(
    selector: int, branches: Sequence[Callee], operands: Sequence[Sequence[int]], results: Sequence[int]
) -> SlotKernel:
    """conditional of a scalar function on arrays: every branch runs on all elements, each element keeps its own."""
    last = len(branches) - 1

    def run_conditional(run: Run, values: list[Any]) -> None:
        choice = values[selector]
        chosen = branches[last](run, [values[slot] for slot in operands[last]])
        for index in reversed(range(last)):
            # A PRED selector takes the first branch when true; an integer out of range takes the last.
            mask = choice if choice.dtype is torch.bool else choice == index
            outcome = branches[index](run, [values[slot] for slot in operands[index]])
            chosen = [select(mask, new, old) for new, old in zip(outcome, chosen, strict=True)]
        for slot, value in zip(results, chosen, strict=True):
            values[slot] = value

    return run_conditional


def select(mask: torch.Tensor, on_true: Value, on_false: Value) -> Value:
    """The elements of ``on_true`` where ``mask`` holds; tokens pass."""
    if isinstance(on_true, tuple) or isinstance(on_false, tuple):
        return on_true
    return torch.where(mask, on_true, on_false)
