"""The gradient of |x|, what a choice keeps less what it leaves, is one choice of signs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.attention.join_choices import join_choices
from programs import hlo_bytes
from support.matching import run
from support.passes import simplified


def opcodes(module):
    return [instruction.opcode for instruction in module.entry.instructions]


def added(x, g):
    return -jnp.where(x > 0, 0, g) + jnp.where(x > 0, g, 0)


def subtracted(x, g):
    return jnp.where(x > 0, g, 0) - jnp.where(x > 0, 0, g)


@pytest.mark.parametrize("function", [added, subtracted])
def test_one_choice(rng, function):
    args = [rng.standard_normal((3, 5)).astype(np.float32) for _ in range(2)]
    args[0][0, :2], args[1][1, :2] = (np.nan, 0), (np.nan, np.inf)
    module = simplified(import_module(hlo_bytes(function, *args)))
    joined = join_choices(module)
    verify(joined)
    assert opcodes(module).count(Opcode.SELECT) == 2
    (ours,), (program,) = run(joined, args), run(module, args)
    np.testing.assert_array_equal(ours, program)
    assert Opcode.ADD not in opcodes(joined) and Opcode.SUBTRACT not in opcodes(joined)


def other_values(x, g):
    return jnp.where(x > 0, g, 0) - jnp.where(x > 0, 0, x)


def other_choices(x, g):
    return jnp.where(x > 0, g, 0) - jnp.where(x > 1, 0, g)


def other_numbers(x, g):
    return jnp.where(x > 0, g, 1) - jnp.where(x > 0, 0, g)


@pytest.mark.parametrize("function", [other_values, other_choices, other_numbers])
def test_what_is_none(rng, function):
    module = simplified(import_module(hlo_bytes(function, *(np.zeros(4, np.float32) for _ in range(2)))))
    assert join_choices(module) is module
