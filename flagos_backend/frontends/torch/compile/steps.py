"""What a graph does, step by step: compiled programs, and between them the operators that PyTorch runs on the same
tensors. sequence.py makes the steps, runner.py a function of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flagos_backend.frontends.torch.compile.segments import CompiledGraph


@dataclass(frozen=True, slots=True)
class Value:
    """What a step before gave, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Expected:
    """A traced tensor. ``moves``: whether a result that lies otherwise is copied into these strides, and not refused.
    ``always``: whether each call looks; the first one does anyway, and programs look at what they are given."""

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    moves: bool
    always: bool


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """A compiled program."""

    program: CompiledGraph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallStep:
    """A call into PyTorch, of Values and of constants. ``place``: the operator, and where it stands in the user's
    program; empty where it cannot fail by itself. ``names``: its arguments', in order, where an operator's schema says
    what it may do; ``writes``: those that it may write to."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: str
    place: str = ""
    expected: Expected | None = None
    names: tuple[str, ...] = ()
    writes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ItemStep:
    """A part of what a step gave; without a key, the whole of it by another name."""

    source: str
    output: str
    key: int | str | None = None
    place: str = ""
    expected: Expected | None = None


Step = ProgramStep | CallStep | ItemStep


@dataclass(frozen=True, slots=True)
class Sequence:
    """``inputs``: the names of what it is called with. ``outputs``: Values and constants."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
