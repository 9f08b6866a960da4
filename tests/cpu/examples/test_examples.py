"""docs/examples, run as a user runs them: each checks its own result."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
#: What an example needs beside the packages of the tests.
NEEDS = {"serve_vllm": "vllm"}
VARIABLES = {"train_jax": {"JAX_PLATFORMS": "flagos,cpu"}, "custom_kernel": {"TRITON_INTERPRET": "1"}}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_it_ends_well(name: str, tmp_path: Path) -> None:
    needed = NEEDS.get(name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: its packages are another environment's (tools/conformance vllm)")
    # Where the tests import the package from, which for an installed one is no path of theirs.
    python = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    environment = {**os.environ, **python, **VARIABLES.get(name, {})}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
