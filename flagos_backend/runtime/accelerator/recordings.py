"""What was recorded of a program on each of its devices, and which launches use it. Between segments.py, which divides
plans, and bridge.py."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.plan import Plan

if TYPE_CHECKING:
    from flagos_backend.collectives.context_peers import ContextPeers
    from flagos_backend.collectives.multi_process import MultiProcessCommunicator
    from flagos_backend.runtime.accelerator.segments import Division, Recorder


class Recordings:
    """Of one program, by the local ordinals of its devices. Every method may be called from several threads.

    ``donors``: the arguments that a launch uses up. ``outcomes``: takes what became of each recording, as a text.
    ``peers``: through which its devices meet, if they do.
    """

    def __init__(
        self, module: Module, donors: tuple[int, ...], outcomes: dict[int, object], peers: ContextPeers | None
    ) -> None:
        self._module, self._donors, self._outcomes = module, donors, outcomes
        self._peers = peers
        self._divisions: dict[int, Division] = {}
        self._recorders: dict[int, tuple[Plan, Recorder]] = {}
        self._recorded_again: set[int] = set()  # the devices

    @functools.cached_property
    def meet(self) -> bool:
        """Whether devices may meet in what is recorded."""
        instructions = (i for computation in self._module.computations() for i in computation.instructions)
        if self._peers is None or not any(instruction.opcode in COLLECTIVES for instruction in instructions):
            return False
        return not self._peers.no_recording

    def record(self, local_ordinal: int, plan: Plan, recorder: Recorder) -> Division:
        """Has ``plan``, which has run and writes over the arguments that are given up, recorded whole or in parts."""
        self._recorders[local_ordinal] = plan, recorder
        return self._divide(local_ordinal, recorder.no_rendezvous)

    def usable(
        self, local_ordinal: int, in_place: bool, run: Run, launch: MultiProcessCommunicator | None
    ) -> Division | None:
        """What a launch can use. ``in_place``: whether the arguments that are given up are its alone. ``launch``: of
        several devices that meet, which use it together: where one cannot, none does, and what they recorded
        differently they record again, the second time without collectives."""
        division = self._divisions.get(local_ordinal) if in_place or not self._donors else None
        if launch is None or not self.meet:
            return division
        own = division and tuple(division.rendezvous)
        every = set(launch.of_process(run.rendezvous("what was recorded"), own))
        if every == {own}:
            return division
        return None if None in every else self._divided_again(local_ordinal, division)

    def _divided_again(self, local_ordinal: int, division: Division | None) -> Division | None:
        """What this launch can use: nothing where the devices have yet to compare what they recorded."""
        from flagos_backend.runtime.accelerator.graphs import GraphReplay
        from flagos_backend.runtime.accelerator.segments import Division

        assert division is not None
        for replay in division.rendezvous.values():
            if isinstance(replay, GraphReplay):
                replay.drop()
        # Where this fails, it fails once.
        plan, recorder = self._recorders[local_ordinal]
        self._divisions[local_ordinal] = Division(plan)
        if local_ordinal in self._recorded_again:
            return self._divide(local_ordinal, "the devices recorded it differently")
        # What broke on one of them may have been of the moment, as memory that another program had.
        self._recorded_again.add(local_ordinal)
        self._divide(local_ordinal, recorder.no_rendezvous, in_parts=True)
        return None

    def _divide(self, local_ordinal: int, no_rendezvous: str, in_parts: bool = False) -> Division:
        # Of accelerators: the host does without.
        from flagos_backend.runtime.accelerator.graphs import GraphReplay
        from flagos_backend.runtime.accelerator.segments import divide

        plan, recorder = self._recorders[local_ordinal]
        division = divide(plan, recorder, recorder.no_conditionals, recorder.warm_up, no_rendezvous, in_parts)
        for replay in division.rendezvous.values():
            if self._peers is not None and isinstance(replay, GraphReplay):
                self._peers.keep(replay)
        self._divisions[local_ordinal] = division
        self.note(local_ordinal, division)
        return division

    def note(self, local_ordinal: int, outcome: object) -> None:
        """What became of the recording, as text for explain."""
        self._outcomes[local_ordinal] = outcome
