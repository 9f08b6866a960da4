"""What the subcommands that use a device share: the accepted backend, a context of it, and a program compiled there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.program_file import read_program
from plugin_abi import loader
from plugin_abi.host import Context, Executable


@dataclass(frozen=True)
class Compiled:
    """A program file on the device: its serialized flagos.Program, and seconds spent compiling."""

    program: bytes
    executable: Executable
    seconds: float


@contextmanager
def open_context() -> Iterator[Context]:
    """A context of the backend that serves flagos. Raises CommandFailed with the loader's reason if there is none."""
    backend = loader.load().accepted
    if backend is None:
        raise CommandFailed(loader.no_such_device_message())
    with Context(backend) as context:
        yield context


@contextmanager
def compile_file(path: Path) -> Iterator[Compiled]:
    """The program of a file, compiled. Raises CommandFailed for the file and FlagosStatusError for the program."""
    program = read_program(path)
    with open_context() as context:
        began = time.perf_counter()
        with Executable.compile(context, program) as executable:
            yield Compiled(program, executable, time.perf_counter() - began)


def add_program_argument(parser: argparse.ArgumentParser) -> None:
    """The argument that names a program file."""
    parser.add_argument(
        "path", type=Path, metavar="PROGRAM", help="HLO or StableHLO, text or binary, or a serialized flagos.Program"
    )
