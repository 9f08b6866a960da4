"""The open device is one, whichever threads use it first."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flagos_backend.frontends.torch.device import runtime as module


def test_it_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Any] = []

    def context(accepted: object) -> SimpleNamespace:
        contexts.append(accepted)
        time.sleep(0.02)
        return SimpleNamespace(addressable_devices=[SimpleNamespace(is_host_memory=True, attributes={})])

    monkeypatch.setattr(module, "loader", SimpleNamespace(load=lambda *_, **__: SimpleNamespace(accepted="backend")))
    monkeypatch.setattr(module, "Context", context)
    monkeypatch.setattr(module, "_native", SimpleNamespace(open=lambda *_: None))
    monkeypatch.setattr(module, "default_generator", lambda inner: object())
    found: list[module.Runtime] = []
    module._opened.cache_clear()
    try:
        threads = [threading.Thread(target=lambda: found.append(module.runtime())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        module._opened.cache_clear()
    assert contexts == ["backend"]
    assert len(found) == 3 and len({id(one) for one in found}) == 1
