"""Triton's interpreter replaces functions of the language while a kernel runs, and walks all of it for each call of a
device function. Here it does so once a launch for each module of the language. interpreter_gaps.py adds this."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any


class Language:
    """What has been replaced since launches began, of which several threads may have some.

    The first launch replaces, and the last one to end gives the originals back. So a launch takes no function away from
    another thread's.
    """

    def __init__(self, interpreter: Any) -> None:
        self._modules = (interpreter.tl, interpreter.tl.core)
        self._scope_type = interpreter._LangPatchScope
        self._lock = threading.Lock()
        self._launches = 0
        self._seen: set[Any] = set()  # functions, so that the globals of each are read once
        self._replaced: set[str] = set()
        self._scopes: list[Any] = []

    def within(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``GridExecutor.__call__``, after which what it replaced is given back, whatever it raised."""

        @functools.wraps(run)
        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._launches += 1
            try:
                return run(executor, *args, **kwargs)
            finally:
                with self._lock:
                    self._launches -= 1
                    if not self._launches:
                        self._give_back()

        return launch

    def once(self, patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``_patch_lang``: the scope that it returns gives nothing back. Outside of launches it is the original."""

        @functools.wraps(patch)
        def patch_once(fn: Any) -> Any:
            with self._lock:
                if not self._launches:
                    return patch(fn)
                if fn not in self._seen:
                    names = {v.__name__ for v in fn.__globals__.values() if inspect.ismodule(v) and v in self._modules}
                    if not names or not names <= self._replaced:  # Triton refuses a function that sees no language
                        self._scopes.append(patch(fn))
                    self._replaced |= names
                    self._seen.add(fn)
                return self._scope_type()

        return patch_once

    def _give_back(self) -> None:
        while self._scopes:
            self._scopes.pop().restore()
        self._replaced.clear()
        self._seen.clear()


def patch_once_a_launch(interpreter: Any) -> bool:
    """Whether ``interpreter``, the module, has the shape that this knows; of another shape it is left alone."""
    if not _is_known(interpreter):
        return False
    language = Language(interpreter)
    interpreter._patch_lang = language.once(interpreter._patch_lang)
    interpreter.GridExecutor.__call__ = language.within(interpreter.GridExecutor.__call__)
    return True


def _is_known(interpreter: Any) -> bool:
    """Launches call ``_patch_lang(fn)`` and restore the scope that it returns; calls of device functions do not."""
    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "tl")
    if not all(hasattr(interpreter, name) for name in names):
        return False
    parts: list[Any] = [getattr(interpreter, name) for name in names]
    patch, scope, executor, language = parts
    return (
        callable(patch)
        and list(inspect.signature(patch).parameters) == ["fn"]
        and not inspect.signature(scope).parameters
        and hasattr(scope, "restore")
        and "_patch_lang" in getattr(getattr(executor.__call__, "__code__", None), "co_names", ())
        and hasattr(language, "core")
    )
