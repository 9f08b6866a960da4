"""A program on flagos beside XLA's own platform, in turns, and the steps that lose most against the roofline. The part
of ``flagos bench --vs``; versus_inductor.py is that of PyTorch's programs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flagos_backend.cli.agreement import Difference, differences
from flagos_backend.cli.explain import read_explanation
from flagos_backend.cli.explanation_text import seconds, table
from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.cli.program_file import read_program
from flagos_backend.cli.running import random_arguments, random_bytes, run_once
from flagos_backend.cli.session import compile_file
from flagos_backend.cli.step_times import StepTime, step_times
from flagos_backend.importer import schema
from flagos_backend.importer.program import import_program
from flagos_backend.ir.types import ArrayShape
from plugin_abi.host import Buffer, Executable

# On an accelerator the third launch records what the others replay.
_WARM_UP = 4
_LOSERS = 3


@dataclass(frozen=True, slots=True)
class Loser:
    """A step whose median exceeds its expected time, by the roofline, by ``lost`` seconds."""

    text: str
    source: str
    seconds: float
    expected: float
    lost: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of a run in seconds, from the call until its outputs are there. ``ratio``: the peer's over ours, above 1
    flagos is faster. ``expected``: by the roofline; 0: nobody stated it. ``losers``: the worst first. ``reference``:
    whose results ours are compared with, "" for the peer's. ``inputs``: which it ran on."""

    program: str
    target: str
    peer: str
    rounds: int
    seconds: float
    peer_seconds: float
    ratio: float
    expected: float
    losers: tuple[Loser, ...]
    losers_note: str = ""
    differences: tuple[Difference, ...] = ()
    reference: str = ""
    inputs: str = "random arguments"

    @property
    def agrees(self) -> bool:
        """Whether both computed the same."""
        return all(difference.agrees for difference in self.differences)

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"agrees": self.agrees}, indent=1)

    def text(self) -> str:
        rows = [("", "median", "of the roofline")]
        for name, spent in (("flagos", self.seconds), (self.peer, self.peer_seconds)):
            rows.append((name, seconds(spent), f"{self.expected / spent:.0%}" if self.expected else "unknown"))
        lines = [f"{self.program} on {self.target}, {self.rounds} rounds in turns on {self.inputs}", *table(rows)]
        lines.append(f"ratio     {self.ratio:.2f}: flagos is {'faster' if self.ratio > 1 else 'not faster'}")
        if self.expected:
            lines.append(f"expected  at least {seconds(self.expected)}, by the roofline")
        lines += self._results()
        if self.losers:
            lines.append("loses most against the roofline")
            lines += [f"  {line}" for line in table([("lost", "takes", "expected", "step"), *map(_row, self.losers)])]
        if self.losers_note:
            lines.append(self.losers_note)
        return "\n".join(lines)

    def _results(self) -> list[str]:
        if self.agrees:
            agree = f"agree with {self.reference}'s" if self.reference else "agree"
            return [f"results   {agree}"] if self.differences else []
        differing = [difference.text() for difference in self.differences if not difference.agrees]
        cure = "flagos opt --bisect finds the pass"
        told = f"results   DIFFER from those of {self.reference or self.peer}"
        return [told if self.reference else f"{told}; {cure}", *(f"  {text}" for text in differing)]


def _row(loser: Loser) -> tuple[str, str, str, str]:
    where = f", {loser.source}" if loser.source else ""
    return seconds(loser.lost), seconds(loser.seconds), seconds(loser.expected), loser.text + where


def compare(path: Path, peer: str, rounds: int, seed: int) -> Comparison:
    """Runs the program of a file on both. Raises WrongUsage where there is no such peer, CommandFailed for the program
    and FlagosStatusError."""
    try:
        read_program(path)
    except CommandFailed as error:
        raise WrongUsage(str(error)) from error
    with ExitStack() as stack:
        compiled = stack.enter_context(compile_file(path))
        executable = compiled.executable
        if len(executable.describe().devices) != 1:
            raise CommandFailed(f"{path} is a program for several devices; bench runs programs for one")
        shapes = [parameter.shape for parameter in import_program(compiled.program).module.entry.parameters]
        arguments = random_arguments(executable, shapes, seed, stack)
        run_peer, results_of_peer = _peer(compiled.program, peer, shapes, seed)
        found = differences(_results_of(executable, arguments), results_of_peer())
        for _ in range(_WARM_UP):
            run_once(executable, arguments)
            run_peer()
        taken = [(run_once(executable, arguments)[1], run_peer()) for _ in range(rounds)]
        ours, theirs = (statistics.median(times) for times in zip(*taken, strict=True))
        explanation = read_explanation(executable)
        on_host = explanation is not None and explanation.target == "the host CPU"
        losers: tuple[Loser, ...] = ()
        note = "steps are not timed: an accelerator's run later than the host's calls of them"
        if on_host:
            losers, note = losers_of(step_times(path, rounds, seed)), ""
        return Comparison(
            program=executable.describe().name,
            target=explanation.target if explanation else "an unknown target",
            peer=f"XLA's {peer}",
            rounds=rounds,
            seconds=ours,
            peer_seconds=theirs,
            ratio=theirs / ours,
            expected=explanation.seconds if explanation else 0.0,
            losers=losers,
            losers_note=note,
            differences=found,
        )


def _results_of(executable: Executable, arguments: Sequence[Buffer]) -> list[np.ndarray]:
    from flagos_backend.frontends.jax.trampolines import DTYPES

    outputs, events = executable.execute([list(arguments)], non_donatable=range(len(arguments)))
    for event in events:
        event.wait()
    results = []
    for output in outputs[0]:
        dtype = DTYPES[int(output.element_type)]
        results.append(np.frombuffer(bytes(output.to_host()), dtype).reshape(output.dims))
    for handle in (*outputs[0], *events):
        handle.close()
    return results


def _peer(
    program: bytes, peer: str, shapes: Sequence[Any], seed: int
) -> tuple[Callable[[], float], Callable[[], list[np.ndarray]]]:
    """What runs the program on the first device of XLA's platform, on the same arguments, and takes the time; and what
    gives its results."""
    try:
        from flagos_backend.frontends.jax import jax_internals
        from flagos_backend.frontends.jax.trampolines import DTYPES
    except ImportError as error:
        raise WrongUsage(f"--vs {peer} needs JAX ({error}); pip install 'flagos[jax]'") from error
    import jax

    try:
        device = jax.devices(peer)[0]
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        cure = "install the jaxlib that has it"
        raise WrongUsage(f"there is no platform {peer} of JAX here ({reason}); {cure}") from error
    module = schema.HloModuleProto()
    module.MergeFromString(schema.Program.FromString(program).module.SerializeToString())
    # No argument is given up, on neither side.
    module.ClearField("input_output_alias")
    module.ClearField("buffer_donor")
    try:
        executable = jax_internals.compile_hlo(module.SerializeToString(), device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CommandFailed(f"XLA's {peer} does not compile the program: {reason}") from error
    rng = np.random.default_rng(seed)
    arrays = [
        np.frombuffer(random_bytes(shape, rng), DTYPES[shape.element_type]).reshape(shape.dims)
        for shape in shapes
        if isinstance(shape, ArrayShape)
    ]
    with jax.enable_x64(True):
        arguments = [jax.device_put(array, device) for array in arrays]

    def run() -> float:
        began = time.perf_counter()
        for output in executable.execute(arguments):
            output.block_until_ready()
        return time.perf_counter() - began

    def results() -> list[np.ndarray]:
        return [np.asarray(output) for output in executable.execute(arguments)]

    return run, results


def losers_of(steps: Sequence[StepTime]) -> tuple[Loser, ...]:
    """The steps that exceed their expected times most."""
    found = (Loser(step.text, step.source, step.seconds, step.expected, step.seconds - step.expected) for step in steps)
    return tuple(sorted((f for f in found if f.lost > 0), key=lambda f: -f.lost)[:_LOSERS])
