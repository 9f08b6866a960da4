"""Programs on the host with fewer instruction sets than the processor has, each in a process of its own: the backend
chooses its kernels once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def _processor_has(name: str) -> bool:
    """Whether the processor has what glibc calls ``name``; the kernel writes it in lower case."""
    return name.lower() in Path("/proc/cpuinfo").read_text().split()


def run_without(instruction_sets: str, program: str, rng: np.random.Generator) -> None:
    """Runs ``program``, which takes a seed and prints JAX's backend last, as glibc's ``hwcaps`` says ("-AVX512F").
    Skips the test where that takes nothing from this processor: it would be the run without any."""
    names = [name.removeprefix("-") for name in instruction_sets.split(",") if name]
    if names and not any(map(_processor_has, names)):
        pytest.skip(f"the processor has no {' nor '.join(names)} that it could do without")
    tunables = {"GLIBC_TUNABLES": f"glibc.cpu.hwcaps={instruction_sets}"} if instruction_sets else {}
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu", **tunables}
    command = [sys.executable, "-c", program, str(rng.integers(2**31))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("flagos")
