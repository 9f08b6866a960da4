"""The corpus of JAX programs through the whole spine: jit on flagos against jit on JAX's own CPU."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from programs import PROGRAMS
from support.agreement import agrees, without_subnormals
from support.seeds import SEED_VARIABLE


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, device: jax.Device, cpu: jax.Device) -> None:
    program = PROGRAMS[name]
    arguments = [without_subnormals(np.asarray(a)) for a in program.arguments(int(os.environ[SEED_VARIABLE]))]
    with jax.enable_x64(program.x64):
        ours, theirs = (
            jax.tree.leaves(jax.jit(program.function)(*jax.device_put(arguments, where))) for where in (device, cpu)
        )
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.devices() == {device}
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.all(agrees(a, b, program.exact)), f"output {number}:\n{a}\n{b}"
