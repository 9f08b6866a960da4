"""JAX beside every defective plugin of the loader's tests: it starts, and naming the device gives all reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from unit.plugin_abi.defects import DEFECTS
from unit.plugin_abi.plugins import Plugins, Toolchain

PROGRAM = """
import flagos_backend.frontends.jax, jax
flagos_backend.frontends.jax.initialize()
print(jax.default_backend(), jax.jit(lambda x: x + 1)(41))
try:
    jax.devices("flagos")
except RuntimeError as error:
    print(error)
"""


def test_jax_starts_and_naming_the_device_gives_every_reason(tmp_path: Path) -> None:
    toolchain = Toolchain(tmp_path / "libraries")
    toolchain.folder.mkdir()
    here = [d for d in DEFECTS.values() if not d.frameworks and "FLAGOS_STATIC_INITIALIZERS" not in d.variables]
    folders = [defect.make(Plugins(toolchain, tmp_path / str(number))).parent for number, defect in enumerate(here)]
    (tmp_path / "home").mkdir()
    variables = {
        "FLAGOS_DRIVER_FILES": ":".join(map(str, folders)),
        "FLAGOS_TRIAL_TIMEOUT": "5",
        "XDG_CACHE_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    started, reason = done.stdout.splitlines()
    assert started == "cpu 42"
    assert "no such device flagos" in reason
    for defect in here:
        assert defect.code.name in reason
    assert len([line for line in done.stderr.splitlines() if line.startswith("manifest ")]) == len(here)
