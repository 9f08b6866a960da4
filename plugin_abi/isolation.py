"""Backends in processes of their own: when, and how the loader gets an entry that stands for the library's.

Stage beside the load in the process. The children and the wire are libflagos_isolation.so's (docs/isolation.md); the
child's own Python is isolated_child.py.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.manifest import Manifest
from plugin_abi.trial import python_program

MODE_VARIABLE: Final = "FLAGOS_ISOLATION"
#: The attribute by which a device says that its backend is in a process of its own: the number of that process.
PROCESS_ATTRIBUTE: Final = "isolated_process_id"
#: What a front end says that works on memory of this process.
OUT_OF_REACH: Final = (
    f"it runs in a process of its own ({MODE_VARIABLE}), which does not reach the tensors of this one; "
    f"set {MODE_VARIABLE}=none"
)
LIBRARY: Final = Path(__file__).parent / "lib" / "libflagos_isolation.so"
_START: Final = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from plugin_abi import isolated_child; isolated_child.main(request, int(sys.argv[2]))"
)


class IsolationMode(enum.Enum):
    """Where backends run: in this process, in one of their own, or as each manifest says."""

    AUTO = "auto"
    NONE = "none"
    PROCESS = "process"


def isolation_mode(variables: Mapping[str, str]) -> IsolationMode | None:
    """What FLAGOS_ISOLATION says; None where it says what nobody knows: a user who asked for isolation and wrote it
    wrong must not be left without."""
    value = variables.get(MODE_VARIABLE, "").strip().lower() or IsolationMode.AUTO.value
    return next((mode for mode in IsolationMode if mode.value == value), None)


def unknown_mode(place: str, value: str) -> Refusal:
    """The refusal of every backend while FLAGOS_ISOLATION says what nobody knows."""
    known = ", ".join(mode.value for mode in IsolationMode)
    fact = f"{MODE_VARIABLE} is {value!r}, which is none of {known}"
    return Refusal(RefusalCode.ISOLATION_UNAVAILABLE, fact, place, f"set it to one of {known}, or unset it")


@functools.cache
def library() -> ctypes.CDLL:
    """The library of both ends. Raises OSError where it is not there."""
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.FlagosIsolate.restype = ctypes.c_void_p
    loaded.FlagosIsolate.argtypes = (ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_int32)
    loaded.FlagosServe.restype = None
    loaded.FlagosServe.argtypes = (
        *(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p),
        ctypes.c_char_p,
    )
    return loaded


def child_command(manifest: Manifest) -> list[str] | None:
    """The program that serves a manifest's library, but for the number of its socket; None without a Python for it."""
    python = python_program()
    if python is None:
        return None
    # What is relative here is so there: the child starts in this process's folder, which may change until then.
    path = [str(Path(folder).absolute()) for folder in sys.path]
    request = {"path": path, "manifest": str(manifest.path.absolute())}
    return [python, "-c", _START, json.dumps(request)]


def entry_of_command(command: list[str], timeout: float) -> int:
    """The address of a FlagosPluginEntry whose calls start `command`. Raises OSError where there can be no more."""
    words = (ctypes.c_char_p * len(command))(*(os.fsencode(word) for word in command))
    address = library().FlagosIsolate(words, len(command), int(timeout * 1000))
    if not address:
        raise OSError("this process has as many backends in processes of their own as it can")
    return int(address)


def entry(manifest: Manifest, place: str, timeout: float) -> int | Refusal:
    """The address of an entry that stands for the library of a manifest, whose code stays out of this process."""
    command = child_command(manifest)
    cure = f"correct the cause, or set {MODE_VARIABLE}=none to load it into this process"
    fact = "it cannot be given a process of its own"
    if command is None:
        cause = "no Python is found to run it with"
        return Refusal(RefusalCode.ISOLATION_UNAVAILABLE, fact, place, cure, cause)
    try:
        return entry_of_command(command, timeout)
    except OSError as error:
        return Refusal(RefusalCode.ISOLATION_UNAVAILABLE, fact, place, cure, str(error), error)
