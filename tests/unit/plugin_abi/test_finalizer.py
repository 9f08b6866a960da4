"""What is owed to a backend is given back once, also in a process whose exit handlers have run."""

from __future__ import annotations

import subprocess
import sys

from plugin_abi.finalizer import Finalizer


class Owner:
    pass


def test_the_function_is_called_once() -> None:
    calls: list[str] = []
    owner = Owner()
    finalizer = Finalizer(owner, calls.append, "gone")
    assert finalizer.alive and calls == []
    del owner
    assert not finalizer.alive and calls == ["gone"]
    finalizer()
    assert calls == ["gone"]


def test_exit_handlers_neither_call_nor_forget_it() -> None:
    script = """
import atexit, weakref
from plugin_abi.finalizer import Finalizer
class Owner: pass
first, second, other = Owner(), Owner(), Owner()
Finalizer(first, print, "first")
Finalizer(second, print, "second")
weakref.finalize(other, print, "weakref's")
atexit.register(lambda: print("a handler"))
atexit._run_exitfuncs()
del first
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[:3] == ["a handler", "weakref's", "first"]


def test_the_end_comes_after_every_handler() -> None:
    script = """
import atexit
atexit.register(print, "the first handler")
from plugin_abi import ending
ending.register(print, "the end")
ending.register(print, "before the end")
atexit.register(print, "a handler")
atexit._run_exitfuncs()
atexit.register(print, "registered again")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        *("a handler", "the first handler", "registered again", "before the end", "the end")
    ]
