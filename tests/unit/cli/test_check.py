"""`flagos check` gives the loader's verdict on a manifest, and on a library alone what no manifest could repair."""

import subprocess
from pathlib import Path

import pytest

from flagos_backend.cli.main import main

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


def test_an_absent_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent.json")]) == 1
    assert "MANIFEST_NOT_FOUND" in capsys.readouterr().out
