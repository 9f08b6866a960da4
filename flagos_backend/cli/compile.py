"""Compile a program, print its interface and sizes, and optionally keep what was compiled."""

from __future__ import annotations

import argparse
from pathlib import Path

from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.session import add_program_argument, compile_file
from plugin_abi.host import Artifact, Executable, TensorSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_program_argument(parser)
    parser.add_argument("--optimized", type=Path, metavar="FILE", help="write the program after the passes")
    parser.add_argument("--serialized", type=Path, metavar="FILE", help="write the executable")


def run(options: argparse.Namespace) -> int:
    artifacts = {Artifact.OPTIMIZED_PROGRAM: options.optimized, Artifact.SERIALIZED: options.serialized}
    with compile_file(options.path) as compiled:
        print(f"compiled in {compiled.seconds:.3f} s")
        print("\n".join(describe(compiled.executable)))
        for artifact, path in artifacts.items():
            if path is not None:
                _write(path, compiled.executable.artifact(artifact))
    return 0


def describe(executable: Executable) -> list[str]:
    """Name, interface, sizes and cost, one line each."""
    about = executable.describe()
    donated = sum(alias >= 0 for alias in about.argument_aliases)
    lines = [
        f"{about.name}, fingerprint {about.fingerprint}",
        f"{about.num_replicas} replicas × {about.num_partitions} partitions on {len(about.devices)} local devices",
        f"{about.num_arguments} arguments ({donated} may be donated), {len(about.outputs)} outputs: "
        + ", ".join(_spec(output) for output in about.outputs),
        f"bytes: arguments {about.argument_bytes}, outputs {about.output_bytes}, aliased {about.alias_bytes}, "
        f"temporaries {about.temporary_bytes}, peak {about.peak_bytes}, code {about.generated_code_bytes}",
    ]
    return lines + [f"{name}: {value!r}" for name, value in sorted(about.cost_analysis.items())]


def _spec(output: TensorSpec) -> str:
    return f"{output.element_type.name.lower()}[{','.join(map(str, output.dims))}]"


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written ({error.strerror}); choose another place") from error
    print(f"wrote {path}, {len(data)} bytes")
