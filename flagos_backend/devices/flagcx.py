"""FLAGCX_PATH: where FlagCX was built, as FlagOS' plugins read it. Asked before the module ``flagcx`` is imported."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flagos_backend.environment import warn_once
from plugin_abi.search import is_privileged

VARIABLE: Final = "FLAGCX_PATH"
MODULE: Final = "flagcx"
# As FlagCX's own wrapper of its library looks for it.
_LIBRARIES: Final = ("lib/libflagcx.so", "build/lib/libflagcx.so")
_PLUGIN: Final = "plugin/torch"


def find(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether FlagCX's module for PyTorch is there to import. With FLAGCX_PATH its library is that of the path, and so
    is the module unless another is installed.

    Raises RuntimeError for a path without the library, or with one that does not load.
    """
    path = variables.get(VARIABLE, "").strip()
    if path and not is_privileged():
        _follow(Path(path))
    return _is_there()


def _is_there() -> bool:
    return MODULE in sys.modules or importlib.util.find_spec(MODULE) is not None


def _follow(path: Path) -> None:
    library = next((path / name for name in _LIBRARIES if (path / name).is_file()), None)
    if library is None:
        places = " nor ".join(_LIBRARIES)
        raise RuntimeError(f"{VARIABLE} is '{path}', which has neither {places}. Build FlagCX there, or unset it.")
    try:
        ctypes.CDLL(str(library))  # loaded once: the module then finds it by its name
    except OSError as error:
        raise RuntimeError(f"{VARIABLE}: {library} does not load: {' '.join(str(error).split())}") from error
    if _is_there():
        return
    folder = path / _PLUGIN
    if not any((folder / MODULE).glob("_C*.so")):
        warn_once(f"{VARIABLE} is '{path}', whose {_PLUGIN} is not built: torch.distributed does without FlagCX")
        return
    sys.path.append(str(folder))
    importlib.invalidate_caches()
