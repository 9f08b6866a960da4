"""Where the loader writes, and what backends hand it: two loggers, and FLAGOS_LOADER_DEBUG and FLAGOS_DEBUG to see more
of them on stderr.

Used by every stage of the host side; nothing else in the package prints.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

LOGGER_NAME = "flagos.loader"
DEBUG_VARIABLE = "FLAGOS_LOADER_DEBUG"
BACKEND_DEBUG_VARIABLE = "FLAGOS_DEBUG"

logger = logging.getLogger(LOGGER_NAME)
#: For what backends say through their hosts' callback.
backend_logger = logger.getChild("backend")

#: FLAGOS_LOG_* to logging's levels, and so the numbers that FLAGOS_DEBUG takes: from errors to each step.
BACKEND_LEVELS: tuple[int, ...] = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG, 5)

_LEVELS: dict[str, int] = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "all": logging.NOTSET,
}
_handlers: dict[logging.Logger, logging.Handler] = {}


def debug_levels(value: str) -> frozenset[int]:
    """The logging levels that a value of FLAGOS_LOADER_DEBUG asks for; names that are not known are left out."""
    names = {name.strip().lower() for name in value.split(",")}
    if "all" in names:
        return frozenset(_LEVELS.values()) - {logging.NOTSET}
    return frozenset(_LEVELS[name] for name in names if name in _LEVELS)


def configure(variables: Mapping[str, str]) -> None:
    """Follow FLAGOS_LOADER_DEBUG, by which only the levels that it names go to stderr, and FLAGOS_DEBUG, by which a
    backend's lines do up to a level. Unset: Python's own logging decides."""
    for written, handler in _handlers.items():
        written.removeHandler(handler)
        written.propagate = True
        written.setLevel(logging.NOTSET)
    _handlers.clear()
    _follow_backends(variables.get(BACKEND_DEBUG_VARIABLE, "").strip())
    value = variables.get(DEBUG_VARIABLE, "").strip()
    if not value:
        return
    levels = debug_levels(value)
    unknown = sorted({name.strip().lower() for name in value.split(",")} - set(_LEVELS) - {""})
    handler = _write_to_stderr(logger, "flagos loader %(levelname)s: %(message)s", min(levels, default=logging.WARNING))
    handler.addFilter(lambda record: record.levelno in levels)
    if unknown:
        known = ", ".join(_LEVELS)
        logger.warning("%s names unknown levels %s; known: %s", DEBUG_VARIABLE, ", ".join(unknown), known)


def _follow_backends(value: str) -> None:
    """The backend itself reads the variable as well, and hands over lines of the level that it asks for."""
    if value.isdecimal() and int(value) > 0:
        level = BACKEND_LEVELS[min(int(value), len(BACKEND_LEVELS) - 1)]
        _write_to_stderr(backend_logger, "flagos %(message)s", level)


def _write_to_stderr(written: logging.Logger, form: str, level: int) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form))
    written.addHandler(handler)
    written.setLevel(level)
    written.propagate = False
    _handlers[written] = handler
    return handler
