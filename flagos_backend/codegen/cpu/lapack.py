"""LAPACK on the host: the routines of SciPy, which JAX depends on, and whose own CPU calls the same.

lower/linear_algebra.py asks whether they are there, bridge.py hands their addresses to native code
(native/cpu/lapack.h). PyTorch's LAPACK is no replacement: it exports a part of the routines, and importing it takes ten
times as long.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

from flagos_backend.codegen.cpu.bytecode import LapackRoutine
from flagos_backend.process import interrupts

# Of f32, f64, c64 and c128, in the order of their numbers in native/cpu/linear_algebra.h.
_PREFIXES = "sdcz"
# LAPACK's names where complex matrices have others.
_OF_COMPLEX = {"syevd": "heevd", "sytrd": "hetrd", "ormqr": "unmqr"}


@functools.cache
def lapack_is_available() -> bool:
    """Whether SciPy is installed. Imports its LAPACK."""
    return bool(_found())


def lapack_addresses() -> tuple[int, ...]:
    """Of all routines, for each element type; () if no program of this process calls any."""
    return _found() if lapack_is_available.cache_info().currsize else ()


@functools.cache
def _found() -> tuple[int, ...]:
    try:
        with interrupts.deferred():
            from scipy.linalg import cython_lapack
    except ImportError:
        return ()
    capsules: Mapping[str, Any] = cython_lapack.__pyx_capi__
    return tuple(_address(capsules[_name(prefix, routine)]) for prefix in _PREFIXES for routine in LapackRoutine)


def _name(prefix: str, routine: LapackRoutine) -> str:
    name = routine.name.lower()
    return prefix + (_OF_COMPLEX.get(name, name) if prefix in "cz" else name)


def _address(capsule: object) -> int:
    """Where the function that ``capsule`` holds begins."""
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer(capsule, name(capsule)))
