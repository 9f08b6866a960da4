"""The conformance test can be asked of a backend that is not this project's: a vendor's way to test his own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from unit.plugin_abi.defects import DEFECTS
from unit.plugin_abi.plugins import Plugins

TEST = Path(__file__).parents[2] / "cpu" / "plugin_abi" / "test_conformance.py"


def _conforms(manifest: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["-n0", "-p", "no:cacheprovider", str(TEST), "-k", "the_entry or every_check"]
    variables = {**os.environ, "FLAGOS_TEST_DRIVER_FILES": str(manifest)}
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, env=variables, cwd=TEST.parents[3], capture_output=True, text=True)


def test_a_backend_of_somebody_else_is_tested(plugins: Plugins) -> None:
    done = _conforms(plugins.add())
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
    assert plugins.ran()


def test_one_that_is_refused_fails_with_the_reason(plugins: Plugins) -> None:
    done = _conforms(DEFECTS["table too short"].make(plugins))
    assert done.returncode == 1 and "TABLE_INVALID" in done.stdout
