"""docs/howto.md, "From the smallest backend to a device in JAX": its commands and its manifest, run as they stand."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from flagos_backend.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def block(language: str) -> str:
    """The guide's one block of a language."""
    section = (
        (ROOT / "docs" / "howto.md").read_text().partition("### From the smallest backend")[2].partition("\n## ")[0]
    )
    [found] = re.findall(rf"^ *```{language}\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)
    return textwrap.dedent(found)


def test_the_guide_makes_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("tests", "plugin_abi"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    subprocess.run(["bash", "-e", "-c", block("sh")], check=True)
    manifest = tmp_path / "mychip" / "mychip.json"
    manifest.write_text(block("json"))
    assert main(["check", "mychip/mychip.json"]) == 0
    assert capsys.readouterr().out == "mychip/mychip.json: accepted\n"
    monkeypatch.setenv("FLAGOS_DRIVER_FILES", "mychip")
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.startswith("mychip 0.1.0\nminimal:0: minimal, process 0,")
    # Without a field that is required: its name, and the cure.
    manifest.write_text(block("json").replace(', "python": {"abi": "none"}', ""))
    assert main(["check", "mychip/mychip.json"]) == 1
    assert "field built_with.python is missing" in capsys.readouterr().out
