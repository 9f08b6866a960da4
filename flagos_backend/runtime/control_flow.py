"""The kernels of while and conditional, made by plan_builder.py from the plans of their computations. Each takes the
slots of the plan it stands in, so that storage can be given up before the loop is over."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Conditionals, Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process.torch_loading import torch

# Runs a plan: takes its flat arguments, emptying the list, and returns its flat results. A third argument is as of
# Plan.run: nothing, or an array for each result.
Callee = Callable[..., list[Any]]
SlotKernel = Callable[[Run, list[Any]], None]


def owned_copy(run: Run, value: torch.Tensor) -> torch.Tensor:
    """``value`` in new row-major storage."""
    return value.clone(memory_format=torch.contiguous_format)


def copied_into(run: Run, places: Sequence[torch.Tensor | None], value: torch.Tensor) -> torch.Tensor:
    """``value`` in the one place, or in new storage."""
    (place,) = places
    return owned_copy(run, value) if place is None else place.copy_(value)


class ControlFlow(abc.ABC):
    """A kernel that runs plans. ``callees``: in the order of the step's nested plans. ``ran``: the numbers of those
    that ran so far, in launches or in a warm-up."""

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
    begins, and at each iteration. ``dying``: slots that are given up when it begins."""

    dying: tuple[int, ...]
    first: tuple[int, ...]
    each_iteration: tuple[int, ...]

    def begin(self, run: Run, values: list[Any], operands: Sequence[int]) -> list[Any]:
        state = [values[slot] for slot in operands]
        for slot in self.dying:
            values[slot] = None
        return self._copied(run, state, self.first)

    def after_iteration(self, run: Run, state: list[Any]) -> list[Any]:
        return self._copied(run, state, self.each_iteration)

    @staticmethod
    def _copied(run: Run, state: list[Any], numbers: Sequence[int]) -> list[Any]:
        for number in numbers:
            state[number] = owned_copy(run, state[number])
        return state


class While(ControlFlow):
    """``callees``: whether there is a first iteration; and an iteration, whose last result says whether there is
    another one. ``unchanged``: the numbers of the values that an iteration hands on as they are."""

    def __init__(
        self,
        callees: tuple[Callee, ...],
        operands: Sequence[int],
        results: Sequence[int],
        copies: Copies,
        unchanged: Collection[int],
    ) -> None:
        super().__init__(callees)
        self._operands = operands
        self._results = results
        self._copies = copies
        self._unchanged = unchanged

    def __call__(self, run: Run, values: list[Any]) -> None:
        state = self._run(run, values) if run.conditionals is None else self._record(run, run.conditionals, values)
        for slot, value in zip(self._results, state, strict=True):
            values[slot] = value

    def _run(self, run: Run, values: list[Any]) -> list[Any]:
        condition, iteration = self.callees
        state = self._copies.begin(run, values, self._operands)
        (another,) = condition(run, state.copy())
        self.ran.add(0)
        while another.item():
            self.ran.add(1)
            *state, another = iteration(run, state)
            state = self._copies.after_iteration(run, state)
        return state

    def _record(self, run: Run, conditionals: Conditionals, values: list[Any]) -> list[Any]:
        """Each iteration finds its values where the one before did, so that those that change have storage of their
        own."""
        condition, iteration = self.callees
        state = [values[slot] for slot in self._operands]
        for slot in self._copies.dying:
            values[slot] = None
        changed = [n for n, value in enumerate(state) if n not in self._unchanged and isinstance(value, torch.Tensor)]
        for number in changed:
            state[number] = owned_copy(run, state[number])
        (another,) = condition(run, state.copy())

        def body() -> torch.Tensor:
            results = iteration(run, state.copy())
            again: torch.Tensor = _put([state[n] for n in changed], [results[n] for n in (*changed, -1)], run)
            return again

        conditionals.run_while(another, body)
        return state


def _put(places: Sequence[torch.Tensor], results: Sequence[torch.Tensor], run: Run) -> torch.Tensor:
    """Copies ``results`` to ``places``, but for the last one, which is returned. They may lie in those places already,
    in their own or in one another's."""
    storages = {place.untyped_storage()._cdata for place in places}
    own = [_lies_at(result, place) for result, place in zip(results, places, strict=False)]
    *apart, last = [
        result if there or result.untyped_storage()._cdata not in storages else owned_copy(run, result)
        for result, there in zip(results, (*own, False), strict=True)
    ]
    for result, place, there in zip(apart, places, own, strict=True):
        if not there:
            place.copy_(result)
    return last


def _lies_at(result: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether ``result`` is what ``place``, which is row major, has."""
    same = result.untyped_storage()._cdata == place.untyped_storage()._cdata and result.data_ptr() == place.data_ptr()
    return same and result.is_contiguous() and not result.is_conj() and not result.is_neg()


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
        iterations = self.trip_count  # may be more than range() takes
        if iterations:
            self.ran.add(0)
        while iterations > 0:
            state = self._copies.after_iteration(run, body(run, state))
            iterations -= 1
        for slot, value in zip(self._results, state, strict=True):
            values[slot] = value


class Conditional(ControlFlow):
    """``callees``: the branches, whose results have ``shapes``. A PRED selector takes the first when true, an integer
    that one, or out of range the last. ``kept``: for each result the slot of the operand in whose storage every branch
    leaves it, or None."""

    def __init__(
        self,
        callees: tuple[Callee, ...],
        selector: int,
        operands: Sequence[Sequence[int]],
        results: Sequence[int],
        shapes: Sequence[ArrayShape],
        kept: Sequence[int | None],
        dying: Sequence[int],
    ) -> None:
        super().__init__(callees)
        self._kept = kept
        self._selector = selector
        self._operands = operands
        self._results = results
        self._shapes = shapes
        self._dying = dying

    def __call__(self, run: Run, values: list[Any]) -> None:
        results = self._run(run, values) if run.conditionals is None else self._record(run, run.conditionals, values)
        for slot, value in zip(self._results, results, strict=True):
            values[slot] = value

    def _run(self, run: Run, values: list[Any]) -> list[Any]:
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
        return self.callees[index](run, arguments)

    def _record(self, run: Run, conditionals: Conditionals, values: list[Any]) -> list[Any]:
        """Every branch, each of which leaves its results in the same place."""
        arguments = [[values[slot] for slot in slots] for slots in self._operands]
        chosen = self._chosen(values[self._selector])
        places = [self._place(run, values, number) for number in range(len(self._results))]
        for slot in self._dying:
            values[slot] = None

        def body(index: int) -> None:
            results = self.callees[index](run, arguments[index], places)
            for place, result in zip(places, results, strict=True):
                if isinstance(place, torch.Tensor) and not _lies_at(result, place):
                    place.copy_(result)

        for index, holds in enumerate(chosen):
            conditionals.run_if(holds, functools.partial(body, index))
        return places

    def _place(self, run: Run, values: list[Any], number: int) -> Any:
        """Where every branch leaves result ``number``: the operand that it lies in, or where the plan wants it."""
        shape, kept, result_buffer = self._shapes[number], self._kept[number], values[self._results[number]]
        if shape.element_type is ElementType.TOKEN:
            return ()
        dtype = dtype_of(shape.element_type)
        if kept is not None:
            operand = values[kept]
            if operand.dtype == dtype and tuple(operand.shape) == shape.dims and _lies_at(operand, operand):
                return operand
        return torch.empty(shape.dims, dtype=dtype, device=run.device) if result_buffer is None else result_buffer

    def _chosen(self, selector: torch.Tensor) -> list[torch.Tensor]:
        """For each branch whether it is the one."""
        if selector.dtype is torch.bool:
            return [selector, selector.logical_not()]
        others = [selector == index for index in range(len(self.callees) - 1)]
        another = functools.reduce(torch.logical_or, others) if others else selector != selector
        return [*others, another.logical_not()]
