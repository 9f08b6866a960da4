"""Products of F32 matrices on the host by either library, past the edges of every block, against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import hashlib, sys
import jax, numpy as np
import flagos_backend.jax
flagos_backend.frontends.jax.initialize()
rng = np.random.default_rng(int(sys.argv[1]))
sizes = [(2, 1, 2), (3, 5, 7), (16, 1100, 33), (40, 513, 70), (257, 90, 1030), (300, 600, 129), (530, 512, 64)]
digest = hashlib.sha256()
for batch in (), (3,):
    for m, k, n in sizes:
        for rows in "mk", "km":
            for columns in "kn", "nk":
                shapes = [batch + tuple({"m": m, "k": k, "n": n}[c] for c in letters) for letters in (rows, columns)]
                a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
                form = f"...{rows},...{columns}->...mn"
                product = np.asarray(jax.jit(lambda a, b: jax.numpy.einsum(form, a, b))(a, b))
                a, b = (x.astype(np.float64) for x in (a, b))
                exact = np.einsum(form, a, b, optimize=True)
                bound = np.einsum(form, abs(a), abs(b), optimize=True)
                worst = (abs(product - exact) / bound).max()
                assert worst < 1e-7 * (k + 10) ** 0.5, (batch, m, k, n, rows, columns, worst)
                digest.update(product.tobytes())
print(jax.default_backend(), digest.hexdigest())
"""


def products(library: str, seed: int, processors: set[int]) -> str:
    """What the program prints; an empty name leaves the choice to the processor."""
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu", "FLAGOS_CPU_PRODUCTS": library}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        command = [sys.executable, "-c", PROGRAM, str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    finally:
        os.sched_setaffinity(0, before)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_name_is_not_followed_and_says_so() -> None:
    program = (
        "import jax; import flagos_backend.jax as f; f.initialize(); x = jax.numpy.ones((8, 8)); print((x @ x)[0, 0])"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu", "FLAGOS_CPU_PRODUCTS": "blis"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout == "8.0\n"
    assert done.stderr.count("FLAGOS_CPU_PRODUCTS is blis, neither mkl nor onednn: not followed") == 1


@pytest.mark.parametrize("library", ["", "mkl", "onednn"])
def test_products_by_each_library(library: str, rng: np.random.Generator) -> None:
    assert products(library, int(rng.integers(2**31)), os.sched_getaffinity(0)).startswith("flagos ")


def test_blocks_sum_alike_on_any_number_of_threads(rng: np.random.Generator) -> None:
    """They are cut by the number of threads, but each element is summed in one order."""
    if "avx512bw" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("oneDNN's blocks are taken only with AVX-512, which this processor does not have")
    processors = os.sched_getaffinity(0)
    if len(processors) == 1:
        pytest.skip("only one processor may be used")
    seed = int(rng.integers(2**31))
    assert products("onednn", seed, {min(processors)}) == products("onednn", seed, processors)
