"""FLAGOS_DEBUG under JAX: what the backend decides is on stderr."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax
import flagos_backend.frontends.jax
flagos_backend.frontends.jax.initialize()
jax.jit(lambda x: jax.numpy.tanh(x) @ x, inline=True).lower(jax.numpy.ones((8, 8))).compile()
"""


@pytest.mark.parametrize(("level", "decisions", "steps"), [("", False, False), ("2", True, False), ("3", True, True)])
def test_a_programs_compilation_is_told(level: str, decisions: bool, steps: bool) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu", "FLAGOS_DEBUG": level}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
    assert ("flagos backend: compiled jit" in done.stderr) == decisions  # native
    assert ("flagos backend: emitted jit" in done.stderr) == steps  # of Python
