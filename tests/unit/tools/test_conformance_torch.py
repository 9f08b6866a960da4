"""The PyTorch suites of the conformance tools: what they compare, and that they see what is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from flagos_backend.devices import tensor_float
from tools.conformance import models, opinfo, opinfo_worker, tensors, torch_tests
from tools.conformance.model_zoo import MODELS, without_dropout
from tools.conformance.models import Way
from tools.conformance.opinfo import Case, Direction, Mode
from tools.conformance.records import Status, load
from tools.conformance.tensors import compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex32])
def test_tolerance_follows_the_dtype(dtype: torch.dtype) -> None:
    wide = torch.full((3,), 1.0, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    eps = torch.finfo(dtype).eps
    assert compare((wide * (1 + eps)).to(dtype), wide.to(dtype)) == ""
    assert compare((wide * 1.1).to(dtype), wide.to(dtype))


@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([math.nan, 1.0]), torch.ones(2)),
        (torch.tensor([True]), torch.tensor([False])),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        (None, torch.ones(2)),
        (1, 2),
        (1, 1.0),
    ],
)
def test_differences_are_seen(ours: object, reference: object) -> None:
    assert compare(ours, reference)
    assert compare(reference, reference) == ""


def test_empty_memory_is_compared_by_size_and_type_alone() -> None:
    assert compare(torch.zeros(2), torch.ones(2), values=False) == ""
    assert compare(torch.zeros(2), torch.zeros(3), values=False)
    assert compare(torch.zeros(2), torch.zeros(2, dtype=torch.int32), values=False)


def test_the_truth_decides_between_two_roundings() -> None:
    exact = torch.tensor([1.0, 1e-3], dtype=torch.float64)
    reference = (exact + torch.tensor([0, 2e-4])).float()
    assert compare((exact + torch.tensor([0, -3e-4])).float(), reference, lambda: exact) == ""
    assert compare((exact + torch.tensor([0, -9e-4])).float(), reference, lambda: exact)
    assert compare(exact.float(), reference + 1, lambda: exact), "a reference far from the truth proves nothing"
    assert compare(torch.tensor([1.0, math.inf]), reference, lambda: exact)


def test_the_truth_does_not_decide_between_layouts() -> None:
    exact = torch.ones(2, dtype=torch.float64)
    assert compare(exact.float().to_sparse(), exact.float(), lambda: exact)


def test_what_is_zero_but_for_roundings_is_judged_by_what_it_was_computed_from() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    reference, ours = zero.float() + 2e-4, zero.float() - 3e-4
    assert compare(ours, reference, lambda: zero)
    assert compare(ours, reference, lambda: zero, scale=10.0) == ""
    assert compare(ours * 9, reference, lambda: zero, scale=10.0)


def test_of_what_cancels_the_truth_decides_who_is_nearer() -> None:
    """Results that are zero but for roundings of operands up to 9."""
    zero = torch.zeros(2, dtype=torch.float64)
    reference = zero.float() + 3e-5

    def judged(ours: torch.Tensor, reference: torch.Tensor = reference, largest: float = 9.0) -> str:
        return compare(ours, reference, lambda: zero, operands=lambda: [torch.tensor([-largest, math.inf]), 1])

    assert compare(zero.float(), reference, lambda: zero), "nothing says what cancels"
    assert judged(zero.float()) == ""
    assert judged(-reference) == ""
    assert judged(-1.1 * reference), "ours is the worse one"
    assert judged(reference, zero.float()), "ours is the only wrong one"
    assert judged(zero.float(), reference * 100), "no rounding of such operands"
    assert judged(zero.float(), largest=0.1), "no rounding of such operands"
    halves = zero.bfloat16()
    assert judged(halves, halves + 0.02), "a rounding of bfloat16, but a share of the operands that is no noise"


def test_where_half_floats_overflowed_the_truth_decides() -> None:
    """Of two elements the reference has lost the first one on its way."""

    def judged(ours: list[float], reference: list[float], exact: list[float], dtype: torch.dtype) -> str:
        truth = torch.tensor(exact, dtype=torch.float64)
        return compare(torch.tensor(ours, dtype=dtype), torch.tensor(reference, dtype=dtype), lambda: truth)

    inf, nan, half = math.inf, math.nan, torch.float16
    assert judged([99.1875, 1], [inf, 1], [99.2, 1], half) == ""
    assert judged([99.1875, 1], [nan, 1], [99.2, 1], half) == "", "infinity less infinity"
    assert judged([-inf, 1], [nan, 1], [-7e5, 1], half) == "", "the truth itself is beyond the type"
    assert judged([-65504, 1], [-inf, 1], [-65530, 1], half) == "", "beyond it by less than a rounding"
    assert judged([99.2, 1], [inf, 1], [99.2, 1], torch.bfloat16) == ""
    assert judged([98.7, 1], [inf, 1], [99.2, 1], half), "ours is not the truth"
    assert judged([inf, 1], [nan, 1], [-7e5, 1], half), "ours is infinite on the other side"
    assert judged([nan, 1], [inf, 1], [99.2, 1], half)
    assert judged([65504, 1], [inf, 1], [7e5, 1], half), "the truth is beyond the type and ours is not"
    assert judged([99.2, 1.1], [inf, 1], [99.2, 1], half), "the other one is wrong"
    assert judged([inf, 1], [99.2, 1], [99.2, 1], half), "ours is what overflowed"
    assert judged([99.2, 1], [inf, 1], [inf, 1], half), "the truth is infinite"
    assert judged([99.2, 1], [inf, 1], [99.2, 1], torch.float32), "no half"
    scalars = torch.tensor(99.1875, dtype=half), torch.tensor(inf, dtype=half)
    assert compare(*scalars, lambda: torch.tensor(99.2, dtype=torch.float64)) == ""


def test_rows_of_one_element_have_no_gradient() -> None:
    """Of what layer norm subtracts from itself eager leaves roundings, and ours nothing."""
    assert opinfo_worker._Runner(Mode.COMPILE, 100, "cpu")("native_layer_norm float32 backward") == (Status.PASSED, "")


def test_each_operator_has_both_directions_where_it_has_derivatives() -> None:
    cases = {str(case) for case in opinfo.cases()}
    assert {"add float32 forward", "add float32 backward", "add int64 forward"} <= cases
    assert "add int64 backward" not in cases
    assert len(cases) == len(list(opinfo.cases()))
    assert Case.parse("add int64 forward") == Case("add", "int64", Direction.FORWARD)


def test_element_types_of_the_accelerator_are_listed_too() -> None:
    on_host, there = ({str(case) for case in opinfo.cases(device)} for device in ("cpu", "cuda"))
    assert on_host < there
    assert "acos complex32 forward" in there - on_host


def test_nothing_is_rounded_to_tensor_float() -> None:
    def settings() -> list[object]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        return [matmul.allow_tf32, cudnn.allow_tf32, cudnn.conv.fp32_precision == "tf32", tensor_float.is_set()]

    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        before = settings()
        assert before[0]
        with tensors.exact_products():
            assert settings() == [False] * 4
        assert settings() == before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_results_lie_where_eager_leaves_them() -> None:
    here, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    assert opinfo_worker._displaced([here, 1], [here, 1]) == ""
    assert opinfo_worker._displaced([here, elsewhere], [here, here]) == "result 1 is on meta instead of cpu"


@pytest.mark.parametrize(
    ("there", "ours", "status", "message"),
    [
        (2.0, 2.0, Status.PASSED, "judged by eager on xpu"),  # as if drawn by another generator
        (2.0, 0.0, Status.PASSED, ""),  # as on the CPU
        (2.0, 3.0, Status.NOT_APPLICABLE, "aot_eager, judged by eager on xpu"),
        (0.0, 3.0, Status.FAILED, "sample 0: result 0: "),
        (None, 3.0, Status.FAILED, "sample 0: result 0: "),
    ],
)
def test_eager_on_the_accelerator_is_the_oracle_where_it_differs_from_the_cpu(
    there: float | None, ours: float, status: Status, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side adds a number to what the operator gives on the CPU; None is refused."""
    on_cpu = opinfo_worker._Trial.eager

    def eager(trial: opinfo_worker._Trial, device: torch.device) -> torch.Tensor:
        if device.type == "xpu" and there is None:
            raise NotImplementedError
        return on_cpu(trial, torch.device("cpu")) + (there if device.type == "xpu" else 0.0)

    monkeypatch.setattr(opinfo_worker._Trial, "eager", eager)
    monkeypatch.setattr(opinfo_worker._Runner, "_ours", lambda _, trial: trial.run() + ours)
    runner = opinfo_worker._Runner(Mode.COMPILE, 1, "cpu")
    runner._own = torch.device("xpu")
    outcome = runner("nn.functional.softsign float64 forward")
    assert outcome[0] is status
    assert outcome[1].startswith(message) if message else outcome[1] == ""


@pytest.mark.parametrize(("refuses", "status"), [({"cpu"}, Status.PASSED), ({"cpu", "xpu"}, Status.NOT_APPLICABLE)])
def test_what_the_cpu_refuses_is_judged_by_the_accelerator(
    refuses: set[str], status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    def eager(trial: opinfo_worker._Trial, device: torch.device) -> torch.Tensor:
        if device.type in refuses:
            raise NotImplementedError("no such kernel")
        return trial.run()

    monkeypatch.setattr(opinfo_worker._Trial, "eager", eager)
    runner = opinfo_worker._Runner(Mode.COMPILE, 1, "cpu")
    runner._own = torch.device("xpu")
    outcome = runner("nn.functional.softsign float64 forward")
    assert outcome[0] is status
    assert "eager on xpu" in outcome[1]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_DEVICE", "simulated")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.usefixtures("simulated")
def test_operators_are_compiled_for_an_accelerator(tmp_path: Path) -> None:
    path = tmp_path / "out"
    chosen = {"samples": 1, "stride": 1, "offset": 0, "resume": False, "timeout": 120.0}
    results = opinfo.run(Mode.COMPILE, path, only="nn.functional.softsign float32", device="flagos", **chosen)
    assert {name: record.status for name, record in results.records.items()} == {
        "nn.functional.softsign float32 forward": Status.PASSED,
        "nn.functional.softsign float32 backward": Status.PASSED,
    }
    assert load(path)[0]["device"] == "simulated"


def test_operators_run_through_torch_compile(tmp_path: Path) -> None:
    results = opinfo.run(
        Mode.COMPILE,
        tmp_path / "out",
        samples=2,
        only="nn.functional.softsign float32",
        stride=1,
        offset=0,
        resume=False,
        timeout=120,
    )
    assert {name: record.status for name, record in results.records.items()} == {
        "nn.functional.softsign float32 forward": Status.PASSED,
        "nn.functional.softsign float32 backward": Status.PASSED,
    }


def test_pytorch_s_files_count_what_passes_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_fates.py").write_text("""
import os
DEVICE = {"cpu": "cpu", "privateuse1": "flagos"}[os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"]]

class Tests:
    def passes(self): pass
    def fails(self): assert DEVICE == "cpu"
    def fails_everywhere(self): assert False

fates = {f"test_{name}_{DEVICE}_float32": getattr(Tests, name) for name in ("passes", "fails", "fails_everywhere")}
for suffix in ["CPU"] if DEVICE == "cpu" else ["PRIVATEUSE1", "FLAGOS"]:
    globals()[f"TestFates{suffix}"] = type("TestFates", (), fates)
""")
    chosen = {"only": "", "resume": False, "timeout": 60.0}
    results = torch_tests.run(tmp_path / "out", tmp_path, ["test_fates.py"], stride=1, offset=0, **chosen)
    assert {name.partition("::")[2]: r.status for name, r in results.records.items()} == {
        f"TestFates{suffix}::test_{name}_flagos_float32": status
        for suffix in ("PRIVATEUSE1", "FLAGOS")
        for name, status in (
            ("passes", Status.PASSED),
            ("fails", Status.FAILED),
            ("fails_everywhere", Status.NOT_APPLICABLE),
        )
    }
    results = torch_tests.run(tmp_path / "out", tmp_path, ["test_fates.py"], stride=3, offset=1, **chosen)
    assert [name.rpartition("::")[2] for name in results.records] == ["test_fails_flagos_float32"] * 2


def test_a_model_trains_compiled(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the transformers library is not installed")
    results = models.run(tmp_path / "out", [Way.COMPILED_CPU], only="distilbert", resume=False, timeout=240)
    assert [(r.name, r.status) for r in results.records.values()] == [
        ("distilbert, compiled on the CPU", Status.PASSED)
    ]


def test_a_model_without_dropout_depends_on_no_seed() -> None:
    pytest.importorskip("transformers", reason="the transformers library is not installed")
    torch.manual_seed(0)
    model = MODELS["bert"]
    module, inputs = model.make().train(), model.inputs()
    for differs in (True, False):
        losses = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            losses.append(module(**inputs).loss)
        assert torch.equal(*losses) is not differs
        without_dropout(module)


@pytest.mark.usefixtures("simulated")
def test_a_model_trains_on_an_accelerator(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the transformers library is not installed")
    results = models.run(tmp_path / "out", only="distilbert", resume=False, timeout=240, device="flagos")
    assert [(r.name, r.status) for r in results.records.values()] == [
        ("distilbert, compiled on the accelerator", Status.PASSED)
    ]
    with pytest.raises(ValueError, match="cpu does not go with compiled on the accelerator"):
        models.run(tmp_path / "out", [Way.COMPILED_ACCELERATOR], only="distilbert", resume=False, timeout=240)
