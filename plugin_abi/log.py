"""Where the loader writes: one logger, and FLAGOS_LOADER_DEBUG to see more of it on stderr.

Used by every stage of the host side; nothing else in the package prints.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

LOGGER_NAME = "flagos.loader"
DEBUG_VARIABLE = "FLAGOS_LOADER_DEBUG"

logger = logging.getLogger(LOGGER_NAME)

_LEVELS: dict[str, int] = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "all": logging.NOTSET,
}
_handler: logging.Handler | None = None


def debug_levels(value: str) -> frozenset[int]:
    """The logging levels that a value of FLAGOS_LOADER_DEBUG asks for; names that are not known are left out."""
    names = {name.strip().lower() for name in value.split(",")}
    if "all" in names:
        return frozenset(_LEVELS.values()) - {logging.NOTSET}
    return frozenset(_LEVELS[name] for name in names if name in _LEVELS)


def configure(variables: Mapping[str, str]) -> None:
    """Follow FLAGOS_LOADER_DEBUG: only the levels that it names go to stderr. Unset: Python's own logging decides."""
    global _handler
    if _handler is not None:
        logger.removeHandler(_handler)
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
        _handler = None
    value = variables.get(DEBUG_VARIABLE, "").strip()
    if not value:
        return
    levels = debug_levels(value)
    unknown = sorted({name.strip().lower() for name in value.split(",")} - set(_LEVELS) - {""})
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("flagos loader %(levelname)s: %(message)s"))
    handler.addFilter(lambda record: record.levelno in levels)
    logger.addHandler(handler)
    logger.setLevel(min(levels, default=logging.WARNING))
    logger.propagate = False
    _handler = handler
    if unknown:
        known = ", ".join(_LEVELS)
        logger.warning("%s names unknown levels %s; known: %s", DEBUG_VARIABLE, ", ".join(unknown), known)
