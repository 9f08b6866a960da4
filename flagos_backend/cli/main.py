"""Parses the command line `flagos` and runs one subcommand. Entry point of the console script.

A subcommand is the module of its name here. It is imported when it is chosen, so that help comes at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from flagos_backend import __version__
from flagos_backend.cli.failure import CommandFailed
from plugin_abi.errors import FlagosStatusError


class Subcommand(Protocol):
    """What a module of this package offers. The first line of its docstring is its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


#: The subcommands with their lines of help, in the order in which they are listed.
SUBCOMMANDS: Final = {
    "doctor": "Report the environment, the folders searched, every manifest with its verdict, and the devices.",
    "devices": "List the devices of the platform flagos and their memories.",
    "check": "Say whether a manifest or a library would be accepted, and why not.",
    "explain": "Say what a program became: what runs where, memory, expected time, what is slow, what fell back.",
    "compile": "Compile a program, print its interface and sizes, and optionally keep what was compiled.",
    "opt": "Run the graph passes of a target on a program: print, stop after, leave out, or bisect them; "
    "show its loop nests.",
    "bench": "Time a program on random arguments: compiling it, launching it, and running it to the end.",
    "viz": "Write one HTML file that shows a program at each stage: graphs, loop nests, steps, memory.",
    "trace": "Record what a program or a command does on flagos: one file for Perfetto, and where its time went.",
    "cache": "Show what flagos keeps in the user's cache folder, or clear it.",
    "report": "Pack versions, doctor, a program without its weights, its dumps and logs into one file for an issue.",
    "completion": "Print what has a shell complete the subcommands, options and files of this command line.",
}


def load_subcommand(name: str) -> Subcommand:
    """The module of a subcommand, with all that it imports."""
    return cast(Subcommand, importlib.import_module(f"flagos_backend.cli.{name}"))


class _Subparser(argparse.ArgumentParser):
    """Has no arguments until it is asked to parse some: then it imports its subcommand."""

    subcommand = ""

    def load(self) -> None:
        """Adds the subcommand's arguments, once."""
        if self.subcommand:
            module = load_subcommand(self.subcommand)
            module.add_arguments(self)
            self.set_defaults(run=module.run)
            self.subcommand = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.load()
        return super().parse_known_args(args, namespace)


def build_parser(*, whole: bool = False) -> argparse.ArgumentParser:
    """The command line. ``whole``: with the arguments of every subcommand, which imports them all."""
    parser = argparse.ArgumentParser(prog="flagos", description="Looks into the flagos compiler backend.")
    parser.add_argument("--version", action="version", version=f"flagos {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Subparser)
    for name, summary in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        subparser.subcommand = name
        if whole:
            subparser.load()
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 yes, 1 no or failed, 2 wrong usage, or that of trace's
    command."""
    own, command = list(sys.argv[1:] if arguments is None else arguments), None
    if own[:1] == ["trace"]:
        from flagos_backend.cli.trace import split_command

        own, command = split_command(own)
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
