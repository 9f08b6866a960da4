"""Values in the slots of a plan: where the leaves of a tuple are, and what puts them there. Used by plan_builder.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flagos_backend.kernels.reference.registry import Kernel, Run, Value
from flagos_backend.process.torch_loading import torch

# Slots of the leaves of a value that may be a tuple.
Tree = int | tuple["Tree", ...]


def flatten(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for branch in tree:
            yield from flatten(branch)


def pack(template: Tree) -> Kernel:
    """Makes the tuple value of flat operands."""
    return lambda run, *values: _packed(template, iter(values))


def _packed(tree: Tree, values: Iterator[Value]) -> Value:
    return next(values) if isinstance(tree, int) else tuple(_packed(t, values) for t in tree)


def spread(kernel: Kernel, operands: Sequence[int], results: Sequence[int]) -> Kernel:
    """Puts the leaves of a tuple result into their slots."""

    def run_for_effect(run: Run, values: list[Any]) -> None:
        kernel(run, *[values[slot] for slot in operands])

    if not results:  # The empty tuple of a callback without results, which looks like a token.
        return run_for_effect

    def run_spread(run: Run, values: list[Any]) -> None:
        outcome = kernel(run, *[values[slot] for slot in operands])
        for slot, value in zip(results, _flat_values(outcome), strict=True):
            values[slot] = value

    return run_spread


def in_buffers(into: Kernel, operands: Sequence[int], results: Sequence[int]) -> Kernel:
    """Computes into what the results' slots hold already, if anything."""

    def run_in_buffers(run: Run, values: list[Any]) -> None:
        outcome = into(run, [values[slot] for slot in results], *[values[slot] for slot in operands])
        for slot, value in zip(results, _flat_values(outcome), strict=True):
            values[slot] = value

    return run_in_buffers


def contiguous(run: Run, value: torch.Tensor) -> torch.Tensor:
    return value.contiguous()


def _flat_values(value: Value) -> Iterator[Value]:
    # A token is the empty tuple and a leaf; an empty tuple shape has no leaves and is not spread.
    if isinstance(value, torch.Tensor) or not value:
        yield value
    else:
        for element in value:
            yield from _flat_values(element)
