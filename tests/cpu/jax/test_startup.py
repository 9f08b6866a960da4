"""What a program imports: no more than it needs. Each test is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def _said(program: str) -> Any:
    """The JSON that ``program`` prints last."""
    environment = os.environ | {"JAX_PLATFORMS": "flagos"}
    del environment["OMP_WAIT_POLICY"]  # as users do: then flagos chooses, where it is the first to import PyTorch
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


_RESULT = "import json, sys; print(json.dumps(['torch' in sys.modules, np.asarray(y).tolist()]))"


@pytest.mark.skipif(os.environ.get("FLAGOS_DEVICE") != "cpu", reason="accelerators are driven through torch")
def test_a_native_program_does_without_torch() -> None:
    """One process for all: torch is in it from the first program on that brings it."""
    results = {
        "jax.jit(lambda x: x + 1)(jnp.ones(3))": [2.0, 2.0, 2.0],
        "jax.lax.fori_loop(0, 5, lambda i, x: x * 2 + i, jnp.zeros(2))": [26.0, 26.0],
        "jax.grad(lambda x: (x**3).sum())(jnp.arange(3.0))": [0.0, 3.0, 12.0],
        "jnp.arange(4.0).reshape(2, 2) @ jnp.eye(2)": [[0.0, 1.0], [2.0, 3.0]],
        "jax.lax.fori_loop(0, 2, lambda i, x: x @ x, 2 * jnp.eye(2))": [[16.0, 0.0], [0.0, 16.0]],
        "jnp.linalg.cholesky(4 * jnp.eye(2))": [[2.0, 0.0], [0.0, 2.0]],
        "jnp.linalg.qr(-3 * jnp.eye(2), mode='r')": [[-3.0, 0.0], [0.0, -3.0]],
        "jnp.linalg.svd(2 * jnp.eye(2), compute_uv=False)": [2.0, 2.0],
        "jnp.linalg.eigvalsh(3 * jnp.eye(2))": [3.0, 3.0],
        "jnp.fft.fft(jnp.ones(2)).real": [2.0, 0.0],
        "jnp.fft.irfft(jnp.fft.rfft(jnp.ones(4)) * (jnp.arange(3) < 2))": [1.0, 1.0, 1.0, 1.0],
    }
    said = ", ".join(f"np.asarray({expression}).tolist(), 'torch' in sys.modules" for expression in results)
    program = f"import json, sys, jax, jax.numpy as jnp, numpy as np; print(json.dumps([{said}]))"
    assert _said(program) == [one for result in results.values() for one in (result, False)]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("jnp.sort(jnp.array([2 + 1j, 1])).real", [1.0, 2.0]),
        ("jax.lax.linalg.eigh(3 * jnp.eye(2), subset_by_index=(0, 1))[1]", [3.0]),
    ],
)
def test_what_needs_torch_brings_it(expression: str, result: list[list[float]]) -> None:
    """Library calls; a program without them came before."""
    program = f"import jax, jax.numpy as jnp, numpy as np; jnp.ones(2) + 1; y = {expression}; {_RESULT}"
    assert _said(program) == [True, result]


def test_importing_jax_imports_nothing_of_flagos() -> None:
    program = (
        "import json, sys, jax, jax.numpy; "
        "print(json.dumps([n for n in sys.modules if n.split('.')[0] in ('flagos_backend', 'plugin_abi')]))"
    )
    assert _said(program) == []


def test_rules_wait_for_the_modules_that_they_are_for() -> None:
    program = """
import json, sys, warnings
import jax, jax.numpy as jnp
jnp.ones(2) + 1
before = "jax.experimental.sparse" in sys.modules
from jax.experimental.sparse.linalg import spsolve
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    x = spsolve(jnp.array([2.0, 4.0]), jnp.array([0, 1]), jnp.array([0, 1, 2]), jnp.array([2.0, 4.0]))
print(json.dumps([before, x.tolist(), str(next(iter(x.devices())).platform)]))
"""
    assert _said(program) == [False, [1.0, 1.0], "flagos"]


def test_a_module_that_torch_was_in_before_has_it() -> None:
    program = """
import json
from flagos_backend.process import torch_loading
from flagos_backend.kernels.reference import registry, storage
placeholder = torch_loading.torch
assert storage.torch is placeholder
tensor = storage.torch.ones(2)
import torch
print(json.dumps([storage.torch is torch, isinstance(tensor, placeholder.Tensor), isinstance(1, placeholder.Tensor)]))
"""
    assert _said(program) == [True, True, False]
