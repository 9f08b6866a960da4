"""The folder of this user alone in which the host side keeps what it found out: verdicts of the loader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from plugin_abi.log import logger


def cache_folder(variables: Mapping[str, str], privileged: bool) -> Path | None:
    """The folder of the kept verdicts, created if need be; None where there is none that is this user's alone."""
    base = variables.get("XDG_CACHE_HOME", "")
    home = variables.get("HOME", "")
    if privileged or not (base.startswith("/") or home.startswith("/")):
        return None
    folder = (Path(base) if base.startswith("/") else Path(home) / ".cache") / "flagos" / "loader"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        logger.debug("no verdicts are kept: %s", error)
        return None
    if status.st_uid != os.geteuid() or status.st_mode & 0o170077 != 0o040000:
        logger.info("no verdicts are kept: %s is not a folder of this user alone (mode 0700)", folder)
        return None
    return folder
