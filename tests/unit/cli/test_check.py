"""`flagos check` gives the loader's verdict on a manifest, and on a library alone what no manifest could repair."""

import subprocess
from pathlib import Path

import pytest

from flagos_backend.cli.main import main
from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import Tag

ENTRY = "int flagos_plugin_entry(void* args) { (void)args; return 2; }"


def build(folder: Path, source: str, *options: str) -> Path:
    library = folder / "libvendor.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), *options]
    subprocess.run(command, input=source, text=True, check=True)
    return library


def test_a_clean_library_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = build(tmp_path, ENTRY)
    assert main(["check", str(library)]) == 0
    out = capsys.readouterr().out
    assert "exports   flagos_plugin_entry\n" in out
    assert out.endswith(f"{library}: accepted\n")


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("int other(void) { return 0; }", "ENTRY_MISSING"),
        (f"{ENTRY} int other(void) {{ return 0; }}", "EXTRA_EXPORTS"),
        (f"{ENTRY} __attribute__((constructor)) static void start(void) {{}}", "STATIC_INITIALIZER"),
    ],
)
def test_a_defect_has_its_code(source: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(build(tmp_path, source))]) == 1
    assert code in capsys.readouterr().out


def test_what_is_no_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "libvendor.so.1"
    path.write_text("no ELF file, whatever it is called")
    assert main(["check", str(path)]) == 1
    assert "LIBRARY_NOT_ELF" in capsys.readouterr().out


def test_a_manifest_gets_the_loaders_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "50_vendor.json"
    path.write_text("{")
    assert main(["check", str(path)]) == 1
    assert "MANIFEST_NOT_JSON" in capsys.readouterr().out


def test_a_field_that_nobody_reads_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the verdict, whatever that is."""
    example = Path(__file__).parents[3] / "manifests" / "examples" / "40_flagos_nvidia.json"
    path = tmp_path / "50_vendor.json"
    path.write_text(example.read_text().replace('"priority"', '"sha265": "00", "priority"'))
    assert main(["check", str(path)]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"manifest {path}: nobody reads sha265 (did you mean sha256?)"
    assert "LIBRARY_NOT_FOUND" in "".join(rest)


def test_a_library_whose_tables_are_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = build(tmp_path, ENTRY)
    data = bytearray(library.read_bytes())
    elf = ElfFile(bytes(data))
    place = elf.file_offset(elf.tags[Tag.SYMTAB], "the symbols") + 24
    data[place : place + 4] = b"\xff\xff\xff\x7f"
    library.write_bytes(data)
    assert main(["check", str(library)]) == 1
    assert "LIBRARY_MALFORMED" in capsys.readouterr().out


def test_an_absent_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent.json")]) == 1
    assert "MANIFEST_NOT_FOUND" in capsys.readouterr().out
