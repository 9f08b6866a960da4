"""A stand-in for what the front end sees of LightX2V: its registry with copied tables, and the bases of its operators.
What needs LightX2V itself is in tools/conformance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

_TABLES = ("DEVICE", "ATTN_WEIGHT", "MM_WEIGHT", "RMS_WEIGHT", "LAYERNORM_WEIGHT", "ROPE", "FUSED_MOE")
_FRONT_END = "flagos_backend.frontends.lightx2v"


class Registry(dict[str, Any]):
    """A table: takes callables under keys, and each key once."""

    def register(self, target: Callable[..., Any], key: str | None = None) -> Callable[..., Any]:
        name = key or target.__name__
        if name in self:
            raise Exception(f"{name} already exists.")
        self[name] = target
        return target

    def __hash__(self) -> int:
        return id(self)


class StandIn:
    """The modules that are put in place of LightX2V's for the time of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.platform = self.module("lightx2v_platform.registry_factory")
        for table in _TABLES:
            setattr(self.platform, f"PLATFORM_{table}_REGISTER", Registry())

    def module(self, name: str, **contents: Any) -> ModuleType:
        """A module of this name, and the packages around it."""
        parts = name.split(".")
        for count in range(1, len(parts)):
            outer = ".".join(parts[:count])
            if outer not in sys.modules:
                package = ModuleType(outer)
                package.__path__ = []
                self._monkeypatch.setitem(sys.modules, outer, package)
        made = ModuleType(name)
        vars(made).update(contents)
        self._monkeypatch.setitem(sys.modules, name, made)
        return made

    def forget_operators(self) -> None:
        """Modules of operators are imported anew: their classes derive from what is there now."""
        for part in ("attention", "norms", "rope", "products"):
            self._monkeypatch.delitem(sys.modules, f"{_FRONT_END}.{part}", raising=False)

    def keys(self) -> set[str]:
        """Those of all tables."""
        return {key for table in _TABLES for key in getattr(self.platform, f"PLATFORM_{table}_REGISTER")}
