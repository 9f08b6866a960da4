"""Generated sources as modules."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType

import pytest

from flagos_backend.codegen.triton import sources


def test_a_source_is_one_module_in_all_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "folder", lambda: tmp_path)
    source = f"import time\ntime.sleep(0.02)\nplace = {str(tmp_path)!r}"
    found: list[ModuleType] = []
    threads = [threading.Thread(target=lambda: found.append(sources.load(source))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len({id(module) for module in found}) == 1
    assert found[0].place == str(tmp_path)
