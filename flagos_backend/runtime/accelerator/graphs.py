"""Records plans as graphs that the native side patches and launches (native/python_replays.cc): what segments.py asks
for on a device that has such graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flagos_backend.collectives import Communicator
from flagos_backend.errors import CaptureRefused
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime.accelerator.capture import (
    ATTEMPTS,
    LENT_ATTEMPT,
    Attempt,
    Captures,
    NativeGraph,
    Recording,
    capture,
)
from flagos_backend.runtime.accelerator.conditional import NativeConditionals
from flagos_backend.runtime.accelerator.lending import lendable
from flagos_backend.runtime.accelerator.memory import give_back, shared_memory
from flagos_backend.runtime.accelerator.warm_up import warm_up
from flagos_backend.runtime.plan import Plan

logger = logging.getLogger("flagos_backend")

_Places = tuple[tuple[int, int, int], ...]
# (address of the native accelerator, graphs, arrays and stand-ins as Captures has them) -> what they prove. Raises
# RuntimeError that says why no graph of the plan can be replayed.
NativeCompare = Callable[[int, tuple[NativeGraph, ...], _Places, _Places], object]
# (proof, graph) -> (handle, nodes, patches). The handle owns the native replay. Raises RuntimeError that says why this
# graph cannot be replayed.
NativeMake = Callable[[object, NativeGraph], tuple[object, int, int]]
# (handle, the address of each array); gives up the GIL.
NativeLaunch = Callable[[object, tuple[int, ...]], None]
# (handle): its graph is not launched again, nor looked at.
NativeDrop = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class NativeReplays:
    compare: NativeCompare
    make: NativeMake
    launch: NativeLaunch
    drop: NativeDrop


class GraphReplay:
    """A graph of ``nodes`` nodes with its memory, and the native replay of it. ``lent``: how many of its arrays
    collectives read and write where they lie. ``alone``: why it has memory of its own, or ""."""

    def __init__(self, kept: Recording, made: tuple[object, int, int], native: NativeReplays, alone: str = "") -> None:
        self.handle, self.nodes, self._patches = made
        self.overwritten = kept.overwritten
        self.lent = len(kept.lent)
        self._kept = kept
        self._native = native
        self.alone = alone

    @property
    def conditionals(self) -> int:
        """How many of the nodes are conditional."""
        return len(self._kept.conditionals)

    def launch(self, arrays: Sequence[Any]) -> None:
        self._native.launch(self.handle, tuple([_address(array) for array in arrays]))

    def drop(self) -> None:
        """Gives the graph up: it is not launched again. Its memory stays, as a launch may be under way."""
        self._native.drop(self.handle)
        self._kept.give_up()

    def __str__(self) -> str:
        conditionals = f", of which {self.conditionals} conditional," if self.conditionals else ""
        alone = f", in memory of its own ({self.alone})" if self.alone else ""
        lent = f", {self.lent} arrays lent to collectives" if self.lent else ""
        return f"a graph of {self.nodes} nodes{conditionals} with {self._patches} addresses{lent}{alone}"


class GraphRecorder:
    """Records the parts of one program on one device. Their temporaries lie where those of the other programs do.
    ``no_conditionals``: why no plan is recorded in which data decides what runs, or ""; ``no_rendezvous``: why none in
    which devices meet, or ""."""

    def __init__(self, native: NativeReplays, conditionals: NativeConditionals, run: Run) -> None:
        self._native = native
        self._conditionals = conditionals
        self.no_conditionals = _reason_against(conditionals)
        self.no_rendezvous = run.communicator.no_recording if run.communicator else Communicator.no_recording
        self._run = run

    def __call__(self, plan: Plan) -> GraphReplay:
        reason = ""
        if not self.no_rendezvous and (lent := lendable(plan)):
            try:
                return self._recorded(plan, LENT_ATTEMPT, lent)
            except (RuntimeError, CaptureRefused) as error:
                logger.info("%s: collectives are given copies, as %s", plan.name, error)
        for attempt in ATTEMPTS:
            try:
                return self._recorded(plan, attempt)
            except RuntimeError as error:
                reason = str(error)
        raise CaptureRefused(reason=reason)

    def warm_up(self, plan: Plan) -> None:
        warm_up(plan, self._run)

    def _recorded(self, plan: Plan, attempt: Attempt, lent: Sequence[int] = ()) -> GraphReplay:
        captures = capture(plan, self._run, self._used_conditionals, attempt, lent)
        graphs = captures.graphs
        proof = self._native.compare(self._conditionals.accelerator, graphs, captures.arrays, captures.stand_ins)
        captures.others = ()  # before there is another
        replay = self._kept(captures, proof, graphs[0])
        del captures
        give_back(self._run.device)
        return replay

    def _kept(self, captures: Captures, proof: object, first: NativeGraph) -> GraphReplay:
        """One more capture, with its temporaries where those of other graphs are; the first, if it has none, or where
        the other cannot be shown to do the same."""
        reason = ""
        if first[1]:
            try:
                kept = captures.capture_in(shared_memory(self._run.device))
                return GraphReplay(kept, self._native.make(proof, kept.native()), self._native)
            except CaptureRefused as refusal:
                reason = refusal.facts["reason"]
            except RuntimeError as error:
                reason = str(error)
        return GraphReplay(captures.first, self._native.make(proof, first), self._native, reason)

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
