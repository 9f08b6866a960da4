"""The command line itself: its parser, and what it does when there is no backend."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagos_backend import __version__
from flagos_backend.cli.main import SUBCOMMANDS, build_parser, load_subcommand, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"flagos {__version__}\n"


def test_every_subcommand_has_its_line_of_help() -> None:
    text = build_parser().format_help()
    for name, summary in SUBCOMMANDS.items():
        assert name in text
        assert (load_subcommand(name).__doc__ or "").splitlines()[0] == summary
        assert summary.endswith(".")


_HELP = """
import sys
from flagos_backend.cli.main import SUBCOMMANDS, main
for arguments in (["--help"], *([name, "--help"] for name in SUBCOMMANDS)):
    try:
        main(arguments)
    except SystemExit as ended:
        print("ended with", ended.code, *arguments)
    print("imported:", *sorted({"torch", "jax", "jaxlib", "triton"} & sys.modules.keys()))
    if arguments == ["--help"]:
        print("loaded:", *(name for name in SUBCOMMANDS if f"flagos_backend.cli.{name}" in sys.modules))
"""


def test_help_imports_no_framework() -> None:
    done = subprocess.run([sys.executable, "-c", _HELP], env=os.environ, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert "loaded:" in lines
    assert [line for line in lines if line.startswith("imported:")] == ["imported:"] * (1 + len(SUBCOMMANDS))
    for arguments in ("", *(f"{name} " for name in SUBCOMMANDS)):
        assert f"ended with 0 {arguments}--help" in lines
    assert any("--measure" in line for line in lines)  # an option of explain: its own help


def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such-command"])
    assert ended.value.code == 2
    assert "no-such-command" in capsys.readouterr().err


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: what a process has loaded once, it keeps."""
    program = "import sys; from flagos_backend.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)


def test_doctor_says_why_there_is_no_device(tmp_path: Path) -> None:
    manifest = tmp_path / "50_vendor.json"
    manifest.write_text("[]")
    done = run("doctor", FLAGOS_DRIVER_FILES=str(manifest))
    assert done.returncode == 1
    assert f"{manifest}: refused\n    FLAGOS-1110 MANIFEST_INVALID_FIELD" in done.stdout
    assert f"FLAGOS_DRIVER_FILES={manifest}\n" in done.stdout
    assert "no such device flagos" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "not ready: every backend for flagos that was found is refused, the first with FLAGOS-1110",
        f"next: flagos check {manifest}",
    ]
    assert "Traceback" not in done.stderr


def test_devices_without_a_backend_is_one_line(tmp_path: Path) -> None:
    done = run("devices", FLAGOS_DRIVER_FILES=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("flagos: no such device flagos. No manifest for it was found")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    program = "import sys; from flagos_backend.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "cache"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read() == b""
