"""Record what a program or a command does on flagos: one file for Perfetto, and where its time went.

The exit status is the command's own (128 and the signal that ended it), 127 where there is no such command, and 126
where it cannot be run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from flagos_backend import __version__
from flagos_backend.cli import trace_file, trace_text
from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.cli.running import random_arguments, run_once
from flagos_backend.cli.session import compile_file
from flagos_backend.importer.program import import_program

_OUTPUT = Path("flagos-trace.json")


class _NotRun(CommandFailed):
    """A command that never began, with the exit status that a shell would give."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "flagos trace [options] PROGRAM\n       flagos trace [options] FOLDER\n"
        "       flagos trace [options] -- COMMAND [ARGUMENT ...]"
    )
    parser.epilog = (__doc__ or "").partition("\n\n")[2]
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        metavar="PROGRAM",
        help=f"a program file, which runs on random arguments; or a folder in which {trace_file.VARIABLE} had recorded",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=_OUTPUT, metavar="FILE", help="of the trace (default: %(default)s)"
    )
    parser.add_argument("--top", type=int, default=10, help="rows of each table (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="how often PROGRAM runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of its random arguments (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    # What stands behind `--`; None where there is none.
    command: Sequence[str] | None = options.command
    if (options.path is None) == (not command):
        raise WrongUsage("give a program file, a folder, or a command behind --: flagos trace -- python train.py")
    for name in ("top", "rounds"):
        if getattr(options, name) < 1:
            raise CommandFailed(f"--{name} {getattr(options, name)}: at least one is needed")
    with _written(options.output) as stream, tempfile.TemporaryDirectory(prefix="flagos-trace-") as folder:
        has_run = options.path is not None and options.path.is_dir()
        parts = options.path if has_run else Path(folder)
        began = time.perf_counter()
        if command:
            what, status = shlex.join(command), _run_command(command, parts)
        elif has_run:
            what, status = str(options.path), _require_parts(parts)
        else:
            what, status = str(options.path), _run_program(options.path, options.rounds, options.seed, parts)
        took = f" {time.perf_counter() - began:.3g} s," if not has_run else ""
        summary = trace_text.Summary()
        about = {"recorded by": f"flagos {__version__}", "command": what}
        trace_file.write(stream, summary.all(trace_file.events_of(parts)), about)
        if not trace_file.has_parts(parts):
            print(f"flagos: {what} did not use the device flagos: its trace is empty", file=sys.stderr)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    ended = "" if status == 0 else f", exit status {status}"
    print(f"trace of {what}:{took} {_count(len(summary.processes), 'process', 'processes')}{ended}")
    print(f"  {options.output} has {summary.events} events; ui.perfetto.dev shows them")
    print(trace_text.text_of(summary, options.top, width))
    return status


def _run_program(path: Path, rounds: int, seed: int, parts: Path) -> int:
    """Compiles and runs a program file. Raises what compile_file and random_arguments do."""
    with recording(parts), compile_file(path) as compiled, ExitStack() as stack:
        if len(compiled.executable.describe().devices) != 1:
            raise CommandFailed(f"{path} is a program for several devices; trace the command that runs it, behind --")
        shapes = [parameter.shape for parameter in import_program(compiled.program).module.entry.parameters]
        arguments = random_arguments(compiled.executable, shapes, seed, stack)
        for _ in range(rounds):
            run_once(compiled.executable, arguments)
    return 0


def _require_parts(folder: Path) -> int:
    """0. Raises CommandFailed for a folder in which nothing was recorded."""
    if not trace_file.has_parts(folder):
        raise CommandFailed(f"{folder} has no records; run a program with {trace_file.VARIABLE}={folder}")
    return 0


@contextmanager
def recording(parts: Path) -> Iterator[None]:
    """Contexts that are opened meanwhile record into ``parts``."""
    before = os.environ.get(trace_file.VARIABLE)
    os.environ[trace_file.VARIABLE] = str(parts)
    try:
        yield
    finally:
        if before is None:
            del os.environ[trace_file.VARIABLE]
        else:
            os.environ[trace_file.VARIABLE] = before


def _run_command(command: Sequence[str], parts: Path) -> int:
    """Its exit status. An interrupt is the command's to answer."""
    try:
        process = subprocess.Popen(command, env=os.environ | {trace_file.VARIABLE: str(parts)})
    except FileNotFoundError:
        raise _NotRun(f"there is no command {command[0]!r}; name one that the shell would find", 127) from None
    except OSError as error:
        raise _NotRun(f"{command[0]!r} cannot be run ({error.strerror})", 126) from None
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            continue
        return status if status >= 0 else 128 - status


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """A file that becomes ``path`` once all is written; found out before anything runs. Raises CommandFailed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    is_special = path.exists() and not path.is_file()
    try:
        stream = path.open("w", encoding="utf-8") if is_special else beside.open("x", encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written ({error.strerror}); name another file with --output") from error
    try:
        with stream:
            yield stream
        if not is_special:
            beside.replace(path)
    except BaseException as error:
        if not is_special:
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CommandFailed(
                f"{path} cannot be written ({error.strerror}); name another file with --output"
            ) from error
        raise


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What is this subcommand's own, and the command behind the first ``--``, if any."""
    listed: list[Any] = list(arguments)
    if "--" not in listed:
        return listed, None
    at = listed.index("--")
    return listed[:at], listed[at + 1 :]
