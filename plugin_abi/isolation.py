"""Backends in processes of their own: when, and how the loader gets an entry that stands for the library's.

Stage beside the load in the process. The children and the wire are libflagos_isolation.so's (docs/isolation.md); the
child's own Python is isolated_child.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.manifest import Manifest
from plugin_abi.policy import Library
from plugin_abi.rights import ENVIRONMENT, Confinement, Rights, RightsMode, SettingError, rights_mode, rights_of
from plugin_abi.trial import python_program

MODE_VARIABLE: Final = "FLAGOS_ISOLATION"
TIMEOUT_VARIABLE: Final = "FLAGOS_ISOLATION_TIMEOUT"
SILENCE_VARIABLE: Final = "FLAGOS_ISOLATION_SILENCE"
#: A process whose own thread gives no sign of life for so many seconds is taken for dead.
DEFAULT_SILENCE: Final = 30.0
#: A computation may take hours, and nobody can tell one from a hang: who knows its programs sets a limit.
DEFAULT_HANG: Final = 0.0
_LONGEST: Final = 1_000_000.0
#: The attribute by which a device says that its backend is in a process of its own: the number of that process.
PROCESS_ATTRIBUTE: Final = "isolated_process_id"
#: The system calls that it tried and was denied by the time that its client was there: "socket, ptrace".
DENIED_ATTRIBUTE: Final = "isolated_denied"
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


def _seconds(variables: Mapping[str, str], name: str, default: float) -> float:
    text = variables.get(name, "").strip()
    if not text:
        return default
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= _LONGEST:
            return value
    raise SettingError(f"{name} is {text!r}, no number of seconds", f"set {name} to seconds, or to 0 for no limit")


@dataclass(frozen=True)
class Patience:
    """For how many seconds a process is waited for: to greet its host, without a sign of life, and while it leaves a
    call unanswered or completes nothing of what it owes. 0: for ever."""

    start: float = 20.0
    silence: float = DEFAULT_SILENCE
    hang: float = DEFAULT_HANG

    @classmethod
    def of(cls, variables: Mapping[str, str], start: float, hang: float = DEFAULT_HANG) -> Patience:
        """What the user's variables say; `hang` is what the manifest says. Raises SettingError."""
        silence = _seconds(variables, SILENCE_VARIABLE, DEFAULT_SILENCE)
        return cls(start, silence, _seconds(variables, TIMEOUT_VARIABLE, hang))


class _IsolateArgs(ctypes.Structure):
    """FlagosIsolateArgs of include/flagos/isolation.h."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("command", ctypes.POINTER(ctypes.c_char_p)),
        ("num_words", ctypes.c_size_t),
        ("environment", ctypes.POINTER(ctypes.c_char_p)),
        ("num_environment", ctypes.c_size_t),
        ("start_ms", ctypes.c_int32),
        ("silence_ms", ctypes.c_int32),
        ("hang_ms", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The library of both ends. Raises OSError where it is not there."""
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.FlagosIsolate.restype = ctypes.c_void_p
    loaded.FlagosIsolate.argtypes = (ctypes.POINTER(_IsolateArgs),)
    loaded.FlagosServe.restype = None
    loaded.FlagosServe.argtypes = (
        *(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p),
        ctypes.c_char_p,
    )
    return loaded


def child_command(manifest: Manifest, rights: Rights | None = None) -> list[str] | None:
    """The program that serves a manifest's library, but for the number of its socket; None without a Python for it.
    `rights` None: those of its user."""
    python = python_program()
    if python is None:
        return None
    # What is relative here is so there: the child starts in this process's folder, which may change until then.
    path = [str(Path(folder).absolute()) for folder in sys.path]
    taken = asdict(rights) if rights is not None else None
    request = {"path": path, "manifest": str(manifest.path.absolute()), "rights": taken}
    return [python, "-c", _START, json.dumps(request)]


def _words(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(os.fsencode(text) for text in texts))


def entry_of_command(command: list[str], patience: Patience, environment: Sequence[str] | None = None) -> int:
    """The address of a FlagosPluginEntry whose calls start `command`, in this environment or in what of it has names
    that `environment` lists ("PREFIX*" too). Raises OSError where there can be no more."""
    times = (int(seconds * 1000) for seconds in (patience.start, patience.silence, patience.hang))
    variables = None if environment is None else _words(environment)
    args = _IsolateArgs(
        *(ctypes.sizeof(_IsolateArgs), _words(command), len(command), variables, len(environment or ()), *times)
    )
    address = library().FlagosIsolate(ctypes.byref(args))
    if not address:
        raise OSError("this process has as many backends in processes of their own as it can")
    return int(address)


def _opened(library: Library, manifest: Manifest) -> list[Path]:
    """The files that the child opens by name, as far as the checks know them."""
    needed = [Path(path) for path in library.dependencies.found.values()]
    return [manifest.path, library.path, Path(library.file.place), *needed]


def confinement(library: Library, manifest: Manifest, variables: Mapping[str, str], privileged: bool) -> Confinement:
    """That of a process of the library's own. Raises SettingError."""
    asked = manifest.isolated
    taken = rights_of(asked, _opened(library, manifest), manifest.resource_dir, variables, privileged)
    is_clean = rights_mode(variables) is not RightsMode.USER
    return Confinement(taken, (*ENVIRONMENT, *asked.environment) if is_clean else None)


def entry(
    library: Library, manifest: Manifest, variables: Mapping[str, str], start: float, privileged: bool
) -> int | Refusal:
    """The address of an entry that stands for a library, whose code stays out of this process. `variables`: the
    user's; `start`: how many seconds its process may take to greet this one; `privileged`: as for caches."""
    place = library.file.place
    cure = f"correct the cause, or set {MODE_VARIABLE}=none to load it into this process"
    fact = "it cannot be given a process of its own"
    asked = manifest.isolated
    try:
        patience = Patience.of(variables, start, asked.hang_seconds)
        confined = confinement(library, manifest, variables, privileged)
        command = child_command(manifest, confined.rights)
        if command is None:
            cause = "no Python is found to run it with"
            return Refusal(RefusalCode.ISOLATION_UNAVAILABLE, fact, place, cure, cause)
        return entry_of_command(command, patience, confined.environment)
    except SettingError as error:
        return Refusal(RefusalCode.ISOLATION_UNAVAILABLE, error.fact, place, error.cure, exception=error)
    except OSError as error:
        return Refusal(RefusalCode.ISOLATION_UNAVAILABLE, fact, place, cure, str(error), error)
