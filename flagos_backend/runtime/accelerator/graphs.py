"""Records plans as graphs that the native side patches and launches (native/python_replays.cc): what segments.py asks
for on a device that has such graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flagos_backend.errors import CaptureRefused
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator.capture import ORDERS, Captures, Memory, capture
from flagos_backend.runtime.accelerator.conditional import NativeConditionals
from flagos_backend.runtime.plan import Plan

# (address of the native accelerator, graphs and arrays as Captures has them) -> (handle, nodes, patches). The handle
# owns the native replay. Raises RuntimeError that says why the captures cannot be replayed.
NativeMake = Callable[[int, tuple[Any, ...], tuple[Any, ...]], tuple[object, int, int]]
# (handle, the address of each array); gives up the GIL.
NativeLaunch = Callable[[object, tuple[int, ...]], None]


class GraphReplay:
    """A graph with its memory, and the native replay of it."""

    def __init__(self, captures: Captures, made: tuple[object, int, int], launch: NativeLaunch) -> None:
        self.handle, self._nodes, self._patches = made
        self.overwritten = captures.overwritten
        self._graph = captures.kept
        self._conditionals = len(captures.graphs[0][2])
        self._launch = launch

    def launch(self, arrays: Sequence[Any]) -> None:
        self._launch(self.handle, tuple([_address(array) for array in arrays]))

    def __str__(self) -> str:
        conditionals = f", of which {self._conditionals} conditional," if self._conditionals else ""
        return f"a graph of {self._nodes} nodes{conditionals} with {self._patches} addresses"


class GraphRecorder:
    """Records the parts of one program on one device. Their temporaries share memory, as they run one after another.
    ``no_conditionals``: why no plan is recorded in which data decides what runs, or ""."""

    def __init__(self, native: tuple[NativeMake, NativeLaunch], conditionals: NativeConditionals, run: Run) -> None:
        self._make, self._launch = native
        self._conditionals = conditionals
        self.no_conditionals = _reason_against(conditionals)
        self._run = run
        self._memory: Memory | None = None

    def __call__(self, plan: Plan) -> GraphReplay:
        reason = ""
        for order in ORDERS:
            captures = capture(plan, self._run, self._memory, self._used_conditionals, order)
            try:
                made = self._make(self._conditionals.accelerator, captures.graphs, captures.arrays)
            except RuntimeError as error:
                reason = str(error)
                del captures  # before there are others
                continue
            self._memory = captures.memory
            return GraphReplay(captures, made, self._launch)
        raise CaptureRefused(reason=reason)

    @property
    def _used_conditionals(self) -> NativeConditionals | None:
        return None if self.no_conditionals else self._conditionals


def _reason_against(conditionals: NativeConditionals) -> str:
    try:
        conditionals.prepare(conditionals.accelerator)
    except RuntimeError as error:
        return str(error)
    return ""


def _address(array: Any) -> int:
    """0 for a token."""
    return array.data_ptr() if isinstance(array, torch.Tensor) else 0
