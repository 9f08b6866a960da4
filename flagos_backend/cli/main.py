"""Parses the command line `flagos` and runs one subcommand. Entry point of the console script."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from flagos_backend import __version__
from flagos_backend.cli import bench, cache, check, compile, devices, doctor, explain, opt, report, trace
from flagos_backend.cli.failure import CommandFailed
from plugin_abi.errors import FlagosStatusError


class Subcommand(Protocol):
    """What a module of this package offers. The first line of its docstring is the subcommand's help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


SUBCOMMANDS: Final[dict[str, Subcommand]] = {
    "doctor": doctor,
    "devices": devices,
    "check": check,
    "explain": explain,
    "compile": compile,
    "opt": opt,
    "bench": bench,
    "trace": trace,
    "cache": cache,
    "report": report,
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="flagos", description="Looks into the flagos compiler backend.")
    parser.add_argument("--version", action="version", version=f"flagos {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in SUBCOMMANDS.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 yes, 1 no or failed, 2 wrong usage, or that of trace's
    command."""
    own, command = list(sys.argv[1:] if arguments is None else arguments), None
    if own[:1] == ["trace"]:
        own, command = trace.split_command(own)
    options = build_parser().parse_args(own, argparse.Namespace(command=command))
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except (CommandFailed, FlagosStatusError) as error:
        print(f"flagos: {error}", file=sys.stderr)
        return error.status if isinstance(error, CommandFailed) else 1
    except BrokenPipeError:
        # The reader went away (a pager, head): that is no failure, and Python's own flush at exit must not report it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
