"""What the FlagCX suite makes of what its processes say, and of a wrong checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.conformance import flagcx
from tools.conformance.flagcx import JSON_VARIABLE, MODES, build, is_refused, judge
from tools.conformance.flagcx_worker import DTYPES, KINDS, OPERATIONS
from tools.conformance.records import Status

SUM = "homogeneous all_reduce sum bfloat16 7"


@pytest.mark.parametrize(
    ("name", "messages", "status"),
    [
        (SUM, ["", ""], Status.PASSED),
        (SUM, ["", "3 of 7 differ"], Status.FAILED),
        (SUM, ["refused 4", "refused 4"], Status.FAILED),
        (SUM, ["", None], Status.HUNG),
    ],
)
def test_all_processes_have_to_agree(name: str, messages: list[str | None], status: Status) -> None:
    assert judge(name, [{} if message is None else {name: message} for message in messages])[0] is status


@pytest.mark.parametrize("mode", list(MODES))
def test_the_worker_knows_every_test(mode: str) -> None:
    names = flagcx.tests(mode)
    assert len(set(names)) == len(names) > 100
    for name in names:
        own, kind, operation, dtype, count = name.split()
        assert own == mode and kind in KINDS and dtype in DTYPES and int(count) > 0
        assert operation in OPERATIONS or operation == "-"
    assert not any(map(is_refused, names))
    assert (f"{mode} all_reduce sum bfloat16 1000" in names) is MODES[mode].homogeneous


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no checkout of FlagCX"):
        build(tmp_path, tmp_path / "out")


def test_a_checkout_without_its_submodule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JSON_VARIABLE, raising=False)
    (tmp_path / "flagcx").mkdir()
    (tmp_path / "flagcx/flagcx.cc").touch()
    with pytest.raises(FileNotFoundError, match=f"third-party/json, or name a folder that has it in {JSON_VARIABLE}"):
        build(tmp_path, tmp_path / "out")
