"""Products of matrices on the host by either library and by our own kernels, past the edges of every block, and what
factorizations make of them, against float64 and its products."""

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
jax.config.update("jax_enable_x64", True)
import flagos_backend.jax
flagos_backend.frontends.jax.initialize()
rng = np.random.default_rng(int(sys.argv[1]))
sizes = [(2, 1, 2), (3, 5, 7), (16, 1100, 33), (40, 513, 70), (257, 90, 1030), (300, 600, 129), (530, 512, 64)]
digest = hashlib.sha256()
for batch, dtype in ((), np.float32), ((3,), np.float32), ((2,), np.float64):
    for m, k, n in sizes:
        for rows in "mk", "km":
            for columns in "kn", "nk":
                shapes = [batch + tuple({"m": m, "k": k, "n": n}[c] for c in letters) for letters in (rows, columns)]
                a, b = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
                form = f"...{rows},...{columns}->...mn"
                product = np.asarray(jax.jit(lambda a, b: jax.numpy.einsum(form, a, b))(a, b))
                a, b = (x.astype(np.float64) for x in (a, b))
                exact = np.einsum(form, a, b, optimize=True)
                bound = np.einsum(form, abs(a), abs(b), optimize=True)
                worst = (abs(product - exact) / bound).max()
                assert product.dtype == dtype
                assert worst < np.finfo(dtype).eps * (k + 10) ** 0.5, (batch, m, k, n, rows, columns, worst)
                digest.update(product.tobytes())
print(jax.default_backend(), digest.hexdigest())
"""


FACTORIZATIONS = """
import sys
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
import flagos_backend.jax
flagos_backend.frontends.jax.initialize()
rng = np.random.default_rng(int(sys.argv[1]))
jnp = jax.numpy


def numbers(dtype, *shape):
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def check(name, got, exact, bound, factor):
    assert got.dtype == dtype, name
    worst = (abs(got - exact) / bound).max() / np.finfo(dtype).eps
    assert worst < factor, (name, dtype, size, worst)


for dtype in (np.float32, np.float64, np.complex64, np.complex128):
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    for size in (1, 17, 150):
        a, b = numbers(dtype, size, size), numbers(dtype, size, 3)
        positive = (a.astype(wide) @ a.conj().T.astype(wide) / size + np.eye(size)).astype(dtype)
        norm = np.linalg.norm(positive.astype(wide))
        l = np.asarray(jax.jit(jnp.linalg.cholesky)(positive)).astype(dtype)
        check("cholesky", l, l, 1, 1)
        check("cholesky", (l.astype(wide) @ l.conj().T.astype(wide)).astype(dtype), positive, norm, 4 * size)
        for right in (b, b[:, 0]):
            x = np.asarray(jax.jit(jnp.linalg.solve)(positive, right))
            residual = positive.astype(wide) @ x.astype(wide) - right
            assert abs(residual).max() < 8 * size * np.finfo(dtype).eps * norm * abs(x).max(), ("solve", dtype, size)
        for rows, columns in ((size, size), (size + 30, size), (size, size + 30)):
            m = numbers(dtype, rows, columns)
            q, r = (np.asarray(x) for x in jax.jit(jnp.linalg.qr)(m))
            check("qr", (q.astype(wide) @ r.astype(wide)).astype(dtype), m, np.linalg.norm(m), 8)
            q = q.astype(wide)
            assert abs(q.conj().T @ q - np.eye(q.shape[1])).max() < 30 * np.finfo(dtype).eps, ("qr", dtype, rows)
            assert not np.tril(r, -1).any()
print(jax.default_backend(), "agree")
"""


# With PyTorch imported before, MKL's are taken. Lengths of one, of each radix, of larger primes, of convolutions, of a
# matrix; few lines and many.
TRANSFORMS = """
import os, sys
library = os.environ["FLAGOS_CPU_PRODUCTS"]
if library == "mkl":
    import torch
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
rng = np.random.default_rng(int(sys.argv[1]))
n = int(rng.integers(2, 3000))
for dtype in (np.float32, np.float64):
    few, many = ((1,), (1, 49), (3, 143), (2, 122), (1, 1009), (2, 8192), (3, n)), ((17, 30), (40, 67), (5, 6, 7))
    for shape in (*few, *many):
        x = rng.standard_normal(shape).astype(dtype)
        z = (x + 1j * rng.standard_normal(shape)).astype(np.result_type(dtype, np.complex64))
        axes, sizes = tuple(range(-max(1, len(shape) - 1), 0)), shape[-max(1, len(shape) - 1):]
        half = z[..., : shape[-1] // 2 + 1]
        for name, given in (("fftn", z), ("ifftn", z), ("rfftn", x), ("irfftn", half)):
            actual = np.asarray(jax.jit(lambda a: getattr(jnp.fft, name)(a, s=sizes, axes=axes))(given))
            wide = given.astype(np.complex128 if given.dtype.kind == "c" else np.float64)
            expected = getattr(np.fft, name)(wide, s=sizes, axes=axes)
            bound = np.finfo(dtype).eps * (4 + 2 * np.log2(np.prod(sizes))) * np.sqrt(np.mean(abs(expected) ** 2))
            assert actual.shape == expected.shape
            assert abs(actual - expected).max() <= 4 * bound, (name, dtype, shape)
assert ("torch" in sys.modules) == (library == "mkl"), "transforms import PyTorch"
print(library, "agrees")
"""


def output(program: str, library: str, seed: int, processors: set[int], instruction_sets: str = "") -> str:
    """What the program prints; an empty name leaves the choice to the processor."""
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu", "FLAGOS_CPU_PRODUCTS": library}
    if instruction_sets:
        environment["GLIBC_TUNABLES"] = f"glibc.cpu.hwcaps={instruction_sets}"
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        command = [sys.executable, "-c", program, str(seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    finally:
        os.sched_setaffinity(0, before)
    assert done.returncode == 0, done.stderr
    return done.stdout


def products(library: str, seed: int, processors: set[int], instruction_sets: str = "") -> str:
    return output(PROGRAM, library, seed, processors, instruction_sets)


def test_another_name_is_not_followed_and_says_so() -> None:
    program = (
        "import jax; import flagos_backend.jax as f; f.initialize(); x = jax.numpy.ones((8, 8)); print((x @ x)[0, 0])"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "flagos,cpu", "FLAGOS_CPU_PRODUCTS": "blis"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout == "8.0\n"
    assert done.stderr.count("FLAGOS_CPU_PRODUCTS is blis, neither mkl nor onednn nor flagos: not followed") == 1


@pytest.mark.parametrize("library", ["", "mkl", "onednn", "flagos"])
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


@pytest.mark.parametrize("instruction_sets", ["-AVX512F", "-AVX512F,-AVX2"])
def test_our_kernels_of_each_instruction_set(instruction_sets: str, rng: np.random.Generator) -> None:
    seed, processors = int(rng.integers(2**31)), os.sched_getaffinity(0)
    assert products("flagos", seed, processors, instruction_sets).startswith("flagos ")


def test_our_kernels_sum_alike_on_any_number_of_threads(rng: np.random.Generator) -> None:
    """They are cut by the number of threads, but each element is summed in one order."""
    processors = os.sched_getaffinity(0)
    if len(processors) == 1:
        pytest.skip("only one processor may be used")
    seed = int(rng.integers(2**31))
    assert products("flagos", seed, {min(processors)}) == products("flagos", seed, processors)


@pytest.mark.parametrize("library", ["mkl", "flagos"])
def test_factorizations_by_products_of_each(library: str, rng: np.random.Generator) -> None:
    assert output(FACTORIZATIONS, library, int(rng.integers(2**31)), os.sched_getaffinity(0)).startswith("flagos ")


@pytest.mark.parametrize(
    ("library", "instruction_sets"), [("mkl", ""), ("flagos", ""), ("flagos", "-AVX512F"), ("flagos", "-AVX512F,-AVX2")]
)
def test_transforms_of_each_instruction_set(library: str, instruction_sets: str, rng: np.random.Generator) -> None:
    seed, processors = int(rng.integers(2**31)), os.sched_getaffinity(0)
    assert output(TRANSFORMS, library, seed, processors, instruction_sets) == f"{library} agrees\n"
