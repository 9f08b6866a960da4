"""Generated sources as files, as Triton and its error messages need them: in the user's cache, named by content."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from flagos_backend.kernels.triton.compile_processes import GENERATED
from flagos_backend.process.cache import private_folder, replace

_lock = threading.Lock()


def digest(source: str) -> str:
    """What names a source: equal in every process."""
    return hashlib.sha256(source.encode()).hexdigest()[:32]


@functools.cache
def folder() -> Path:
    """The user's cache folder "triton", else a folder of this process."""
    return private_folder("triton") or Path(tempfile.mkdtemp(prefix="flagos-triton-"))


def path_of(source: str) -> Path:
    """Where ``source`` lies, or would."""
    return folder() / f"{digest(source)}.py"


def load(source: str) -> ModuleType:
    """The module that ``source`` is, one for each source, so that equal kernels are compiled once, in whatever threads.

    Raises what running it raises, and OSError when it cannot be written.
    """
    with _lock:
        return _loaded(source)


@functools.cache
def _loaded(source: str) -> ModuleType:
    path = path_of(source)
    text = source.encode()
    if not path.is_file() or path.read_bytes() != text:
        replace(path, text)
    spec = importlib.util.spec_from_file_location(f"{GENERATED}{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
