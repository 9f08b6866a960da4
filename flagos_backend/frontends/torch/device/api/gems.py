"""torch.flagos.gems: FlagGems for the operators of eager programs."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any


def gems(*, allow: Collection[str] | None = None, deny: Collection[str] | None = None) -> AbstractContextManager[Any]:
    """A context manager, within which FlagGems computes the operators of eager programs on accelerators.

    ``allow``, ``deny``: the only operators, or those not. Raises ValueError for names that FlagGems does not know, and,
    when it begins, RuntimeError where FlagGems cannot compute.
    """
    # By name: it stands above the front ends, which know no kernels.
    module: Any = importlib.import_module("flagos_backend.gems")
    context: AbstractContextManager[Any] = module.gems(allow=allow, deny=deny)
    return context
