"""Programs that the backend of this process has compiled, as objects: what `flagos explain` says of them in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flagos_backend import bridge
from flagos_backend.codegen.cpu.step_notes import StepNote
from flagos_backend.compile.compiler import CompiledProgram
from flagos_backend.runtime.accelerator.graphs import GraphReplay
from flagos_backend.runtime.accelerator.segments import Division
from flagos_backend.runtime.plan import Plan
from plugin_abi.host import Executable


def compiled_program(executable: Executable) -> CompiledProgram:
    """Of several executables of one program, the newest one's."""
    return bridge._programs[executable.describe().fingerprint]


def plan_of(compiled: CompiledProgram) -> Plan:
    """What runs where nothing is replayed."""
    return compiled.plans(compiled.device).donating


def division_of(executable: Executable) -> Division:
    """How the first device replays it, after it was recorded."""
    outcome = compiled_program(executable).outcomes[0]
    assert isinstance(outcome, Division), outcome
    return outcome


def graph_of(executable: Executable) -> GraphReplay:
    """The one graph that the first device replays."""
    replay = division_of(executable).whole
    assert isinstance(replay, GraphReplay), replay
    return replay


def with_nested(notes: Iterable[StepNote]) -> Iterator[StepNote]:
    """Steps of a native program, and those of the programs that they run."""
    for note in notes:
        yield note
        for _, nested in note.nested:
            yield from with_nested(nested)
