"""Linux's Landlock: a process that gives up, for good, all files but those beneath folders that it names.

What a process may do to files, TCP and signals, without any privilege; used by rights.py in a backend's own process.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: The same numbers on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_QUERY_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_ALL_TCP: Final = 0b11
_ABSTRACT_SOCKETS, _SIGNALS = 0b01, 0b10
_TCP_SINCE, _SCOPES_SINCE = 4, 6


class Access(enum.IntFlag):
    """LANDLOCK_ACCESS_FS_*."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


READ: Final = Access.READ_FILE | Access.READ_DIR
#: Everything that is done to files and folders, but running them, and making devices.
WRITE: Final = (
    READ
    | Access.WRITE_FILE | Access.TRUNCATE | Access.REFER | Access.REMOVE_DIR | Access.REMOVE_FILE
    | Access.MAKE_DIR | Access.MAKE_REG | Access.MAKE_SOCK | Access.MAKE_FIFO | Access.MAKE_SYM
)  # fmt: skip
DEVICE: Final = Access.READ_FILE | Access.WRITE_FILE | Access.IOCTL_DEV
#: What a rule about a file, not a folder, may name.
_OF_FILES: Final = Access.EXECUTE | Access.WRITE_FILE | Access.READ_FILE | Access.TRUNCATE | Access.IOCTL_DEV
#: Rights that came after the first version: there they are not denied, for they are not known.
_SINCE: Final = {Access.REFER: 2, Access.TRUNCATE: 3, Access.IOCTL_DEV: 5}


@dataclass(frozen=True)
class Rule:
    """What stays allowed for a file, or beneath a folder. One that is not there allows nothing."""

    path: Path
    access: Access


def _call(number: int, *arguments: object) -> int:
    """Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    result = int(library.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def version() -> int:
    """The version of Landlock that the kernel offers; 0 where it offers none. `absence` has the cause."""
    with contextlib.suppress(OSError):
        return _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_QUERY_VERSION))
    return 0


def absence() -> str:
    """Why version() is 0."""
    try:
        _call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_QUERY_VERSION))
    except OSError as error:
        causes = {
            errno.ENOSYS: "this kernel was built without Landlock, or is older than 5.13",
            errno.EOPNOTSUPP: "Landlock was left out when this kernel was started",
        }
        return causes.get(error.errno or 0, str(error))
    return ""


def _handled(known: int) -> Access:
    late = {access for access, since in _SINCE.items() if known < since}
    return Access(sum(access for access in Access if access not in late))


def restrict(rules: Iterable[Rule], *, network: bool) -> None:
    """Leaves this thread, and all that it starts, nothing but what the rules allow; no signals to others; and without
    `network` no TCP and no abstract Unix sockets of others: as far as the kernel's version goes. Raises OSError. The
    process has no_new_privs."""
    known = version()
    handled = _handled(known)
    tcp = _ALL_TCP if known >= _TCP_SINCE and not network else 0
    scopes = 0 if known < _SCOPES_SINCE else _SIGNALS if network else _SIGNALS | _ABSTRACT_SOCKETS
    sizes = {1: 8, _TCP_SINCE: 16, _SCOPES_SINCE: 24}
    size = max(size for since, size in sizes.items() if known >= since)
    attributes = struct.pack("=QQQ", handled, tcp, scopes)[:size]
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for rule in rules:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(ruleset, rule, handled)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, rule: Rule, handled: Access) -> None:
    place = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
    try:
        access = rule.access & handled
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= _OF_FILES
        beneath = struct.pack("=Qi", access, place)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), beneath, ctypes.c_uint32(0))
    finally:
        os.close(place)
