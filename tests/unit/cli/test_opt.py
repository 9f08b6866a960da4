"""flagos opt: the passes of a program, without a device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagos_backend.cli import nests, opt
from flagos_backend.cli.main import main
from flagos_backend.codegen.loop_pass_manager import EXCESS_PRECISION
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes import pipelines
from flagos_backend.passes.pass_manager import Pipeline
from programs import hlo_bytes


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "norm.hlo"
    x = np.ones((8, 16), np.float32)
    path.write_bytes(hlo_bytes(lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 0.0), x))
    return path


def test_prints_the_optimized_module(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", str(program)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("module jit__lambda") and " call(" not in out


def test_stops_prints_and_times(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", str(program), "--stop-after", "trivial_collectives"]) == 0
    assert " call(" in capsys.readouterr().out
    assert main(["opt", str(program), "--print-after", "inline_calls", "--print-after", "simplify"]) == 0
    out = capsys.readouterr().out
    assert out.index("// after inline_calls") < out.index("// after simplify")
    assert out.count("// after") == 2
    assert main(["opt", str(program), "--timing", "--disable", "dce", "--target", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert "match_attention" in out and "\ndce" not in out


def test_output_is_a_module(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "optimized.hlo"
    assert main(["opt", str(program), "--output", str(path)]) == 0
    assert not [i for i in import_module(path.read_bytes()).entry.instructions if i.opcode is Opcode.CALL]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target", "tpu"], ["no target 'tpu'", "cpu, simulated, sm_90"]),
        (["--disable", "inlining"], ["--disable holds 'inlining'", "inline_calls"]),
        (["--stop-after", "dce.9"], ["--stop-after holds 'dce.9'", "dce.2"]),
        (["--print-after", "every"], ["--print-after holds 'every'", "dce.2"]),
    ],
)
def test_unknown_names_are_one_line(
    program: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", str(program), *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert all(word in error for word in words)


@pytest.mark.parametrize("content", [b"", b"HloModule broken\nENTRY main {", b"\x00\xff\x17", b"module { func.func"])
def test_a_file_that_is_no_program_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program"
    path.write_bytes(content)
    assert main(["opt", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"flagos: {path} ")


def test_bisect_finds_nothing_in_what_is_right(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in ("cpu", "simulated"):
        assert main(["opt", str(program), "--bisect", "--target", target]) == 0
        assert "no pass of" in capsys.readouterr().out


def test_bisect_names_the_first_wrong_pass(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = pipelines.pipeline_for

    def wrong(*arguments: Any, **options: Any) -> Pipeline:
        return tuple(
            replace(step, run=lambda module, _: _with_sums_for_differences(module)) if step.name == "cse" else step
            for step in right(*arguments, **options)
        )

    monkeypatch.setattr(opt, "pipeline_for", wrong)
    assert main(["opt", str(program), "--bisect"]) == 1
    out = capsys.readouterr().out
    assert out.endswith("cse is the first pass that changes what the program computes\n")
    assert "simplify                       right" in out


def _with_sums_for_differences(module: Module) -> Module:
    made: dict[Instruction, Instruction] = {}
    for instruction in module.entry.instructions:
        opcode = Opcode.ADD if instruction.opcode is Opcode.SUBTRACT else instruction.opcode
        made[instruction] = replace(instruction, opcode=opcode, operands=tuple(made[o] for o in instruction.operands))
    entry = Computation(module.entry.name, tuple(made.values()), made[module.entry.root])
    return replace(module, entry=entry)


LOGARITHM = """\
nest [4] (@x: f32[4], @y: f32[4]) {
  %0 = f32 load @x[d0]
  %1 = f32 log(%0)
  %2 = f32 constant(0.6931472)
  %3 = f32 divide(%1, %2)
  store %3, @y[d0]
}
"""


@pytest.mark.parametrize("target", ["cpu", "simulated", "sm_90"])
def test_nests_are_printed_and_transformed(
    target: str, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", str(program), "--nests", "--target", target]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("nest [8, 16] (@") and "combine=add" in printed
    path = tmp_path / "nests.txt"
    path.write_text(printed)
    assert main(["opt", str(path), "--transform", "log2", "--target", target]) == 0
    assert capsys.readouterr().out == printed
    path.write_text(LOGARITHM)
    assert main(["opt", str(path), "--transform", "log2", "--target", target]) == 0
    assert '%1 = f32 log(%0), form="2"' in capsys.readouterr().out


def test_a_transform_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nests.txt"
    path.write_text(LOGARITHM)
    command = ["opt", str(path), "--evaluate", "--seed", "3", "--transform"]
    assert main([*command, "rotate"]) == 0
    assert capsys.readouterr().out == "nest 1: @y: the same bits\n"
    path.write_text(LOGARITHM.replace("f32", "f64"))  # the constant is not log(2) of float64: nothing is transformed
    assert main([*command, "log2"]) == 0
    assert capsys.readouterr().out == "nest 1: @y: the same bits\n"
    path.write_text(LOGARITHM)
    broken = replace(EXCESS_PRECISION, run=lambda nest: (replace(nest, dims=(3,)),))
    monkeypatch.setattr(nests, "EXCESS_PRECISION", broken)
    assert main([*command, "excess_precision"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("nest 1: @y: other bits; without rounding ")
    assert lines[1:] == ["excess_precision changes what the nests compute"]


def test_what_cannot_be_evaluated_is_one_line(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", str(program), "--evaluate"]) == 2
    assert "name a transform" in capsys.readouterr().err
    path = tmp_path / "nests.txt"
    path.write_text(
        "nest [] (@y: f32[]) {\n  %0 = f32 constant(1.0)\n"
        '  %1 = f32 exponential(%0), form="below"\n  store %1, @y[0]\n}'
    )
    assert main(["opt", str(path), "--evaluate", "--transform", "log2"]) == 1
    error = capsys.readouterr().err
    assert "nest 1 has no value on random arrays" in error and error.count("\n") == 1


def test_what_is_no_nest_or_transform_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nests.txt"
    path.write_text(LOGARITHM)
    assert main(["opt", str(path), "--transform", "log3"]) == 2
    error = capsys.readouterr().err
    assert "there is no transform 'log3'; known are: " in error and error.count("\n") == 1
    assert "split_long_reductions, " in error
    path.write_text(LOGARITHM.replace("divide", "div"))
    assert main(["opt", str(path), "--transform", "log2"]) == 2
    error = capsys.readouterr().err
    assert "there is no operation div. At line 5, column 12." in error and error.count("\n") == 1
    path.write_bytes(b"\xff\xfe")
    assert main(["opt", str(path), "--transform", "log2"]) == 2
    assert "it is no text" in capsys.readouterr().err
    assert main(["opt", str(tmp_path / "none"), "--transform", "log2"]) == 1
    assert "cannot be read" in capsys.readouterr().err
