"""The conformance tools: crashes and hangs are single failures, nothing is lost, and comparisons see what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tools.conformance import jax_tests, readme, report
from tools.conformance.comparison import compare
from tools.conformance.results import Record, ResultFile, Status, load
from tools.conformance.worker_pool import run_in_worker

SORT = {"dimension": 0, "num_keys": 1, "is_stable": False}


def test_a_worker_that_crashes_or_hangs_is_started_again() -> None:
    worker = """
import json, os, sys, time
for line in sys.stdin:
    match line.strip():
        case "crash": os.abort()
        case "hang": time.sleep(1000)
    print(json.dumps({"status": "passed", "message": "", "seconds": 0.5}), flush=True)
"""
    names = ["a", "crash", "b", "hang", "c"]
    records = run_in_worker([sys.executable, "-c", worker], names, ["group"] * 5, timeout=2, environment={})
    assert [(r.name, r.status) for r in records] == [
        ("a", Status.PASSED),
        ("crash", Status.CRASHED),
        ("b", Status.PASSED),
        ("hang", Status.HUNG),
        ("c", Status.PASSED),
    ]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Test files of all fates; `JAX_PLATFORMS` tells the platform under test from JAX's CPU."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "fates_test.py").write_text("""
import os, time, pytest
ON_CPU = os.environ["JAX_PLATFORMS"] == "cpu"
def test_passes(): pass
def test_crashes(): ON_CPU or os.abort()
def test_passes_later(): pass
def test_hangs(): ON_CPU or time.sleep(1000)
def test_fails(): assert ON_CPU, "ours"
def test_fails_everywhere(): assert False
def test_is_skipped(): pytest.skip("for a reason")
""")
    (tmp_path / "tests" / "import_test.py").write_text("import a_module_that_is_not_there")
    return tmp_path


def test_files_run_to_their_end_and_count_what_the_cpu_passes(checkout: Path, tmp_path: Path) -> None:
    files = ["fates_test.py", "import_test.py"]
    results = jax_tests.run(
        "other", tmp_path / "out", checkout, files, stride=1, offset=0, only="", resume=False, timeout=8
    )
    assert {name.rpartition("::")[2]: r.status for name, r in results.records.items()} == {
        "test_passes": Status.PASSED,
        "test_crashes": Status.CRASHED,
        "test_passes_later": Status.PASSED,
        "test_hangs": Status.HUNG,
        "test_fails": Status.FAILED,
        "test_fails_everywhere": Status.NOT_APPLICABLE,
        "test_is_skipped": Status.SKIPPED,
        "between tests": Status.NOT_APPLICABLE,
    }


def test_a_stride_takes_some_of_the_tests(checkout: Path, tmp_path: Path) -> None:
    results = jax_tests.run(
        "cpu", tmp_path / "out", checkout, ["fates_test.py"], stride=4, offset=2, only="", resume=False, timeout=60
    )
    assert {name.rpartition("::")[2] for name in results.records} == {"test_passes_later", "test_is_skipped"}


def test_tests_for_the_cpu_run_on_the_platform(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "tags_test.py").write_text("""
import os
os.environ["JAX_PLATFORMS"] = "cpu"
from absl.testing import absltest
from jax._src import test_util
test_util.device_under_test = lambda: "other"
class Tags(absltest.TestCase):
    @test_util.run_on_devices("cpu")
    def test_for_the_cpu(self): pass
    @test_util.run_on_devices("tpu")
    def test_for_another(self): pass
""")
    options = {"only": "", "resume": False, "timeout": 60.0}
    results = jax_tests.run("other", tmp_path / "out", tmp_path, ["tags_test.py"], stride=1, offset=0, **options)
    assert {name.rpartition("::")[2]: r.status for name, r in results.records.items()} == {
        "test_for_the_cpu": Status.PASSED,
        "test_for_another": Status.SKIPPED,
    }


def _written(path: Path, records: list[Record], suite: str = "some tests") -> Path:
    results = ResultFile(path, suite, "flagos", resume=False)
    for record in records:
        results.add(record)
    return path


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    path = _written(tmp_path / "out", [Record("a", "g", Status.PASSED)])
    resumed = ResultFile(path, "some tests", "flagos", resume=True)
    resumed.add(Record("b", "g", Status.FAILED, "why"))
    assert [r.name for r in load(path)[1]] == ["a", "b"]


def test_a_header_says_how_to_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["conformance", "jax-tests", "--checkout", "/somewhere/jax", "--stride", "8"])
    monkeypatch.setenv("JAX_NUM_GENERATED_CASES", "3")
    header = load(_written(tmp_path / "out", []))[0]
    assert header["command"] == (
        "JAX_NUM_GENERATED_CASES=3 python -m tools.conformance jax-tests --checkout jax --stride 8"
    )


def test_what_is_published_hides_no_failure_and_joins_parts(tmp_path: Path) -> None:
    passed, failed = Status.PASSED, Status.FAILED
    first = _written(tmp_path / "1", [Record("a", "g", passed), Record("b", "g", failed, "one | two\nthree")])
    second = _written(tmp_path / "2", [Record("c", "h", Status.NOT_APPLICABLE, "refused"), Record("a", "g", failed)])
    written = report.publish([first, second], tmp_path / "results")
    assert [p.name for p in written] == ["some_tests.json", "some_tests.md"]
    kept = json.loads(written[0].read_text())
    assert (kept["passed"], kept["counted"], len(kept["runs"])) == (0, 2, 2)
    assert kept["groups"] == {"g": {"failed": 2}, "h": {"not applicable": 1}}
    assert [r["name"] for r in kept["not passed"]] == ["a", "b"]
    assert "| b | failed | one \\| two |" in written[1].read_text()


def test_the_readme_says_what_is_published(tmp_path: Path) -> None:
    records = [Record("a", "g", Status.PASSED), Record("b", "g", Status.FAILED, "why")]
    report.publish([_written(tmp_path / "1", records)], tmp_path / "kept" / "results")
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    for _ in range(2):
        readme.update(page, tmp_path / "kept" / "results")
        first, *inside, last = page.read_text().partition(readme.BEGIN)[2].splitlines()
        assert (first, inside[0].count("|"), len(inside), last) == ("", 6, 4, "after")
        assert inside[2].startswith("| [some tests](kept/results/some_tests.md) | 50.00 % |")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the figures"):
        readme.update(page, tmp_path / "kept" / "results")


def test_what_is_published_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    failed = Record(
        "a", "g", Status.FAILED, "1/2 At /opt/some/where/file.py:3 and https://pytorch.org/docs/x in a/b.py"
    )
    written = report.publish([_written(tmp_path / "1", [failed])], tmp_path / "results")
    (kept,) = json.loads(written[0].read_text())["not passed"]
    assert kept["message"] == "1/2 At file.py:3 and https://pytorch.org/docs/x in a/b.py"


def test_unstable_sorts_may_order_equal_keys_as_they_like() -> None:
    keys, values = np.array([0, 0, 1], np.int32), np.array([5.0, 7.0, 6.0], np.float32)
    assert compare("sort", [], [keys, values[[1, 0, 2]]], [keys, values], SORT) == ""
    assert compare("sort", [], [keys, values[[1, 0, 2]]], [keys, values], SORT | {"is_stable": True})
    assert compare("sort", [], [keys, values[[0, 2, 1]]], [keys, values], SORT)
    assert compare("sort", [], [keys[::-1].copy(), values], [keys, values], SORT)


def test_complex_convolutions_are_as_precise_as_their_operands() -> None:
    operand, result = np.ones(1, np.complex64), np.ones(1, np.complex128)
    assert compare("conv_general_dilated", [operand, operand], [result + 1e-6], [result], {}) == ""
    assert compare("conv_general_dilated", [operand, operand], [result + 1e-3], [result], {})
    assert compare("conv_general_dilated", [result, result], [result + 1e-6], [result], {})


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [("float32", 1e-6, 1e-3), ("float64", 1e-14, 1e-8), ("bfloat16", 5e-3, 0.1), ("complex64", 1e-6, 1e-3)],
)
def test_tolerance_follows_the_element_type(dtype: str, near: float, far: float) -> None:
    ones = np.ones(3, np.dtype(dtype))
    assert compare("add", [], [ones + ones.dtype.type(near)], [ones], {}) == ""
    assert compare("add", [], [ones + ones.dtype.type(far)], [ones], {})
    assert compare("add", [], [ones[:2]], [ones], {})
    assert compare("add", [], [np.full(3, np.nan, ones.dtype)], [ones], {})
