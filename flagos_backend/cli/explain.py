"""Say what a program became: what runs where, memory, expected time, what is slow, what fell back."""

from __future__ import annotations

import argparse

from flagos_backend import bridge
from flagos_backend.cli import explanation_text
from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.measuring import measure
from flagos_backend.cli.session import add_program_argument, compile_file
from flagos_backend.compile.explanation import Explanation
from plugin_abi.host import Artifact, Executable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program_argument(parser)
    parser.add_argument("--measure", action="store_true", help="run it on random arguments and time it")
    parser.add_argument("--rounds", type=int, default=20, help="how often --measure runs it (default: %(default)s)")
    parser.add_argument("--kernels", action="store_true", help="every step: who computes it, its work, its line")
    parser.add_argument("--memory", action="store_true", help="every temporary, and what lives at the peak")
    parser.add_argument("--matches", action="store_true", help="what was matched and measured while compiling")
    parser.add_argument("--nests", action="store_true", help="what each loop nest computes, as text that parses")
    parser.add_argument("--steps", action="store_true", help="the backend's own text, with loops and branches inside")
    parser.add_argument("--json", action="store_true", help="everything, as JSON alone")


def run(options: argparse.Namespace) -> int:
    if options.rounds < 1:
        raise CommandFailed(f"--rounds {options.rounds}: at least one round is needed")
    with compile_file(options.path) as compiled:
        executable = compiled.executable
        explanation = read_explanation(executable)
        if options.json:
            if explanation is None:
                raise CommandFailed("this backend explains programs as text only; leave out --json")
            print(explanation.to_json())
            return 0
        if explanation is not None:
            measured = measure(executable, options.rounds) if options.measure else None
            parts = [explanation_text.summary(explanation, measured)]
            parts += [explanation_text.kernels(explanation)] if options.kernels else []
            parts += [explanation_text.memory(explanation)] if options.memory else []
            parts += [explanation_text.matches(explanation)] if options.matches else []
            parts += [explanation_text.nests(explanation)] if options.nests else []
            print("\n\n".join(filter(None, parts)))
        if options.steps or explanation is None:
            print(executable.artifact(Artifact.EXPLANATION).decode("utf-8").rstrip())
    return 0


def read_explanation(executable: Executable) -> Explanation | None:
    """The executable's explanation as data; None where its backend, or its process, is another: there is only text."""
    return bridge.explanation(executable.describe().fingerprint)
