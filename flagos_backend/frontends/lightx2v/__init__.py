"""LightX2V on FlagOS: ``PLATFORM=flagos`` runs its models through this project. Entry point lightx2v.platform_plugins.

LightX2V calls ``register`` before it has chosen a device, so nothing of it but its registry may be imported here.
"""

from __future__ import annotations

import importlib.util
import logging

from flagos_backend.frontends.lightx2v import knobs
from flagos_backend.frontends.lightx2v.registration import register

__all__ = ["register"]

logger = logging.getLogger("flagos.lightx2v")


def _register_on_import() -> None:
    """For versions of LightX2V without entry points: this package is imported before it. An import never fails."""
    try:
        if knobs.flag(knobs.AUTO_REGISTER, default=True) and importlib.util.find_spec("lightx2v_platform") is not None:
            register()
    except Exception as error:
        logger.warning("LightX2V starts without the platform flagos: %s: %s", type(error).__name__, error)


_register_on_import()
