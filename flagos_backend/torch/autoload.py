"""Public: the entry point of torch.backends, and ``enable``, which gives PyTorch's one place for a device to flagos."""

import logging
import os
from typing import Final

from flagos_backend.frontends.torch.autoload import autoload as _autoload
from flagos_backend.frontends.torch.autoload import enable

__all__ = ["autoload", "enable"]

logger = logging.getLogger("flagos.torch")

# What asks for FlagGems in eager programs; without them nothing of that is imported.
_GEMS: Final = ("FLAGOS_GLOBAL_GEMS", "USE_FLAGGEMS")


def autoload() -> None:
    """Registers the device with PyTorch, and gives operators to FlagGems where the environment asks for it."""
    _autoload()
    if any(os.environ.get(name) for name in _GEMS):
        try:
            from flagos_backend.gems import follow_environment

            follow_environment()
        except Exception as error:  # `import torch` must not break
            logger.warning("FlagGems does not compute PyTorch's operators: %s: %s", type(error).__name__, error)
