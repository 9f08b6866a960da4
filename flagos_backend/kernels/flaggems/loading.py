"""Imports FlagGems when it can work here, and says why where it cannot. Only this and interpreted.py import it."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from flagos_backend.devices.target import Target
from flagos_backend.kernels.triton.loading import prepare_triton

# Its cached launcher passes constants to kernels only on these versions; on others every second call of a kernel
# misses arguments (FlagGems issue 3353).
_TRITON = ((3, 0), (3, 6))
_OLDEST = (5, 0)
# What FlagGems 5.0 imports besides torch and triton.
_NEEDED = {"sqlalchemy": "sqlalchemy", "yaml": "PyYAML", "packaging": "packaging"}
_TABLE = "_FULL_CONFIG"
_lock = threading.Lock()


def unavailable(target: Target) -> str:
    """Why FlagGems cannot compute for ``target``, or ""."""
    if target.is_host or (target.device_type == "cpu" and not _interpreted()):
        return "FlagGems has no kernels for the host"
    return missing()


def _interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, as in a process whose device is simulated."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def missing() -> str:
    """Why FlagGems cannot compute for any device here, or ""."""
    if importlib.util.find_spec("flag_gems") is None:
        return "FlagGems is not installed"
    for module, package in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            return f"FlagGems needs {package}, which is not installed"
    return version_problem(importlib.metadata.version("flag_gems"), _triton_version())


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_problem(flag_gems: str, triton: str) -> str:
    """Why these versions do not work together, or ""."""
    if not triton:
        return "FlagGems needs Triton, which is not installed"
    if _numbers(flag_gems) < _OLDEST:
        return f"FlagGems {flag_gems} is older than {_OLDEST[0]}.{_OLDEST[1]}"
    if not _TRITON[0] <= _numbers(triton) <= _TRITON[1] and not _interpreted():
        newest = f"{_TRITON[1][0]}.{_TRITON[1][1]}"
        return f"FlagGems {flag_gems} launches its kernels wrongly on Triton {triton}; it needs Triton up to {newest}"
    return ""


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def load() -> ModuleType:
    """FlagGems. Takes seconds the first time, so that only its kernels' warm-ups and first calls do it."""
    with _lock:
        # Triton's own module tree is imported lazily, and FlagGems' mm looks this part up as an attribute.
        if importlib.util.find_spec("triton.tools.tensor_descriptor") is not None:
            importlib.import_module("triton.tools.tensor_descriptor")
        prepare_triton()
        if _interpreted() and "flag_gems" not in sys.modules:
            interpreted: Any = importlib.import_module("flagos_backend.kernels.flaggems.interpreted")
            found: ModuleType = interpreted.load()
            return found
        return importlib.import_module("flag_gems")


def has(name: str) -> bool:
    """Whether FlagGems computes the ATen operator ``name``, by its sources: loading it takes seconds, which a program
    that uses none of it does not spend."""
    if "flag_gems" in sys.modules:
        return name in functions()
    entry = listed().get(name)
    if entry is None:
        return False
    return entry.always or name in functions()


def function(name: str) -> Callable[..., Any]:
    """functions()[name], which its first call loads."""
    return lambda *args, **kwargs: functions()[name](*args, **kwargs)


class Entry(NamedTuple):
    """What FlagGems' table says of an operator: the name of its function, and whether it is there unconditionally."""

    function: str
    always: bool


@functools.cache
def listed() -> dict[str, Entry]:
    """The operators in its table as it is written."""
    spec = importlib.util.find_spec("flag_gems")
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
            entries = [entry.elts for entry in ast.walk(node.value) if isinstance(entry, ast.Tuple)][1:]
            return {
                ast.literal_eval(entry[0]): Entry(ast.unparse(entry[1]).rpartition(".")[2], len(entry) == 2)
                for entry in entries
            }
    return {name: Entry(function.__name__, True) for name, function in functions().items()}


def names_of(name: str) -> frozenset[str]:
    """What users call the ATen operator ``name``: as FlagGems' function, by its own name, with and without overload."""
    packet = name.partition(".")[0]
    own = {name, packet, f"aten::{packet}", f"aten::{name}"}
    return frozenset(own | {listed()[name].function} if name in listed() else own)


@functools.cache
def functions() -> dict[str, Callable[..., Any]]:
    """FlagGems' functions by the name of the ATen operator that they compute: ``mm``, ``sum.dim_IntList``."""
    found: dict[str, Callable[..., Any]] = {}
    for name, function, *condition in getattr(load(), _TABLE):
        if all(holds() if callable(holds) else holds for holds in condition):
            found[name] = function
    return found
