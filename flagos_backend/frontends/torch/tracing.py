"""What Dynamo is told when it is loaded: above all to keep out of this package, which PyTorch calls while Dynamo
watches. Only torch.ops and lightx2v hold operations of users' programs, which are compiled with them."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_PACKAGE: Final = "flagos_backend"
_FRONT_ENDS: Final = "flagos_backend.frontends"
_FRONT_END: Final = f"{_FRONT_ENDS}.torch"
_TRACED: Final = (f"{_FRONT_END}.ops", f"{_FRONT_ENDS}.lightx2v")
_RULES: Final = "torch._dynamo.trace_rules"

#: Takes a module that has been loaded.
_Action = Callable[[Any], None]


def leave_alone() -> None:
    """Has Dynamo run this package as it is, what programs of users are made of excepted."""
    when_loaded(_RULES, _leave_alone)


def _leave_alone(rules: Any) -> None:
    for package in (_PACKAGE, _FRONT_ENDS, _FRONT_END):
        for child in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if child.name not in (_FRONT_ENDS, _FRONT_END, *_TRACED):
                rules.add(child.name)


def when_loaded(name: str, action: _Action) -> None:
    """Calls ``action`` with another package's module: now, or as soon as it is loaded, which takes too long for every
    program. An action that waits already does so once."""
    finder = next((found for found in sys.meta_path if isinstance(found, _Finder) and found.name == name), None)
    module = sys.modules.get(name)
    if finder is not None:
        if action not in finder.actions:
            finder.actions.append(action)
    elif module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Finds one module once, as without it, and has actions taken when it is loaded."""

    def __init__(self, name: str, action: _Action) -> None:
        self.name, self.actions = name, [action]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.actions)
        return spec


class _Loader(Loader):
    def __init__(self, original: Loader, actions: Sequence[_Action]) -> None:
        self._original, self._actions = original, actions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = self._original
        self._original.exec_module(module)
        for action in self._actions:
            action(module)
