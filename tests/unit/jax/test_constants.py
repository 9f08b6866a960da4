"""Large constants go around jaxlib's converter, and are then what it would have made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flagos_backend.frontends.jax import constants, jax_internals
from flagos_backend.frontends.jax.convert import convert
from flagos_backend.importer import schema
from unit.jax.artifacts import artifact, compile_options

Lower = Callable[..., Any]
DIMS = (33, 1024)
TAKEN = ("int8", "uint8", "int16", "uint16", "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
LEFT = ("bool", "int4", "int32", "uint32", "complex64")


def array(dtype: str) -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng().integers(0, 2 if dtype == "bool" else 8, DIMS)
    return numbers.astype(jnp.dtype(dtype))


def literals(module: bytes) -> list[bytes]:
    """Of the large constants of a serialized HloModuleProto, in order."""
    found = schema.HloModuleProto.FromString(module)
    instructions = [i for computation in found.computations for i in computation.instructions]
    return [i.literal.SerializeToString() for i in instructions if i.opcode == "constant" and i.shape.dimensions]


@pytest.mark.parametrize("dtype", [*TAKEN, *LEFT])
def test_literal_is_the_one_that_jaxlib_makes(lower: Lower, dtype: str) -> None:
    value = array(dtype)
    code = artifact(lower(lambda x: (x, jnp.asarray(value)), value))
    without = constants.take_out(code)
    assert len(without.constants) == (dtype in TAKEN)
    found = constants.put_back(jax_internals.stablehlo_to_hlo(without.code), without.constants)
    jax_internals.check_hlo(found)
    assert literals(found) == literals(jax_internals.stablehlo_to_hlo(code))
    assert len(literals(found)) == 1


def test_bits_are_kept(lower: Lower) -> None:
    """NaN of any payload, signed zeros, denormals and infinities."""
    bits = np.random.default_rng().integers(0, 1 << 16, DIMS).astype(np.uint16)
    half = bits.view(ml_dtypes.bfloat16)
    wide = (bits.astype(np.uint32) << 16 | bits).view(np.float32)
    without = constants.take_out(artifact(lower(lambda x: (x, jnp.asarray(half), jnp.asarray(wide)), half)))
    assert [bytes(each.data) for each in without.constants] == [half.tobytes(), wide.tobytes()]


def test_one_element_for_all_stays(lower: Lower) -> None:
    value = np.full(DIMS, 3, np.int8)
    code = artifact(lower(lambda x: (x, jnp.asarray(value), jnp.asarray(array("bool"))), value))
    assert constants.take_out(code) == constants.Without(code, ())


def test_small_programs_are_not_parsed(lower: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_internals, "parse_stablehlo", lambda code: pytest.fail("it is small"))
    code = artifact(lower(jnp.sin, np.float32(1)))
    assert constants.take_out(code).code == code


def test_constants_of_branches_loops_and_functions(lower: Lower) -> None:
    first, second = array("float32"), array("float32")

    def function(x: Any) -> Any:
        def one(x: Any) -> Any:
            return x * jnp.asarray(first)

        x = jax.lax.cond(x[0, 0] > 0, one, lambda x: x - jnp.asarray(second), x)
        x = jax.lax.fori_loop(0, 3, lambda _, x: x + jnp.asarray(second), x)
        return jax.jit(one)(x), jnp.asarray(first)

    code = artifact(lower(function, first))
    envelope = schema.Program.FromString(convert("mlir", code, compile_options(ids=[[0]])))
    found = literals(envelope.module.SerializeToString())
    assert set(found) == set(literals(jax_internals.stablehlo_to_hlo(code)))
    assert len(set(found)) == 2
    assert not [
        i for c in envelope.module.computations for i in c.instructions if i.custom_call_target == constants.TARGET
    ]
