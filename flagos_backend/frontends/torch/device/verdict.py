"""Would the loader accept a backend? Answered from a file while nothing has changed on which the answer rests.

Asked in each `import torch`, where the loader itself would be too slow; the loader decides when the device is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import torch

from plugin_abi.cache import cache_folder
from plugin_abi.search import SearchEnvironment, find_manifests

_PREFIXES: Final = ("FLAGOS_", "XDG_", "LD_LIBRARY_PATH", "HOME")


def accepted() -> bool:
    """Whether a backend is there for this PyTorch. A refusal is logged in the loader's one line, a kept one too."""
    environment = SearchEnvironment.current()
    basis = _basis(environment)
    file = _file(environment, basis)
    if file is not None and (known := _read(file, basis)) is not None:
        return known
    return _ask(environment, file, basis)


def _ask(environment: SearchEnvironment, file: Path | None, basis: list[Any]) -> bool:
    from plugin_abi import frameworks, loader

    facts = frameworks.detect("torch")
    result = loader.load(frameworks=() if facts is None else (facts,), environment=environment)
    if file is not None:
        _, candidates = loader.search(environment)
        libraries = [str(c.library) for c in candidates if c.library is not None]
        kept = {
            "basis": basis,
            "libraries": [[path, *_stamp(path)] for path in libraries],
            "accepted": result.accepted is not None,
            "warnings": [[w.manifest, w.code, w.line] for w in result.warnings],
        }
        _write(file, kept)
    return result.accepted is not None


def _basis(environment: SearchEnvironment) -> list[Any]:
    """What the answer depends on, but for the libraries that the manifests name."""
    variables = sorted((n, v) for n, v in environment.variables.items() if n.startswith(_PREFIXES))
    manifests = [[str(found.path), *_stamp(found.path)] for found in find_manifests(environment).manifests]
    loader = [[path, *_stamp(path)] for path in (__file__, str(Path(torch.__file__).parent / "version.py"))]
    return [sys.version, torch.__version__, [list(pair) for pair in variables], manifests, loader]


def _stamp(path: str | Path) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _file(environment: SearchEnvironment, basis: list[Any]) -> Path | None:
    """The file of this answer, in the folder that the loader keeps its verdicts in."""
    folder = cache_folder(environment.variables, environment.privileged)
    if folder is None:
        return None
    return folder / f"torch-{hashlib.sha256(json.dumps(basis).encode()).hexdigest()[:32]}.json"


def _read(file: Path, basis: list[Any]) -> bool | None:
    """The kept answer; None where there is none that still holds."""
    try:
        kept = json.loads(file.read_text("utf-8"))
        if kept["basis"] != basis or any([path, *_stamp(path)] != [path, *rest] for path, *rest in kept["libraries"]):
            return None
        warnings = [(str(manifest), int(code), str(line)) for manifest, code, line in kept["warnings"]]
        accepted = bool(kept["accepted"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if warnings:
        from plugin_abi import loader

        loader.warn(loader.Warned(*warning) for warning in warnings)
    return accepted


def _write(file: Path, kept: dict[str, Any]) -> None:
    scratch = file.with_suffix(f".{os.getpid()}")
    try:
        scratch.write_text(json.dumps(kept), "utf-8")
        scratch.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
