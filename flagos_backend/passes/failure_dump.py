"""Where what a failed pass or transform was given, and what it made, can be read. For PassFailed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flagos_backend.errors import PassOptionInvalid
from flagos_backend.process import defects

DUMP_VARIABLE = "FLAGOS_DUMP_TO"
_T = TypeVar("_T")
_files = itertools.count()


def failure_dump(name: str, before: _T, after: _T, text: Callable[[_T], str], folder: Path | None = None) -> str:
    """Writes both into one file and says, as a sentence without its end, where that is.

    In ``folder``, else where the reports of defects are kept. ``text`` may fail of ``after``, which is invalid.
    """
    written = f"// before {name}\n{text(before)}\n\n// after {name}\n{_of_the_invalid(after, text)}\n"
    file = defects.keep(written) if folder is None else _write(folder, name, written)
    if file is None:
        return f"Set {DUMP_VARIABLE}=FOLDER to have it written"
    return f"What it was given and what it made are in {file}"


def _of_the_invalid(value: _T, text: Callable[[_T], str]) -> str:
    try:
        return text(value)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"// It has no text: {type(error).__name__}: {error}"


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{os.getpid()}.{next(_files):04d}.{name}.failed.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        wanted = f"a writable folder ({error.strerror})"
        raise PassOptionInvalid(variable=DUMP_VARIABLE, value=folder, wanted=wanted) from error
    return path
