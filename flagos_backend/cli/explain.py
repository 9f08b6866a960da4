"""Compile a program and print what it became, step by step."""

from __future__ import annotations

import argparse

from flagos_backend.cli.session import add_program_argument, compile_file
from plugin_abi.host import Artifact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program_argument(parser)


def run(options: argparse.Namespace) -> int:
    with compile_file(options.path) as compiled:
        print(compiled.executable.artifact(Artifact.EXPLANATION).decode("utf-8").rstrip())
    return 0
