"""The folders of this user alone in which host side and backend keep what they found out: verdicts, sources, times.

What lies there steers what runs, so one judge says for all of them whether nobody else can have put it there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from plugin_abi.files import exists
from plugin_abi.log import logger


def cache_root(variables: Mapping[str, str]) -> Path | None:
    """Below which everything is kept: $XDG_CACHE_HOME/flagos, or ~/.cache/flagos; None where neither is a place.

    The XDG specification: a relative path is invalid and is to be ignored. The current folder is nobody's home.
    """
    base, home = variables.get("XDG_CACHE_HOME", ""), variables.get("HOME", "")
    if base.startswith("/"):
        return Path(base) / "flagos"
    return Path(home) / ".cache" / "flagos" if home.startswith("/") else None


class NotPrivateError(Exception):
    """Why a folder cannot be trusted, or not be made."""


def private_folder(name: str, variables: Mapping[str, str], privileged: bool) -> Path | None:
    """The folder `name` below the root, created if need be; None where there is no place for one.

    `privileged`: whether this process has rights that its user has not (search.is_privileged): then there is none.
    Raises NotPrivateError unless the folder is this user's alone, and nobody else can put another in its place.
    """
    root = cache_root(variables)
    if privileged or root is None:
        return None
    folder = root / name
    try:
        for missing in reversed([place for place in (folder, *folder.parents) if not exists(place)]):
            missing.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
            raise NotPrivateError(f"{folder} is not a folder of this user alone (mode 0700)")
        open_to_others = next(filter(_others_may_replace, _above(folder)), None)
    except OSError as error:
        raise NotPrivateError(f"{folder}: {error}") from error
    if open_to_others is not None:
        raise NotPrivateError(f"{folder} is not safe: others may write to {open_to_others} and put another there")
    return folder


def _above(folder: Path) -> list[Path]:
    """The folders that lead to one: as it is written, and where links in that lead."""
    return list(dict.fromkeys((*folder.parents, *Path(os.path.realpath(folder)).parents)))


def _others_may_replace(folder: Path) -> bool:
    """Whether somebody besides this user and root may rename what is in a folder (others' entries, where it is sticky,
    stay theirs)."""
    status = folder.stat()
    writable = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    return bool(writable) or status.st_uid not in (0, os.geteuid())


def cache_folder(variables: Mapping[str, str], privileged: bool) -> Path | None:
    """The folder of the loader's kept verdicts; None where there is none that is this user's alone."""
    try:
        return private_folder("loader", variables, privileged)
    except NotPrivateError as error:
        logger.info("no verdicts are kept: %s", error)
        return None
