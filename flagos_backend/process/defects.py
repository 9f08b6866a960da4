"""What an error says that is a defect of the backend: all that a report needs. Frameworks print the message of an error
whole, but cut what is attached to it."""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path
from typing import Final

from flagos_backend.process.cache import private_folder

#: Longer tracebacks go to a file, in characters.
LONGEST: Final = 8192
#: How many files are kept, the newest.
KEPT: Final = 20


def describe(error: BaseException) -> str:
    """The message: what was raised, where, the traceback or the file that holds it."""
    text = "".join(traceback.format_exception(error))
    place = traceback.extract_tb(error.__traceback__)
    where = f"{place[-1].filename}:{place[-1].lineno}" if place else "an unknown place"
    what = str(error)
    if len(text) > LONGEST and (file := keep(text)) is not None:
        what = what if len(what) <= LONGEST // 4 else what[: LONGEST // 4] + "..."
        text = f"The whole error and its traceback are in {file}, which only this user can read.\n"
    what = what if what.endswith(".") else f"{what}."
    return f"{type(error).__name__}: {what} At {where}. This is a defect of flagos: please report it, whole.\n{text}"


def keep(text: str) -> Path | None:
    """The file of a new report; None where none can be written."""
    folder = private_folder("reports")
    if folder is None:
        return None
    try:
        descriptor, name = tempfile.mkstemp(".txt", f"report-{os.getpid()}-", folder)  # mode 0600
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        _drop_old(folder)
    except OSError:
        return None
    return Path(name)


def _drop_old(folder: Path) -> None:
    # Another process may drop the same files.
    ages = []
    for file in folder.glob("report-*.txt"):
        try:
            ages.append((file.stat().st_mtime_ns, file))
        except OSError:
            continue
    for _, file in sorted(ages)[:-KEPT]:
        file.unlink(missing_ok=True)
