"""Folders of this user alone in which the backend keeps what costs time to find again: sources, measured times."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("flagos_backend")

# Type directory, and no rights for anybody else.
_TYPE_AND_OTHERS = 0o170077
_PRIVATE_DIRECTORY = 0o040000


def cache_root() -> Path:
    """Below which loader and backend keep what can be made again: $XDG_CACHE_HOME/flagos, or ~/.cache/flagos."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is invalid and is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "flagos"


def private_folder(name: str) -> Path | None:
    """The folder ``name`` below the root, made when missing.

    None, and a line in the log, unless it is a directory (no link) of this user with mode 0700, and the process has no
    elevated rights: what lies there is run, or steers what is run.
    """
    folder = cache_root() / name
    if os.geteuid() != os.getuid():
        return None
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        logger.warning("nothing is kept in %s: %s", folder, error)
        return None
    if status.st_uid != os.geteuid() or status.st_mode & _TYPE_AND_OTHERS != _PRIVATE_DIRECTORY:
        logger.warning("nothing is kept in %s: it is not a folder of this user alone (mode 0700)", folder)
        return None
    return folder
