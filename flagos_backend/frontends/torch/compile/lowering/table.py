"""The table of lowerings: an ATen overload to the function that emits its HLO. Families register here by decorator."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter

# What a node of the graph is while it is lowered: tensors are instructions, symbolic numbers are numbers by now.
Value = Any
Overload = torch._ops.OpOverload


class Rule(Protocol):
    """Emits an operator as an instruction, or a list of them. ``result`` is its traced value, a tensor or a list of
    them; ``args`` are the node's, tensors as instructions. Raises NoLoweringError for a case it does not have, before
    or after emitting: the operator then runs as itself."""

    def __call__(self, emitter: Emitter, result: Any, *args: Any, **kwargs: Any) -> Any: ...


R = TypeVar("R", bound=Rule)

_RULES: dict[Overload, Rule] = {}
_FAMILIES = (
    "complex_numbers",
    "contractions",
    "creation",
    "elementwise",
    "functions",
    "movement",
    "positions",
    "reductions",
    # Without torch.distributed there are no such operators.
    *(("collectives",) if torch.distributed.is_available() else ()),
)


def lowering(*overloads: Overload) -> Callable[[R], R]:
    """Registers the decorated function as the rule of ``overloads``."""

    def register(rule: R) -> R:
        for overload in overloads:
            if overload in _RULES:
                raise ValueError(f"{overload} has two lowerings")
            _RULES[overload] = rule
        return rule

    return register


@functools.cache
def _load_families() -> None:
    # They import this module, so they are imported at first use and not here.
    for family in _FAMILIES:
        importlib.import_module(f"flagos_backend.frontends.torch.compile.lowering.{family}")


def rule_of(target: Any) -> Rule | None:
    """The rule of a node's target, or None."""
    _load_families()
    return _RULES.get(target)
