"""What tools/test runs."""

from __future__ import annotations

from pathlib import Path

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
