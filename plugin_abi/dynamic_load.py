"""dlopen by descriptor: what was checked is what enters the process, whatever its path means by then.

Used by the loader in the host and, as a file of its own, by the child of a trial: standard library only.

The linker is given /proc/self/fd/N, so it maps the very file that was read. It knows the library by that name then,
which would mislead dladdr, debuggers and DT_NEEDED. So the name in the public part of its link map (<link.h>: l_name)
is set: to the needed name while those load that need it, by which the linker finds it and looks for no file, then to
the path.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

_RTLD_DI_LINKMAP = 2
_MODE = os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_NODELETE


@dataclass(frozen=True)
class Loadable:
    """A library to load: by its open descriptor, or, where `descriptor` is below zero, by its path.

    `name` is what others need it by.
    """

    name: str
    path: str
    descriptor: int


class _LinkMap(ctypes.Structure):
    """The beginning of glibc's struct link_map."""

    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_void_p))


def load(library: Loadable, dependencies: Sequence[Loadable]) -> ctypes.CDLL:
    """Load `dependencies` in their order and then `library`, for good. Raises OSError as the linker says why not."""
    loaded: list[tuple[ctypes.CDLL, str]] = []
    try:
        for item in (*dependencies, library):
            handle = ctypes.CDLL(_place(item), mode=_MODE)
            loaded.append((handle, item.path))
            _set_name(handle, item.name)
    finally:
        for handle, path in loaded:
            _set_name(handle, path)
    return loaded[-1][0]


def _place(item: Loadable) -> str:
    return item.path if item.descriptor < 0 else f"/proc/self/fd/{item.descriptor}"


def _set_name(handle: ctypes.CDLL, name: str) -> None:
    libc = ctypes.CDLL(None)
    libc.strdup.restype = ctypes.c_void_p
    libc.dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    link_map = ctypes.POINTER(_LinkMap)()
    if libc.dlinfo(handle._handle, _RTLD_DI_LINKMAP, ctypes.byref(link_map)) != 0:
        raise OSError(f"the dynamic linker does not tell the link map of {name}")
    # The linker frees names that malloc gave; other threads may still read the old one, which therefore stays.
    link_map.contents.l_name = libc.strdup(os.fsencode(name))
