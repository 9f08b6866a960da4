"""Program files are recognised by their content, in each form that people keep them in."""

from pathlib import Path

import jax
import pytest

from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.program_file import Form, form_of, read_program
from flagos_backend.importer import schema
from flagos_backend.importer.program import import_program
from programs import hlo_bytes

MODULE = hlo_bytes(lambda x: x + 1, 2.0)


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"ML\xefR\x0dStableHLO_v1.13.7", Form.MLIR),
        (b"module @jit_f attributes {} {}", Form.MLIR),
        (b"// a comment\n#loc = loc(unknown)\nmodule {}", Form.MLIR),
        (b"func.func @main() { return }", Form.MLIR),
        (b"HloModule jit_f\n", Form.HLO_TEXT),
        (b"// a comment\n\nHloModule jit_f\n", Form.HLO_TEXT),
        (MODULE, Form.HLO_PROTO),
        (b"", None),
        (b"modules", None),
        (b"\x7fELF\x02\x01\x01", None),
        (b"\xff" * 64, None),
    ],
)
def test_form(content: bytes, form: Form | None) -> None:
    assert form_of(content) == form


def test_a_module_is_put_into_an_envelope(tmp_path: Path) -> None:
    path = tmp_path / "f.hlo"
    path.write_bytes(MODULE)
    serialized = read_program(path)
    assert import_program(serialized).device_assignment == ((0,),)
    assert schema.Program.FromString(serialized).module == schema.HloModuleProto.FromString(MODULE)


def test_an_envelope_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "module"
    path.write_bytes(MODULE)
    program = read_program(path)
    path.write_bytes(program)
    assert form_of(program) is Form.PROGRAM
    assert read_program(path) == program


def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing to compile")
    with pytest.raises(CommandFailed, match=r"notes\.txt holds no program"):
        read_program(path)


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"absent cannot be read \(No such file"):
        read_program(tmp_path / "absent")


def texts() -> dict[str, bytes]:
    lowered = jax.jit(lambda x: x + 1).lower(2.0)
    return {"stablehlo": lowered.as_text().encode(), "hlo": lowered.as_text("hlo").encode()}


@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_texts_are_converted_by_jaxlib(form: str, tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(texts()[form])
    program = import_program(read_program(path))
    assert "add" in {str(instruction.opcode) for instruction in program.module.entry.instructions}


@pytest.mark.parametrize(("text", "form"), [(b"module {", "StableHLO"), (b"HloModule f", "HLO text")])
def test_a_text_that_does_not_parse_is_named(text: bytes, form: str, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.write_bytes(text)
    with pytest.raises(CommandFailed, match=f"broken is not valid {form}"):
        read_program(path)
