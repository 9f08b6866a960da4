"""What is to happen when somebody imports a module. Serves lowering: to import JAX's rarely used parts for their
primitives would take longer than a short program."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Watch(MetaPathFinder):
    """Finds nothing itself: it has the loaders of others tell."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        actions = self.waiting.pop(fullname, None)
        if actions is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            for action in actions:
                action(module)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


_watch = _Watch()


def when_imported(name: str, action: Action) -> None:
    """Calls ``action`` with the module ``name``: now, if it has been imported, or right after its first import."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)
    _watch.waiting.setdefault(name, []).append(action)
