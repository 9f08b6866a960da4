"""What torch.compile's mode= and options= mean to this backend. Read by backend.py."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flagos_backend.frontends.torch.compile.errors import UnknownOption


class Fallback(enum.StrEnum):
    """What becomes of an operator that has no lowering."""

    ALLOW = "allow"  # it runs as itself inside the executable, and is counted
    ERROR = "error"


# torch.compile's own names. On host tensors they ask for nothing that is not done anyway.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """``fallback``: see Fallback. ``max_specializations``: how many sizes one graph with symbolic sizes stays compiled
    for; beyond, the one used longest ago is dropped. ``excess_precision``: whether 16-bit results may keep float32's
    digits within a kernel; None: as the environment says."""

    fallback: Fallback = Fallback.ALLOW
    max_specializations: int = 64
    excess_precision: bool | None = None


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> CompileOptions:
    """Raises UnknownOption, naming it, for a mode, an option or a value that does not exist."""
    if mode is not None and mode not in MODES:
        raise UnknownOption(kind="mode", value=repr(mode), known=", ".join(MODES))
    given = dict(options or {})
    known = [field.name for field in fields(CompileOptions)]
    for name in given:
        if name not in known:
            raise UnknownOption(kind="option", value=repr(name), known=", ".join(known))
    values: dict[str, Any] = {}
    if "fallback" in given:
        try:
            values["fallback"] = Fallback(given["fallback"])
        except ValueError:
            what = f"option fallback = {given['fallback']!r}"
            raise UnknownOption(kind="value", value=what, known=", ".join(Fallback)) from None
    if "max_specializations" in given:
        count = given["max_specializations"]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UnknownOption(kind="value", value=f"option max_specializations = {count!r}", known="1, 2, 3, ...")
        values["max_specializations"] = count
    if "excess_precision" in given:
        allowed = given["excess_precision"]
        if not isinstance(allowed, bool):
            raise UnknownOption(kind="value", value=f"option excess_precision = {allowed!r}", known="True, False")
        values["excess_precision"] = allowed
    return CompileOptions(**values)
