"""The shells' completion, tried in bash itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flagos_backend.cli.completion import SHELLS
from flagos_backend.cli.main import SUBCOMMANDS, main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_the_whole_command_line(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert [name for name in SUBCOMMANDS if name not in text] == []
    assert "stop-after" in text  # an option of a subcommand


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flagos.bash").write_text(script("bash", capsys))
    (tmp_path / "layer.mlir").touch()
    program = """
    source flagos.bash
    complete -p flagos
    try() {
      COMP_WORDS=(flagos "$@"); COMP_CWORD=$#; COMP_LINE="flagos $*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
      _shtab_flagos flagos "${!#}" "" 2>/dev/null
      echo "$* -> ${COMPREPLY[*]}"
    }
    try do
    try opt --stop
    try explain lay
    try completion z
    """
    command = ["bash", "--norc", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    registered, *found = done.stdout.splitlines()
    assert registered.endswith(" flagos"), done.stderr
    assert found == [
        "do -> doctor",
        "opt --stop -> --stop-after",
        "explain lay -> layer.mlir",
        "completion z -> zsh",
    ]


def test_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "flagos: shell completion needs the package shtab; pip install 'flagos[completion]'\n"
