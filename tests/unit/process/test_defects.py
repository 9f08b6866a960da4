"""What is reported of a defect is whole: in the message, or in a private file that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flagos_backend.process import defects


def _described(what: str) -> str:
    try:
        raise KeyError(what)
    except KeyError as error:
        return defects.describe(error)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_short_traceback_is_in_the_message(cache: Path) -> None:
    message = _described("short")
    assert message.startswith("KeyError: 'short'. At ")
    assert "Traceback (most recent call last)" in message and message.rstrip().endswith("KeyError: 'short'")
    assert not list(cache.rglob("report-*"))


def test_a_long_one_is_in_a_file_of_this_user_alone(cache: Path) -> None:
    message = _described("x" * 3 * defects.LONGEST)
    assert len(message) < defects.LONGEST
    file = Path(re.search(r"in (\S*/report-\S*\.txt),", message)[1])  # type: ignore[index]
    assert file.is_relative_to(cache) and file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().rstrip().endswith("x" * 3 * defects.LONGEST + "'")


def test_the_files_are_few(cache: Path) -> None:
    for number in range(defects.KEPT + 5):
        last = _described(f"{number} " + "x" * 2 * defects.LONGEST)
    kept = list(cache.rglob("report-*.txt"))
    assert len(kept) == defects.KEPT and any(str(file) in last for file in kept)


def test_without_a_place_for_files_the_message_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defects, "private_folder", lambda _name: None)
    assert "x" * 3 * defects.LONGEST in _described("x" * 3 * defects.LONGEST)
