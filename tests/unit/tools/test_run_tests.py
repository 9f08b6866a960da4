"""What tools/test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import run_tests

_ROOT = Path(__file__).parents[3]


def test_the_quick_choice_is_there_and_runs_once() -> None:
    assert [file for file in run_tests.QUICK if not (_ROOT / file).is_file()] == []
    assert all(run_tests.QUICK.values())
    files = [file for suite in run_tests.quick_suites() for file in suite.files]
    assert sorted(files) == sorted(run_tests.QUICK)


def test_a_process_of_the_quick_run_has_one_folder_of_the_host() -> None:
    for suite in run_tests.quick_suites():
        groups = {Path(file).parts[1] for file in suite.files}
        assert groups == {"unit"} or (groups == {"cpu"} and len({Path(file).parent for file in suite.files}) == 1)


def test_jax_is_set_up_in_a_process_of_its_own() -> None:
    assert not any(file.startswith("tests/unit/jax/") for file in run_tests.QUICK)


def test_the_longest_begin_first() -> None:
    folders = [suite.folder for suite in run_tests.suites()]
    assert folders[: len(run_tests.LONG)] == list(run_tests.LONG)
    assert len(set(folders)) == len(folders)


def test_every_folder_is_run_once() -> None:
    """A folder of tests/unit is run alone or with the others, and by nobody twice."""
    suites = {suite.folder: suite for suite in run_tests.suites()}
    alone = [folder for folder in suites if folder.startswith("tests/unit/")]
    assert sorted(suites["tests/unit"].ignored) == sorted(alone)
    assert "--ignore=tests/unit/jax" in suites["tests/unit"].arguments()
    for group in ("cpu", "multi"):
        folders = {path.parent for path in (_ROOT / "tests" / group).rglob("test_*.py")}
        found = [Path(folder) for folder in suites if folder.startswith(f"tests/{group}/")]
        assert all(sum(_ROOT / one in (folder, *folder.parents) for one in found) == 1 for folder in folders)


def test_a_summary_has_the_time_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text("import os\ndef test_it():\n    assert os.environ['CHOSEN'] == 'no'\n")
    runner = run_tests.Runner(["-p", "no:cacheprovider"])
    runner.run(run_tests.Suite("that", files=[str(tmp_path / "test_it.py")], environment={"CHOSEN": "yes"}))
    (line,) = runner.closing
    assert line.startswith("that ") and "1 failed" in line
    assert runner.failed and runner.seconds > 0
    assert "== pytest that" in capsys.readouterr().out
