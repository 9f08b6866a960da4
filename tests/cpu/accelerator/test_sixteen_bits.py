"""As tests/cpu/jax/test_sixteen_bits.py, on the path of an accelerator."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import flagos_backend.frontends.jax
from support import sixteen_bits as sixteen

flagos_backend.frontends.jax.initialize()


@pytest.mark.parametrize("kind", sixteen.DTYPES)
@pytest.mark.parametrize("excess", [False, True], ids=["rounded", "excess"])
def test_random_programs(rng: np.random.Generator, kind: str, excess: bool) -> None:
    for _ in range(6):
        program = sixteen.random_program(rng, kind, reductions=not excess)
        arguments = sixteen.random_arguments(rng, program)
        sixteen.check(program, arguments, jax.devices("flagos")[0], excess=excess)


def test_draws() -> None:
    names = ["uniform", "uniform of a range", "normal", "truncated normal", "exponential"]
    device, cpu = (jax.devices(platform)[0] for platform in ("flagos", "cpu"))
    sixteen.check_draws("threefry2x32", names, list(sixteen.DTYPES), device, cpu)
