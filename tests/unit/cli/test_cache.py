"""`flagos cache` shows and clears $XDG_CACHE_HOME/flagos, and nothing else."""

from pathlib import Path

import pytest

from flagos_backend.cli.main import main


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flagos"


def fill(folder: Path) -> None:
    (folder / "loader").mkdir(parents=True)
    (folder / "loader" / "verdict").write_bytes(bytes(2048))
    (folder / "loader" / "other").write_bytes(bytes(1024))


def test_show_counts_files_and_bytes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(cache)
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{cache}\n  loader: 2 files, 3.0 KiB\n"


def test_show_of_no_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "show"]) == 0
    assert capsys.readouterr().out == f"{cache} (does not exist)\n"


def test_clear_removes_it(cache: Path) -> None:
    fill(cache)
    beside = cache.parent / "other-program"
    beside.mkdir()
    assert main(["cache", "clear"]) == 0
    assert not cache.exists()
    assert beside.exists()
    assert main(["cache", "clear"]) == 0


def test_clear_follows_no_link(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    fill(elsewhere)
    cache.symlink_to(elsewhere)
    assert main(["cache", "clear"]) == 1
    assert (elsewhere / "loader" / "verdict").exists()
    assert "is a link" in capsys.readouterr().err
