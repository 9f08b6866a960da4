"""Folders of the cache are this user's alone, or are not used."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from flagos_backend.cache import cache_root, private_folder


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_made_for_this_user_alone(base: Path) -> None:
    folder = private_folder("sources")
    assert folder == base / "flagos" / "sources"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder("sources") == folder


@pytest.mark.parametrize("mode", [0o701, 0o720, 0o755, 0o777], ids=oct)
def test_not_when_others_have_rights(base: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    (base / "flagos" / "sources").mkdir(parents=True)
    (base / "flagos" / "sources").chmod(mode)
    assert private_folder("sources") is None
    assert "not a folder of this user alone" in caplog.text


def test_not_when_it_is_a_link(base: Path) -> None:
    (base / "flagos").mkdir()
    (base / "elsewhere").mkdir(mode=0o700)
    (base / "flagos" / "sources").symlink_to(base / "elsewhere")
    assert private_folder("sources") is None


def test_not_when_it_cannot_be_made(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    (base / "flagos").write_text("a file")
    assert private_folder("sources") is None
    assert "nothing is kept" in caplog.text


def test_a_relative_base_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path.home() / ".cache" / "flagos"
