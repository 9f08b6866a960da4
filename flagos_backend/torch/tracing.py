"""Keeps Dynamo out of this package: PyTorch calls it while Dynamo watches, and none of it is a program to compile."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_PACKAGE: Final = "flagos_backend"
_RULES: Final = "torch._dynamo.trace_rules"


def leave_alone() -> None:
    """Has Dynamo run this package as it is: now, or as soon as it is loaded, which takes too long for every program."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        rules.add(_PACKAGE)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds Dynamo's rules once, as without it, and adds to them when they are loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, original: Loader) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = self._original
        self._original.exec_module(module)
        module.add(_PACKAGE)
