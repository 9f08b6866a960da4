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
# Of accelerators only: on the host ATen's kernels of these run best.
_OF_ACCELERATORS: dict[Overload, Rule] = {}
_FAMILIES = (
    "bags",
    "complex_numbers",
    "contractions",
    "creation",
    "elementwise",
    "functions",
    "indexing",
    "movement",
    "ordering",
    "positions",
    "reductions",
    "scans",
    "scatters",
    # Without torch.distributed there are no such operators.
    *(("collectives",) if torch.distributed.is_available() else ()),
)


def lowering(*overloads: Overload, on_host: bool = True) -> Callable[[R], R]:
    """Registers the decorated function as the rule of ``overloads``. ``on_host``: whether it is the host's too, where
    ATen's kernel is not what runs best."""

    def register(rule: R) -> R:
        for overload in overloads:
            if overload in _RULES or overload in _OF_ACCELERATORS:
                raise ValueError(f"{overload} has two lowerings")
            (_RULES if on_host else _OF_ACCELERATORS)[overload] = rule
        return rule

    return register


@functools.cache
def _load_families() -> None:
    # They import this module, so they are imported at first use and not here.
    for family in _FAMILIES:
        importlib.import_module(f"flagos_backend.frontends.torch.compile.lowering.{family}")


def rule_of(target: Any, *, on_host: bool) -> Rule | None:
    """The rule of a node's target where programs run on the host, or do not; None if there is none."""
    _load_families()
    rule = _RULES.get(target)
    return rule if rule is not None or on_host else _OF_ACCELERATORS.get(target)
