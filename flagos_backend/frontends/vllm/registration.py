"""Whether flagos compiles for vLLM in this process, and how vLLM's platform learns of it. Before that, no vLLM."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

#: Whether vLLM compiles with flagos: 1 or 0. Unset: whether VLLM_PLUGINS names flagos.
COMPILE: Final = "VLLM_FL_COMPILE"
#: vLLM's own list of the plugins that it loads; without it, it loads all.
PLUGINS: Final = "VLLM_PLUGINS"
NAME: Final = "flagos"

_STOCK_COMPILER = "inductor"
_VALUES = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}

logger = logging.getLogger("flagos.vllm")


def is_wanted(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the user asked for flagos. Raises RuntimeError for a VLLM_FL_COMPILE that is neither yes nor no."""
    text = variables.get(COMPILE, "").strip()
    if not text:
        return NAME in [name.strip() for name in variables.get(PLUGINS, "").split(",")]
    value = _VALUES.get(text.lower())
    if value is None:
        raise RuntimeError(f"{COMPILE} is {text!r}, in the environment; it can be 1 or 0. Correct or unset it.")
    return value


def register() -> None:
    """Has the platform that vLLM runs on compile with flagos, where the user asked for it. Called again it changes
    nothing. Raises RuntimeError for a wrong value of VLLM_FL_COMPILE."""
    if not is_wanted():
        return
    from vllm.platforms import current_platform

    mix_in(current_platform)


def mix_in(platform: Any) -> None:
    """Gives the platform, whosever it is, our compiler; all else stays its own. The object stays the same one, for
    modules of vLLM hold it already. A platform with a compiler of its own is left alone."""
    from flagos_backend.frontends.vllm.platform import CompilesWithFlagos

    kind = type(platform)
    if issubclass(kind, CompilesWithFlagos):
        return
    theirs = platform.get_compile_backend()
    if theirs != _STOCK_COMPILER:
        logger.warning(
            "vLLM's platform %s.%s has a compiler of its own, %s, and keeps it. Unset %s, or uninstall that platform.",
            *(kind.__module__, kind.__qualname__, theirs, COMPILE),
        )
        return
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    platform.__class__ = type(f"{kind.__name__}WithFlagos", (CompilesWithFlagos, kind), names)
    logger.info("vLLM's platform %s compiles with flagos", kind.__qualname__)
