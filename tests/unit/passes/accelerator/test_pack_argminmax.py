"""What argmin and argmax become: one integer for value and position, as narrow as holds both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.accelerator.pack_argminmax import pack_argminmax
from programs import hlo_bytes
from support.passes import SIMULATED, run_alone, simplified

E = ElementType


def packed(dtype: object, *shape: int) -> Module:
    module = simplified(import_module(hlo_bytes(lambda x: jnp.argmax(x, -1), jax.ShapeDtypeStruct(shape, dtype))))
    return run_alone("pack_argminmax", module, SIMULATED).module


def reductions(module: Module) -> list[Instruction]:
    return [i for i in module.entry.instructions if i.opcode is Opcode.REDUCE]


@pytest.mark.parametrize(
    ("dtype", "size", "key"),
    [
        (jnp.bfloat16, 1 << 16, E.S32),
        (jnp.bfloat16, (1 << 16) + 1, E.S64),
        (np.float16, 1000, E.S32),
        (np.uint8, 1 << 24, E.S32),
        (np.uint8, (1 << 24) + 1, E.S64),
        (np.bool_, 1000, E.S32),
        (np.int16, 100000, E.S64),
        (np.float32, 2, E.S64),
        (np.uint32, 2, E.S64),
    ],
)
def test_one_reduction_of_a_key_that_holds_both(dtype: object, size: int, key: ElementType) -> None:
    (reduction,) = reductions(packed(dtype, 3, size))
    assert reduction.shape == ArrayShape(key, (3,))
    assert reduction.called[0].root.opcode is Opcode.MINIMUM


def test_a_wide_value_is_found_before_its_position() -> None:
    with jax.enable_x64(True):
        module = packed(np.float64, 3, 100)
    assert [reduction.called[0].root.opcode for reduction in reductions(module)] == [Opcode.MAXIMUM, Opcode.MINIMUM]


def test_once_is_enough() -> None:
    module = packed(np.float32, 3, 100)
    assert pack_argminmax(module) is module


def test_in_the_body_of_a_loop() -> None:
    def path(start: jax.Array, moves: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(scores: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            sums = scores[:, None] + moves
            return sums.max(0), jnp.argmax(sums, 0)

        return jax.lax.scan(step, start, None, 7)

    shapes = (jax.ShapeDtypeStruct(dims, np.float32) for dims in ((5,), (5, 5)))
    module = pack_argminmax(simplified(import_module(hlo_bytes(path, *shapes))))
    verify(module)
    reduces = [i for c in module.computations() for i in c.instructions if i.opcode is Opcode.REDUCE]
    assert reduces and all(len(reduce.operands) == 2 for reduce in reduces)
