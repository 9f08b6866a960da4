"""FLAGOS_DEBUG for what the Python side of the backend says: up to a level it goes to stderr, as the native lines do.
Called by the bridge."""

from __future__ import annotations

import logging
import sys

VARIABLE = "FLAGOS_DEBUG"
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)


def follow(value: str) -> None:
    """``value``: of the variable; anything but a number above 0 leaves all to Python's own logging."""
    if not (value.isdecimal() and int(value) > 0):
        return
    logger = logging.getLogger("flagos_backend")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("flagos backend: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[min(int(value), len(_LEVELS) - 1)])
    logger.propagate = False
