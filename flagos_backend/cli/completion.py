"""Print what has a shell complete the subcommands, options and files of this command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from flagos_backend.cli.failure import CommandFailed

SHELLS: Final = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"whose script: {', '.join(SHELLS)}")


def run(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise CommandFailed("shell completion needs the package shtab; pip install 'flagos[completion]'") from error
    from flagos_backend.cli.main import build_parser

    parser = build_parser(whole=True)
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Arguments that are paths complete as files, in every subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_files(subparser, files)
        elif action.type is Path:
            vars(action)["complete"] = files  # what shtab looks for, and argparse's types do not have
