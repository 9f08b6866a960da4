"""Runs an executable on random arguments and takes the time of a launch."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass

from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.running import random_arguments, run_once
from flagos_backend.importer.program import import_program
from plugin_abi.host import Artifact, Executable

# On an accelerator the third launch records what the others replay.
_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """The median of ``rounds`` launches, in seconds, from the call until the outputs are there."""

    seconds: float
    rounds: int


def measure(executable: Executable, rounds: int = 20, seed: int = 0) -> Measured:
    """Launches on random arguments. Raises CommandFailed for programs that cannot run so."""
    about = executable.describe()
    if len(about.device_assignment) != 1:
        raise CommandFailed(f"{about.name} is a program for several devices; only those for one are measured")
    program = import_program(executable.artifact(Artifact.OPTIMIZED_PROGRAM))
    shapes = [parameter.shape for parameter in program.module.entry.parameters]
    with ExitStack() as stack:
        arguments = random_arguments(executable, shapes, seed, stack)
        for _ in range(_WARM_UP):
            run_once(executable, arguments)
        return Measured(statistics.median(run_once(executable, arguments)[1] for _ in range(rounds)), rounds)
