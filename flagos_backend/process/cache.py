"""Folders of this user alone in which the backend keeps what costs time to find again: sources, measured times."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from plugin_abi import cache
from plugin_abi.search import is_privileged

logger = logging.getLogger("flagos_backend")


def cache_root() -> Path | None:
    """Below which loader and backend keep what can be made again; None where this user has no such place."""
    return cache.cache_root(os.environ)


def private_folder(name: str) -> Path | None:
    """The folder ``name`` below the root, made when missing.

    None, and a line in the log, unless it is this user's alone, by the judge that the loader keeps its verdicts by:
    what lies there is run, or steers what is run.
    """
    try:
        return cache.private_folder(name, os.environ, is_privileged())
    except cache.NotPrivateError as error:
        logger.warning("nothing is kept: %s", error)
        return None


def replace(path: Path, content: bytes) -> None:
    """Writes a file in one step: others see all of it or what was there before, also where this is interrupted, and
    nothing else stays. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        beside = Path(file.name)
        try:
            file.write(content)
            file.flush()
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
