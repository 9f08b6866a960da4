"""Folders of the cache are this user's alone, or are not used."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flagos_backend.process import cache
from flagos_backend.process.cache import cache_root, private_folder


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


def test_a_relative_base_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "flagos"


@pytest.mark.parametrize("home", [None, "", "relative", "."])
def test_without_a_home_there_is_none(home: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.chdir(tmp_path)
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    assert cache_root() is None and private_folder("sources") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777], ids=oct)
@pytest.mark.parametrize("above", ["flagos", "."])
def test_not_where_others_may_replace_it(base: Path, above: str, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever may rename a folder may put another in its place, unless the one above keeps entries to their owners."""
    assert private_folder("sources") is not None
    (base / above).chmod(mode)
    assert (private_folder("sources") is not None) == bool(mode & stat.S_ISVTX)
    assert ("others may write to" in caplog.text) != bool(mode & stat.S_ISVTX)
    (base / above).chmod(0o700)


def test_not_where_a_link_leads_through_such_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "open" / "inner").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open/inner")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert private_folder("sources") is None


def test_what_is_made_on_the_way_is_the_users_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file mode creation mask says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "a" / "b"))
    before = os.umask(0)
    try:
        assert private_folder("sources") is not None
    finally:
        os.umask(before)
    assert {stat.S_IMODE((base / place).stat().st_mode) for place in ("a", "a/b", "a/b/flagos")} == {0o700}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program another user's or group's rights")
@pytest.mark.parametrize("rights", ["os.setregid(65534, 0)", "os.setreuid(65534, 0)"], ids=["setgid", "setuid"])
def test_loader_and_backend_agree_on_elevated_rights(base: Path, rights: str) -> None:
    program = (
        f"import os; {rights}\n"
        "from flagos_backend.process.cache import private_folder; from plugin_abi.cache import cache_folder\n"
        "from plugin_abi.search import SearchEnvironment\n"
        "e = SearchEnvironment.current(); print(private_folder('x'), cache_folder(e.variables, e.privileged))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "None"], done.stderr


def test_the_kernels_word_on_rights_counts_for_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """AT_SECURE: file capabilities, which no user or group tells."""
    monkeypatch.setattr(cache, "is_privileged", lambda: True)
    assert private_folder("sources") is None
