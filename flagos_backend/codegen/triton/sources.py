"""Generated sources as files, as Triton and its error messages need them: in the user's cache, named by content."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from types import ModuleType

logger = logging.getLogger("flagos.codegen")


def digest(source: str) -> str:
    """What names a source: equal in every process."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


@functools.cache
def folder() -> Path:
    """$XDG_CACHE_HOME/flagos/triton if that is this user's alone, else a folder of this process."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    found = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "flagos" / "triton"
    if os.geteuid() == os.getuid() and _is_private(found):
        return found
    return Path(tempfile.mkdtemp(prefix="flagos-triton-"))


def _is_private(found: Path) -> bool:
    try:
        found.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found.mkdir(mode=0o700, exist_ok=True)
        status = found.lstat()
    except OSError as error:
        logger.debug("no generated sources are kept: %s", error)
        return False
    if status.st_uid == os.geteuid() and status.st_mode & 0o170077 == 0o040000:
        return True
    logger.info("no generated sources are kept: %s is not a folder of this user alone (mode 0700)", found)
    return False


def path_of(source: str) -> Path:
    """Where ``source`` lies, or would."""
    return folder() / f"{digest(source)}.py"


@functools.cache
def load(source: str) -> ModuleType:
    """The module that ``source`` is, one for each source, so that equal kernels are compiled once.

    Raises what running it raises, and OSError when it cannot be written.
    """
    path = path_of(source)
    if not path.is_file() or path.read_text() != source:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(source)
        Path(file.name).replace(path)
    spec = importlib.util.spec_from_file_location(f"flagos_triton_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
