"""16-bit floats: each result is rounded as the program says, or keeps float32's digits within a kernel if that is
allowed, and random numbers are those of JAX's CPU where it computes one operation at a time."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from support import sixteen_bits as sixteen


@pytest.mark.parametrize("kind", sixteen.DTYPES)
@pytest.mark.parametrize("excess", [False, True], ids=["rounded", "excess"])
def test_random_programs(rng: np.random.Generator, device: jax.Device, kind: str, excess: bool) -> None:
    for _ in range(12):
        program = sixteen.random_program(rng, kind, reductions=not excess)
        sixteen.check(program, sixteen.random_arguments(rng, program), device, excess=excess)


def test_draws(device: jax.Device, cpu: jax.Device) -> None:
    sixteen.check_draws("threefry2x32", list(sixteen.DRAWS), list(sixteen.DTYPES), device, cpu)


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_normal_draws_of_other_generators(generator: str, device: jax.Device, cpu: jax.Device) -> None:
    kinds = [*sixteen.DTYPES, "float8_e4m3fn", "float8_e5m2"]
    sixteen.check_draws(generator, ["uniform", "normal"], kinds, device, cpu)
