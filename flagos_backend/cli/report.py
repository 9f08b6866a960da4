"""Pack versions, doctor, a program without its weights, its dumps and logs into one file for an issue.

Nothing is written before it was shown what goes in, and somebody said yes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from flagos_backend.cli.explanation_text import size, table
from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.program_file import read_program
from flagos_backend.importer import schema
from flagos_backend.passes.failure_dump import DUMP_VARIABLE

# Constants of so many elements are part of how a program is written, and not what it has learnt.
_FEW_ELEMENTS = 16
_MAIN = "import sys; from flagos_backend.cli.main import main; sys.exit(main(sys.argv[1:]))"
_TIMEOUT = 600.0
PROGRAM = "program.flagos"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PROGRAM", nargs="?", help="the program that is wrong, if one is")
    parser.add_argument("--log", type=Path, action="append", default=[], metavar="FILE", help="a text to add")
    parser.add_argument("--output", type=Path, default=Path("flagos-report.zip"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--yes", action="store_true", help="write it without asking")


def run(options: argparse.Namespace) -> int:
    if options.output.exists():
        raise CommandFailed(f"{options.output} exists; name another file with --output")
    parts = dict(_parts(options.path, options.log))
    print("\n".join(_contents(parts)))
    if not options.yes and not _agreed(options.output):
        print("nothing was written")
        return 1
    _write(options.output, parts)
    print(f"wrote {options.output}; attach it to the issue, with what you did, expected and saw")
    return 0


def without_weights(program: bytes) -> bytes:
    """A serialized flagos.Program whose constants of more than 16 elements are zeros, of the same shapes, and whose
    source files have their names alone: what it computes of its arguments is the same kind of thing, and runs."""
    proto = schema.Program.FromString(program)
    for computation in proto.module.computations:
        for instruction in computation.instructions:
            if instruction.HasField("literal"):
                _clear(instruction.literal)
            instruction.metadata.source_file = PurePath(instruction.metadata.source_file).name
    names = proto.module.stack_frame_index.file_names
    names[:] = [PurePath(name).name for name in names]
    cleared: bytes = proto.SerializeToString(deterministic=True)
    return cleared


def _clear(literal: Any) -> None:
    for part in literal.tuple_literals:
        _clear(part)
    elements = 1
    for dim in literal.shape.dimensions:
        elements *= dim
    if elements <= _FEW_ELEMENTS:
        return
    for field, value in literal.ListFields():
        if field.type == FieldDescriptor.TYPE_BYTES:
            setattr(literal, field.name, bytes(len(value)))
        elif field.type != FieldDescriptor.TYPE_MESSAGE and field.name != "dynamic_sizes":
            value[:] = [0] * len(value)


def _parts(path: Path | None, logs: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Names in the file, and contents."""
    program = None if path is None else without_weights(read_program(path))
    texts = [(f"logs/{number}-{log.name}", _read(log)) for number, log in enumerate(logs)]
    yield "doctor.txt", _output_of({}, "doctor")
    with tempfile.TemporaryDirectory(prefix="flagos-report-") as folder:
        if program is not None:
            copy, dumps = Path(folder, PROGRAM), Path(folder, "dumps")
            copy.write_bytes(program)
            yield PROGRAM, program
            # In a process of its own: a program that ends the process is worth a report, too.
            yield "explain.txt", _output_of({DUMP_VARIABLE: str(dumps)}, "explain", str(copy), "--kernels", "--steps")
            for dump in sorted(dumps.rglob("*")):
                if dump.is_file():
                    yield str(Path("dumps") / dump.relative_to(dumps)), _anonymous(dump.read_bytes())
    yield from texts


def _output_of(variables: Mapping[str, str], *arguments: str) -> bytes:
    """What a subcommand says in a process of its own, and how it ended."""
    command = [sys.executable, "-c", _MAIN, *arguments]
    try:
        done = subprocess.run(
            command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired as expired:
        return _anonymous(bytes(expired.stdout or b"")) + f"\nstopped after {_TIMEOUT:g} s\n".encode()
    return _anonymous(done.stdout) + f"exit status {done.returncode}\n".encode()


def _anonymous(text: bytes) -> bytes:
    """The text without the name of the user's folder."""
    home = os.environ.get("HOME", "").rstrip("/").encode()
    return text.replace(home, b"~") if len(home) > 1 else text


def _read(path: Path) -> bytes:
    try:
        return _anonymous(path.read_bytes())
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read ({error.strerror}); name a log file") from error


def _contents(parts: Mapping[str, bytes]) -> Iterator[str]:
    """What people look at before they agree: doctor's words, and a line for each part."""
    yield parts["doctor.txt"].decode("utf-8", "replace")
    yield "The report holds the above and:"
    about = {PROGRAM: f"the program, its constants of more than {_FEW_ELEMENTS} elements made zeros"}
    about |= {"explain.txt": "what the program became, or why it does not compile"}
    yield from (
        f"  {line}"
        for line in table([(name, size(len(content)), about.get(name, "")) for name, content in parts.items()])
    )


def _agreed(output: Path) -> bool:
    if not sys.stdin.isatty():
        raise CommandFailed("nobody is there to agree to what is shown above; say --yes")
    return input(f"Write {output}? [y/N] ").strip().lower() in ("y", "yes")


def _write(output: Path, parts: Mapping[str, bytes]) -> None:
    try:
        with zipfile.ZipFile(output, "x", zipfile.ZIP_DEFLATED) as file:
            for name, content in parts.items():
                file.writestr(name, content)
    except OSError as error:
        raise CommandFailed(f"{output} cannot be written ({error.strerror}); choose another place") from error
