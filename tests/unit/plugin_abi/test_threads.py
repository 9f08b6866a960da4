"""What a process has one of, when several threads are the first to ask for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from plugin_abi import cabi
from plugin_abi.host import callbacks


def in_threads(work: Callable[[], object]) -> list[object]:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(work())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def slow(*_: object) -> object:
    time.sleep(0.02)
    return object()


def test_every_closure_that_a_backend_is_given_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "_closures", {})
    monkeypatch.setattr(cabi, "ffi", lambda: SimpleNamespace(callback=slow))
    found = in_threads(lambda: callbacks.callback("FlagosEventCallback"))
    assert len(found) == 4 and all(each is callbacks.callback("FlagosEventCallback") for each in found)
