"""Write one HTML file that shows a program at each stage: graphs, loop nests, steps, memory.

It needs no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from flagos_backend import __version__
from flagos_backend.cli.explain import read_explanation
from flagos_backend.cli.explanation_text import summary
from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.cli.nests import nests_of
from flagos_backend.cli.program_file import read_program
from flagos_backend.cli.session import add_program_argument, compile_file
from flagos_backend.cli.step_times import step_times
from flagos_backend.compile.explanation import source_of
from flagos_backend.devices.target import HOST, NAMED_TARGETS, Target
from flagos_backend.errors import FlagosBackendError
from flagos_backend.importer import import_program
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.printer import print_instruction
from flagos_backend.loop_ir.printer import print_nests
from flagos_backend.loop_ir.region import Region
from flagos_backend.passes.pass_manager import PassContext, PassOptions, run_pipeline
from flagos_backend.passes.pipelines import pipeline_for
from plugin_abi.host import Artifact

_PAGE: Final = Path(__file__).with_name("viz.html")
# A constant's elements, and what else is longer, are cut.
_LONGEST: Final = 400
_LONGEST_NEST: Final = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program_argument(parser)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("flagos-viz.html"), metavar="FILE", help="(default: %(default)s)"
    )
    known = ", ".join(NAMED_TARGETS)
    parser.add_argument("--target", default="cpu", help=f"whose passes and loop nests: {known} (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="run it on random arguments, and time each step")
    parser.add_argument("--rounds", type=int, default=20, help="how often --measure runs it (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise WrongUsage(f"--rounds {options.rounds}: at least one round is needed")
    target = NAMED_TARGETS.get(options.target)
    if target is None:
        raise WrongUsage(f"there is no target {options.target!r}; known are: {', '.join(NAMED_TARGETS)}")
    if options.measure and target is not HOST:
        raise WrongUsage("--measure times the host's steps; leave out --target")
    try:
        data = data_of(options.path, target, options.rounds if options.measure else 0)
    except FlagosBackendError as error:
        raise WrongUsage(f"{options.path}: {error}") from error
    page = page_of(data)
    try:
        options.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise WrongUsage(f"{options.output} cannot be written ({error.strerror}); name another file with -o") from error
    stages = len(data["stages"])
    print(f"{options.output}: {stages} stages, {len(data['nodes'])} different instructions; open it in a browser")
    return 0


def page_of(data: dict[str, Any]) -> str:
    """The page with ``data`` in it: what came from the program is JSON there, and its scripts put it in as text."""
    title = html.escape(f"{data['name']} on {data['target']}")
    # Inside a script nothing but its end is markup, and JSON writes it otherwise.
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e")
    page = _PAGE.read_text(encoding="utf-8")
    return re.sub("@TITLE@|@DATA@", lambda found: title if found[0] == "@TITLE@" else content, page)


def data_of(path: Path, target: Target, rounds: int = 0) -> dict[str, Any]:
    """All that the page shows; ``rounds``: how often the program runs to time its steps. Raises WrongUsage for the
    file, CommandFailed, FlagosBackendError and FlagosStatusError for the program."""
    try:
        serialized = read_program(path)
    except CommandFailed as error:
        raise WrongUsage(str(error)) from error
    program = import_program(serialized)
    nodes = _Nodes()
    stages = [{"name": "input", "computations": nodes.computations(program.module)}]

    def watch(name: str, module: Module) -> None:
        stages.append({"name": name, "computations": nodes.computations(module)})

    pipeline = pipeline_for(target, own_participants=program.process_groups is None)
    result = run_pipeline(pipeline, program.module, PassContext(target), PassOptions(watch=watch))
    data: dict[str, Any] = {
        "made_by": f"flagos {__version__}",
        "name": program.module.name,
        "target": "the host CPU" if target is HOST else f"{target.vendor} {target.architecture}",
        "nodes": nodes.table,
        "stages": stages,
        "passes": [dataclasses.asdict(report) for report in result.reports],
        "nests": [_nest(region, target) for region in nests_of(result.module, target)],
        "notes": list(result.notes),
    }
    if target is HOST:
        data |= _compiled(path, rounds)
    return data


def _nest(region: Region, target: Target) -> dict[str, str]:
    """A loop nest as text, and for an accelerator the kernel that is generated for it alone: its tiling and its Triton
    source, which needs no device. The host's become machine code, of which there is no source."""
    text = _cut(print_nests([region]), _LONGEST_NEST)
    if target is HOST:
        return {"text": text, "kernel": "", "source": ""}
    from flagos_backend.codegen.triton import prepare

    kernel = prepare(region, target)
    return {"text": text, "kernel": kernel.text, "source": _cut(kernel.source, 4 * _LONGEST_NEST)}


def _compiled(path: Path, rounds: int) -> dict[str, Any]:
    """Of the program as it runs on the device: steps, memory, and the backend's own text."""
    with compile_file(path) as compiled:
        explanation = read_explanation(compiled.executable)
        code = compiled.executable.artifact(Artifact.EXPLANATION).decode("utf-8")
        if explanation is None:
            return {"code": code}
        if rounds and explanation.target != "the host CPU":
            raise WrongUsage(f"--measure times the host's steps, and the program runs on {explanation.target}")
        alive = explanation.alive_at_peak()
        buffers = [dataclasses.asdict(b) | {"at_peak": b in alive} for b in explanation.buffers]
        return {
            "code": code,
            "runs_on": explanation.target,
            "summary": summary(explanation),
            "steps": [_relative(dataclasses.asdict(step)) for step in explanation.steps],
            "times": [_relative(dataclasses.asdict(time)) for time in step_times(path, rounds, 0)] if rounds else [],
            "buffers": buffers,
            "notes": list(explanation.notes),
        }


def _relative(step: dict[str, Any]) -> dict[str, Any]:
    return step | {"source": step["source"].removeprefix(f"{Path.cwd()}{os.sep}")}


class _Nodes:
    """Instructions as the page has them, each text once, for stages mostly share them. ``table``: (text, opcode,
    source)."""

    def __init__(self) -> None:
        self.table: list[tuple[str, str, str]] = []
        self._numbers: dict[tuple[str, str, str], int] = {}

    def computations(self, module: Module) -> list[dict[str, Any]]:
        """Of each computation, the entry first: its name, and for each instruction (number in ``table``, name, the
        positions of its operands)."""
        found = sorted(module.computations(), key=lambda computation: computation is not module.entry)
        return [
            {"name": computation.name, "instructions": self._instructions(computation.instructions)}
            for computation in found
        ]

    def _instructions(self, instructions: Iterable[Any]) -> list[tuple[int, str, list[int]]]:
        places: dict[Any, int] = {}
        rows = []
        for place, instruction in enumerate(instructions):
            places[instruction] = place
            _, source = source_of(instruction.metadata)
            source = source.removeprefix(f"{Path.cwd()}{os.sep}")
            row = _cut(print_instruction(instruction), _LONGEST), str(instruction.opcode), source
            number = self._numbers.setdefault(row, len(self.table))
            if number == len(self.table):
                self.table.append(row)
            rows.append((number, instruction.name, [places[operand] for operand in instruction.operands]))
        return rows


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ... ({len(text)} characters)"
