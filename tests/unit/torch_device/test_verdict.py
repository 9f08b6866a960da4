"""The kept answer whether a backend is there: asked again when something changed on which it rests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flagos_backend.frontends.torch.device import verdict
from plugin_abi import loader
from plugin_abi.loader import LoadResult


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The loader refuses everything; each time that it is asked, the list grows."""
    calls: list[str] = []

    def load(*_arguments: Any, **_options: Any) -> LoadResult:
        calls.append("load")
        return LoadResult("flagos", None, ())

    monkeypatch.setattr(loader, "load", load)
    manifest = tmp_path / "50_test.json"
    manifest.write_text("{}")
    monkeypatch.setenv("FLAGOS_DRIVER_FILES", str(manifest))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def test_it_is_asked_once(asked: list[str]) -> None:
    assert [verdict.accepted(), verdict.accepted()] == [False, False]
    assert len(asked) == 1


def test_a_changed_manifest_is_asked_about(asked: list[str], tmp_path: Path) -> None:
    verdict.accepted()
    (tmp_path / "50_test.json").write_text('{"name": "other"}')
    verdict.accepted()
    assert len(asked) == 2


def test_a_changed_variable_is_asked_about(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    verdict.accepted()
    monkeypatch.setenv("FLAGOS_DRIVERS_SELECT", "*")
    verdict.accepted()
    assert len(asked) == 2


@pytest.mark.parametrize("content", ["nonsense", "[" * 100_000, "null"], ids=["no JSON", "deep", "null"])
def test_a_damaged_file_is_no_answer(content: str, asked: list[str], tmp_path: Path) -> None:
    verdict.accepted()
    (kept,) = (tmp_path / "cache").rglob("torch-*.json")
    kept.write_text(content)
    assert verdict.accepted() is False
    assert len(asked) == 2


def test_a_folder_that_others_can_write_keeps_nothing(asked: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "flagos" / "loader"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    verdict.accepted(), verdict.accepted()
    assert len(asked) == 2
