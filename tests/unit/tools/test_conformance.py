"""The conformance tools: crashes and hangs are single failures, nothing is lost, and comparisons see what is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tools.conformance import device, figures, jax_tests, report
from tools.conformance.comparison import compare
from tools.conformance.records import HOST, Device, Record, ResultFile, Status, load
from tools.conformance.worker_pool import run_in_workers

ROOT = Path(__file__).resolve().parents[3]
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
    records = run_in_workers([sys.executable, "-c", worker], names, ["group"] * 5, timeout=2, environment={})
    assert [(r.name, r.status) for r in records] == [
        ("a", Status.PASSED),
        ("crash", Status.CRASHED),
        ("b", Status.PASSED),
        ("hang", Status.HUNG),
        ("c", Status.PASSED),
    ]


def test_several_workers_answer_all_and_share_the_cores() -> None:
    worker = """
import json, os, sys
for line in sys.stdin:
    message = f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}"
    print(json.dumps({"status": "passed", "message": message, "seconds": 0.5}), flush=True)
"""
    names = [str(number) for number in range(40)]
    options = {"timeout": 30, "environment": {}, "workers": 2}
    records = list(run_in_workers([sys.executable, "-c", worker], names, names, **options))
    assert sorted(r.name for r in records) == sorted(names)
    assert {r.message.split()[1] for r in records} == {str(max(1, (os.cpu_count() or 1) // 2))}
    assert len({r.message.split()[0] for r in records}) <= 2


def test_a_worker_that_lost_its_device_is_replaced() -> None:
    worker = """
import os
from tools.conformance.records import Status
from tools.conformance.worker import serve
lost = False
def run(name):
    global lost
    lost = lost or name == "fault"
    return (Status.FAILED if lost else Status.PASSED), str(os.getpid())
def probe():
    if lost:
        raise RuntimeError("illegal address")
serve(run, probe)
"""
    names = ["a", "fault", "b"]
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{worker}"]
    records = list(run_in_workers(command, names, names, timeout=60, environment={}))
    assert [r.status for r in records] == [Status.PASSED, Status.CRASHED, Status.PASSED]
    assert records[1].message.startswith("the device is lost: RuntimeError: illegal address\n")
    assert records[0].message == records[1].message.splitlines()[1] != records[2].message


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


def _written(path: Path, records: list[Record], suite: str = "some tests", device: Device = HOST) -> Path:
    results = ResultFile(path, suite, "flagos", device, resume=False)
    for record in records:
        results.add(record)
    return path


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    path = _written(tmp_path / "out", [Record("a", "g", Status.PASSED)])
    resumed = ResultFile(path, "some tests", "flagos", HOST, resume=True)
    resumed.add(Record("b", "g", Status.FAILED, "why"))
    assert [r.name for r in load(path)[1]] == ["a", "b"]
    with pytest.raises(ValueError, match=r"'device': 'cpu'.*'device': 'cuda'"):
        ResultFile(path, "some tests", "flagos", Device("cuda"), resume=True)


def test_a_header_says_how_to_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["conformance", "jax-tests", "--checkout", "/somewhere/jax", "--stride", "8"])
    monkeypatch.setenv("JAX_NUM_GENERATED_CASES", "3")
    monkeypatch.setenv("FLAGOS_DEVICE", "cuda")
    header = load(_written(tmp_path / "out", [], device=Device("cuda", "Product X")))[0]
    assert header["command"] == (
        "FLAGOS_DEVICE=cuda JAX_NUM_GENERATED_CASES=3 python -m tools.conformance jax-tests --checkout jax --stride 8"
    )
    assert header["device"] == "cuda"
    assert header["machine"].endswith(", Product X")


@pytest.mark.parametrize(("chosen", "kind"), [("cpu", "cpu"), ("simulated", "simulated")])
def test_the_device_is_what_flagos_computes_on(chosen: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_DEVICE", chosen)
    assert device.of_platform("flagos").kind == kind
    assert device.of_tensors("flagos").kind == kind
    assert device.of_platform("cpu") == device.of_tensors("cpu") == HOST


def test_devices_have_tables_of_their_own(tmp_path: Path) -> None:
    passed, failed = Record("a", "g", Status.PASSED, "judged otherwise"), Record("a", "g", Status.FAILED, "why")
    files = [_written(tmp_path / "1", [passed]), _written(tmp_path / "2", [failed], device=Device("cuda", "X"))]
    undated = tmp_path / "3"  # as they were written before there was a device in them
    header, *rest = files[0].read_text().splitlines()
    undated.write_text("\n".join([header.replace('"device": "cpu", ', ""), *rest]))
    written = report.publish([*files, undated], tmp_path / "results")
    assert [p.name for p in written] == [
        "some_tests.json",
        "some_tests.md",
        "some_tests_cuda.json",
        "some_tests_cuda.md",
    ]
    assert [json.loads(p.read_text())["passed"] for p in written[::2]] == [1, 0]
    assert len(json.loads(written[0].read_text())["runs"]) == 2
    assert "\nOf what passed, 1 are judged otherwise.\n" in written[1].read_text()
    assert written[3].read_text().startswith("# some tests on flagos, cuda: 0 of 1")
    rows = figures.block(tmp_path / "results", "results").splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "[some tests](results/some_tests.md)",
        "[some tests, cuda](results/some_tests_cuda.md)",
    ]
    assert report.missing(files[0]) == []
    assert report.missing(files[1]) == ["a: why"]


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


def test_what_had_not_passed_is_renewed(tmp_path: Path) -> None:
    passed, failed, folder = Status.PASSED, Status.FAILED, tmp_path / "results"
    before = [Record("a", "g", passed), *(Record(name, "g", failed, "why") for name in "bcd")]
    report.publish([_written(tmp_path / "1", before)], folder)
    after = [
        *(Record("a", "g", passed), Record("b", "g", passed), Record("new", "h", passed)),
        *(Record("c", "g", Status.NOT_APPLICABLE, "refused"), Record("d", "g", Status.CRASHED, "/opt/of/theirs/x.py")),
    ]
    written = report.renew([_written(tmp_path / "2", after)], folder)
    assert [p.name for p in written] == ["some_tests.json", "some_tests.md"]
    kept = json.loads(written[0].read_text())
    assert (kept["passed"], kept["counted"], len(kept["runs"])) == (2, 3, 2)
    assert kept["groups"] == {"g": {"passed": 2, "not applicable": 1, "crashed": 1}}
    assert [(r["name"], r["status"], r["message"]) for r in kept["not passed"]] == [("d", "crashed", "x.py")]
    assert kept["not applicable"] == {"refused": 1}
    assert kept["others"] == "0 failed, 1 crashed, 0 hung, 1 not applicable, 0 skipped"
    assert written[1].read_text().startswith("# some tests on flagos: 2 of 3 (66.67 %)")
    with pytest.raises(ValueError, match=r"publish all of \['a'\]"):
        report.renew([_written(tmp_path / "3", [Record("a", "g", failed)])], folder)


def test_what_is_refused_does_not_count_and_is_told_with_its_reason(tmp_path: Path) -> None:
    refused = [Record(name, "g", Status.REFUSED, "wrong of | integers\nof two kinds") for name in "bc"]
    path = _written(tmp_path / "1", [Record("a", "g", Status.PASSED), *refused])
    assert report.missing(path) == []
    assert "1 of 1 (100.00 %)" in report.summary(path) and "2 refused" in report.summary(path)
    table = report.publish([path], tmp_path / "results")[1].read_text()
    assert "| g | 1 | 1 |" in table
    assert "| wrong of \\| integers | 2 |" in table


def test_the_readme_says_what_is_published(tmp_path: Path) -> None:
    records = [Record("a", "g", Status.PASSED), Record("b", "g", Status.FAILED, "why")]
    report.publish([_written(tmp_path / "1", records)], tmp_path / "kept" / "results")
    page = tmp_path / "README.md"
    page.write_text(f"before\n{figures.BEGIN}\nold\n{figures.END}\nafter\n")
    for _ in range(2):
        figures.update(page, tmp_path / "kept" / "results")
        first, *inside, last = page.read_text().partition(figures.BEGIN)[2].splitlines()
        assert (first, inside[0].count("|"), len(inside), last) == ("", 6, 4, "after")
        assert inside[2].startswith("| [some tests](kept/results/some_tests.md) | 50.00 % |")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the figures"):
        figures.update(page, tmp_path / "kept" / "results")


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


@pytest.mark.parametrize(("dtype", "is_rounded"), [("float32", True), ("complex64", True), ("float64", False)])
def test_products_may_be_rounded_to_tf32_where_they_are_allowed_to(dtype: str, is_rounded: bool) -> None:
    ones = np.ones(3, np.dtype(dtype))
    parameters = {"precision": None}
    assert compare("dot_general", [], [ones * (1 + 1e-3)], [ones], parameters)
    assert (compare("dot_general", [], [ones * (1 + 1e-3)], [ones], parameters, tensor_float=True) == "") is is_rounded
    assert compare("dot_general", [], [ones * (1 + 2e-2)], [ones], parameters, tensor_float=True)


def test_factors_of_complex_matrices_are_held_to_what_they_satisfy(rng: np.random.Generator) -> None:
    """Without an exchange of rows, with the one of the host's library, and with a wrong one."""
    a = (rng.standard_normal((2, 5, 4)) + 1j * rng.standard_normal((2, 5, 4))).astype(np.complex64)
    theirs = list(map(np.asarray, jax.lax.linalg.lu(a)))
    assert compare("lu", [a], theirs, theirs, {}) == ""
    other = [x[..., ::-1, :].copy() for x in theirs[:1]] + theirs[1:]
    assert compare("lu", [a], other, theirs, {})
    assert "permutation" in compare("lu", [a], [*theirs[:2], theirs[2][..., ::-1]], theirs, {})
    tall = (a * 0 + np.arange(1, 6)[:, None] * (np.arange(4) + 1) ** 2 + np.eye(5, 4)).astype(np.complex64)
    rows = [np.broadcast_to(np.arange(n, dtype=np.int32), (2, n)) for n in (4, 5)]
    unpivoted = [tall.copy(), *rows]
    for k in range(4):
        unpivoted[0][:, k + 1 :, k] /= unpivoted[0][:, k, None, k]
        unpivoted[0][:, k + 1 :, k + 1 :] -= unpivoted[0][:, k + 1 :, k, None] * unpivoted[0][:, k, None, k + 1 :]
    found = compare("lu", [tall], unpivoted, list(map(np.asarray, jax.lax.linalg.lu(tall))), {})
    assert found == "a factor is larger than its pivot"
    real = [np.ascontiguousarray(x.real) if x.dtype.kind == "c" else x for x in theirs]
    assert compare("lu", [a.real], [real[0] * 1.01, *real[1:]], real, {})
