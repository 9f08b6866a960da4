"""docs/howto.md, "From the sample to a device in JAX": its commands and its program, run as they stand.

The sample's own tests run on the backend that they make.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flagos_backend.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def _blocks(language: str) -> list[str]:
    """The guide's blocks of a language."""
    section = (ROOT / "docs" / "howto.md").read_text().partition("### From the sample")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def _run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_guide_makes_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    build, add = _blocks("sh")
    [program] = _blocks("python")
    (tmp_path / "seen.py").write_text(program)
    # CMake and Ninja are the environment's.
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CMAKE_GENERATOR": "Ninja"}
    python = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    built = _run(["bash", "-ec", build], tmp_path, **path, **python)
    assert built.returncode == 0, built.stdout + built.stderr
    monkeypatch.chdir(tmp_path)
    assert main(["check", "mychip/build/mychip.json"]) == 0
    assert capsys.readouterr().out == "mychip/build/mychip.json: accepted\n"
    monkeypatch.setenv("FLAGOS_DRIVER_FILES", "mychip/build")
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.startswith("mychip 0.1.0\nmychip:0: mychip, process 0,")

    jax = {"JAX_PLATFORMS": "flagos,cpu", "FLAGOS_DRIVER_FILES": str(tmp_path / "mychip" / "build"), **python}
    seen = _run([sys.executable, "seen.py"], tmp_path, **jax)
    assert "[1.        2.5231884 2.9280553 2.9901094] {mychip:0}" in seen.stdout
    assert seen.returncode == 1
    assert "UNIMPLEMENTED: sine: the mychip backend does not compute it; add it to `operations`" in seen.stderr

    added = _run(["bash", "-ec", add], tmp_path, **path, **python)
    assert added.returncode == 0, added.stdout + added.stderr
    seen = _run([sys.executable, "seen.py"], tmp_path, **jax)
    assert seen.returncode == 0, seen.stderr
    assert "0.84147" in seen.stdout

    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", "."]
    tested = _run([*pytest_, "tests"], tmp_path / "mychip", **jax)
    assert tested.returncode == 0, tested.stdout + tested.stderr
