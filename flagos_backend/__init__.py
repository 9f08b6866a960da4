"""The flagos backend: importer, passes, kernels and runtime behind the plugin ABI."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flagos_backend.cli.inspection import explain as explain

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``explain``, which is imported when somebody asks for it: the stages, which import this package, need nothing of
    what it needs."""
    if name == "explain":
        return importlib.import_module("flagos_backend.cli.inspection").explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
