"""What a report holds, and what it leaves out."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from jaxlib import _hlo  # type: ignore[attr-defined]

from flagos_backend.cli import report
from flagos_backend.cli.main import main
from flagos_backend.cli.program_file import read_program
from flagos_backend.importer import schema
from flagos_backend.importer.program import import_program
from flagos_backend.ir.attributes import ConstantAttributes
from flagos_backend.ir.opcode import Opcode

MODULE = """HloModule weights
ENTRY main {
  x = f32[20] parameter(0)
  w = f32[20] constant({1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20})
  i = s32[20] constant({1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20})
  f = f32[] constant(0.5)
  h = f32[20] broadcast(f), dimensions={}
  j = f32[20] convert(i)
  a = f32[20] multiply(x, w), metadata={op_name="jit(f)/mul" source_file="/home/anna/model.py" source_line=7}
  b = f32[20] multiply(a, h)
  ROOT c = f32[20] add(b, j)
}"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "weights.hlo"
    path.write_bytes(_hlo.hlo_module_from_text(MODULE).as_serialized_hlo_module_proto())
    return path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The subcommands that would run in processes of their own."""
    calls: list[tuple[str, ...]] = []

    def output_of(variables: dict[str, str], *arguments: str) -> bytes:
        calls.append(arguments)
        for name, folder in variables.items():
            assert name == "FLAGOS_DUMP_TO"
            Path(folder, "weights").mkdir(parents=True)
            Path(folder, "weights", "00-dce.txt").write_text("module\n")
        return f"{arguments[0]} said this\n".encode()

    monkeypatch.setattr(report, "_output_of", output_of)
    return calls


def test_weights_become_zeros_of_their_shape_and_few_numbers_stay(program: Path) -> None:
    cleared = report.without_weights(read_program(program))
    constants = {
        i.name: i.attributes_as(ConstantAttributes).data
        for i in import_program(cleared).module.entry.instructions
        if i.opcode is Opcode.CONSTANT
    }
    assert sorted(len(data) for data in constants.values()) == [4, 80, 80]
    kept = [data for data in constants.values() if any(data)]
    assert kept == [np.float32(0.5).tobytes()]


def test_source_files_lose_their_folders(program: Path) -> None:
    proto = schema.Program.FromString(report.without_weights(read_program(program)))
    assert b"anna" not in proto.SerializeToString()
    sources = {i.metadata.source_file for c in proto.module.computations for i in c.instructions}
    assert sources <= {"", "model.py"}


def test_a_report_holds_what_was_shown(
    program: Path, said: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, output = tmp_path / "run.log", tmp_path / "report.zip"
    log.write_text("it broke\n")
    assert main(["report", str(program), "--log", str(log), "--output", str(output), "--yes"]) == 0
    out = capsys.readouterr().out
    with zipfile.ZipFile(output) as file:
        names = file.namelist()
        assert file.read("logs/0-run.log") == b"it broke\n"
        assert file.read("doctor.txt") == b"doctor said this\n"
        assert import_program(file.read(report.PROGRAM)).module.name == "weights"
    assert names == ["doctor.txt", report.PROGRAM, "explain.txt", "dumps/weights/00-dce.txt", "logs/0-run.log"]
    assert "doctor said this" in out and all(name in out for name in names)
    assert [call[0] for call in said] == ["doctor", "explain"]


def test_without_a_terminal_somebody_has_to_say_yes(
    said: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "report.zip"
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["report", "--output", str(output)]) == 1
    assert "say --yes" in capsys.readouterr().err
    assert not output.exists() and len(said) == 1


@pytest.mark.parametrize(("answer", "written"), [("y", True), ("Yes", True), ("", False), ("n", False)])
def test_on_a_terminal_it_asks(
    answer: str, written: bool, said: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "report.zip"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert main(["report", "--output", str(output)]) == (0 if written else 1)
    assert output.exists() == written


def test_what_cannot_be_read_or_written_is_one_line(
    said: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "report.zip"
    here.write_bytes(b"")
    text = tmp_path / "notes.txt"
    text.write_text("no program")
    for arguments, message in (
        (["--output", str(here)], "exists; name another file"),
        (["--output", str(tmp_path / "absent" / "r.zip"), "--yes"], "cannot be written (No such file or directory)"),
        (["--output", str(tmp_path / "r.zip"), "--log", str(tmp_path / "none.log")], "cannot be read"),
        ([str(text), "--output", str(tmp_path / "r.zip")], "holds no program"),
    ):
        assert main(["report", *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1


def test_the_users_folder_is_not_named(
    said: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    log = tmp_path / "run.log"
    log.write_text(f"in {tmp_path}/model.py")
    assert dict(report._parts(None, [log]))["logs/0-run.log"] == b"in ~/model.py"
