"""The kernels of while and conditional, made by plan.py from the plans of their computations. Each takes the slots of
the plan it stands in, so that storage can be given up before the loop is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flagos_backend.kernels.reference.registry import Run, Value

# Runs a plan: takes its flat arguments, emptying the list, and returns its flat results.
Callee = Callable[[Run, list[Any]], list[Any]]
SlotKernel = Callable[[Run, list[Any]], None]


def owned_copy(run: Run, value: torch.Tensor) -> torch.Tensor:
    """``value`` in new row-major storage."""
    return value.clone(memory_format=torch.contiguous_format)


def while_loop(
    condition: Callee,
    body: Callee,
    operands: Sequence[int],
    results: Sequence[int],
    dying: Sequence[int],
    copied_first: Sequence[int],
    copied_each_turn: Sequence[int],
    trip_count: int | None,
) -> SlotKernel:
    """Runs ``body`` on its own results while ``condition`` holds, or ``trip_count`` times when that is known.

    ``copied_first`` and ``copied_each_turn`` number the values that the body writes over and must not share.
    """

    def run_while(run: Run, values: list[Any]) -> None:
        state = [values[slot] for slot in operands]
        for slot in dying:
            values[slot] = None
        for index in copied_first:
            state[index] = owned_copy(run, state[index])
        turns = trip_count
        while turns > 0 if turns is not None else condition(run, state.copy())[0].item():
            state = body(run, state)
            for index in copied_each_turn:
                state[index] = owned_copy(run, state[index])
            if turns is not None:
                turns -= 1
        for slot, value in zip(results, state, strict=True):
            values[slot] = value

    return run_while


def conditional(
    selector: int,
    branches: Sequence[Callee],
    operands: Sequence[Sequence[int]],
    results: Sequence[int],
    dying: Sequence[int],
    copied_first: Sequence[Sequence[int]],
) -> SlotKernel:
    """Runs one branch: by a PRED selector the first when true, by an integer that one, or out of range the last."""
    last = len(branches) - 1

    def run_conditional(run: Run, values: list[Any]) -> None:
        choice = values[selector].item()
        if choice is True:
            index = 0
        elif choice is False:
            index = 1
        else:
            index = choice if 0 <= choice <= last else last
        arguments = [values[slot] for slot in operands[index]]
        for slot in dying:
            values[slot] = None
        for leaf in copied_first[index]:
            arguments[leaf] = owned_copy(run, arguments[leaf])
        for slot, value in zip(results, branches[index](run, arguments), strict=True):
            values[slot] = value

    return run_conditional


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
