"""What a plan has in memory while it runs, looked at from outside: by the arrays in the slots after each step, those of
the loops and branches that run too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.plan import CompiledStep, Plan


def run_and_count(plan: Plan, arguments: Sequence[torch.Tensor]) -> tuple[list[Any], int]:
    """The results of ``plan``, and the most bytes that were there at once beside arguments, constants and what the
    results lie in. What a step makes and drops again is not seen. The plan is of no use afterwards."""
    plans = list(_plans(plan))
    lent = {value.data_ptr() for value in _arrays((*arguments, *(v for each in plans for v in each.initial)))}
    frames: list[list[Any]] = []  # the slots of the plans that run, the outermost first
    alive: list[dict[int, int]] = []
    kept: list[torch.UntypedStorage] = []  # so that no address is used twice

    def look() -> None:
        storages = [array.untyped_storage() for values in frames for array in _arrays(values)]
        made = [storage for storage in storages if storage.data_ptr() not in lent]
        kept.extend(made)
        alive.append({storage.data_ptr(): storage.nbytes() for storage in made})

    def watched(step: CompiledStep, is_first: bool, is_last: bool) -> CompiledStep:
        kernel, operands, result, frees = step

        def run_watched(run: Run, values: list[Any]) -> None:
            if is_first:
                frames.append(values)
            if operands is None:
                kernel(run, values)
            else:
                values[result] = kernel(run, *[values[slot] for slot in operands])
            look()
            if is_last:
                frames.pop()

        return run_watched, None, -1, frees

    for each in plans:
        last = len(each._compiled) - 1
        steps = tuple(watched(step, number == 0, number == last) for number, step in enumerate(each._compiled))
        object.__setattr__(each, "_compiled", steps)
    results = plan.run(Run(), [*arguments])
    returned = {array.untyped_storage().data_ptr() for array in _arrays(results)}
    return results, max(sum(size for at, size in there.items() if at not in returned) for there in alive)


def _plans(plan: Plan) -> Iterator[Plan]:
    yield plan
    for step in plan.steps:
        for nested in step.nested:
            yield from _plans(nested)


def _arrays(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _arrays(value)
