"""Programs on the host with fewer instruction sets than the processor has, each in a process of its own: the backend
chooses its kernels once."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np


def run_without(instruction_sets: str, program: str, rng: np.random.Generator) -> None:
    """Runs ``program``, which takes a seed and prints JAX's backend last, as glibc's ``hwcaps`` says ("-AVX512F")."""
    tunables = {"GLIBC_TUNABLES": f"glibc.cpu.hwcaps={instruction_sets}"} if instruction_sets else {}
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu", **tunables}
    command = [sys.executable, "-c", program, str(rng.integers(2**31))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("flagos")
