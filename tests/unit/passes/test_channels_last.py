"""Programs whose convolutions were made channels-last compute what stock XLA does, and lay nothing out between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import ConvolutionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.accelerator.canonicalize_convolutions import canonicalize_convolutions
from flagos_backend.passes.channels_last import channels_last
from flagos_backend.passes.dce import eliminate_dead_code
from programs import hlo_bytes
from support.convolution_gradients import compare, gradients
from support.passes import simplified


def moved(function: Callable[..., Any], *arguments: np.ndarray) -> list[Instruction]:
    """The instructions of the program for an accelerator, which computes the same as stock XLA."""
    hlo = hlo_bytes(function, *arguments)
    module = channels_last(simplified(import_module(hlo)))
    verify(module)
    compare(hlo, module, *arguments)
    assert channels_last(module) is module
    compare(hlo, canonicalize_convolutions(module), *arguments)
    return [i for c in eliminate_dead_code(module).computations() for i in c.instructions]


def between(instructions: list[Instruction]) -> int:
    """Transpositions of values that are no parameters and not the result."""
    made = [i for i in instructions if i.opcode is Opcode.TRANSPOSE and i.operands[0].opcode is not Opcode.PARAMETER]
    return sum(any(i in other.operands for other in instructions if other.opcode is not Opcode.TUPLE) for i in made)


def convolve(x: jax.Array, w: jax.Array, rank: int = 2, **options: Any) -> jax.Array:
    letters = "HWD"[:rank]
    spec = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    return lax.conv_general_dilated(
        x, w, options.pop("strides", (1,) * rank), options.pop("padding", "SAME"), dimension_numbers=spec, **options
    )


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-3) * scale[None, :, None, None]


def network(x: jax.Array, w: jax.Array, v: jax.Array, scale: jax.Array) -> jax.Array:
    y = jax.nn.relu(norm(convolve(x, w), scale))
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")
    z = jax.nn.relu(convolve(y, v) + y)
    z = jnp.concatenate((z, y[:, :2]), 1)
    return jnp.pad(z, ((0, 0), (1, 0), (0, 1), (0, 0))).mean((2, 3))


def arguments(rng: np.random.Generator) -> list[np.ndarray]:
    shapes = ((2, 3, 8, 6), (5, 3, 3, 3), (5, 5, 3, 3), (5,))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_what_is_between_follows(rng: np.random.Generator) -> None:
    instructions = moved(network, *arguments(rng))
    convolutions = [i for i in instructions if i.opcode is Opcode.CONVOLUTION]
    assert len(convolutions) == 2
    for instruction in convolutions:
        a = instruction.attributes_as(ConvolutionAttributes)
        assert a.input_feature == a.output_feature == 3
    assert between(instructions) == 0


def test_gradients_of_a_network(rng: np.random.Generator) -> None:
    def loss(*arguments: jax.Array) -> jax.Array:
        return (network(*arguments) ** 2).sum()

    instructions = moved(jax.grad(loss, (0, 1, 2, 3)), *arguments(rng))
    for instruction in instructions:
        if instruction.opcode is Opcode.CONVOLUTION:
            assert instruction.attributes_as(ConvolutionAttributes).input_spatial == (1, 2)


@pytest.mark.parametrize(
    ("rank", "options"),
    [
        (2, {}),
        (2, {"strides": (2, 1), "padding": ((1, 0), (0, 2))}),
        (2, {"rhs_dilation": (2, 1)}),
        (2, {"lhs_dilation": (1, 2), "padding": ((1, 1), (0, 1))}),
        (2, {"feature_group_count": 2}),
        (3, {"strides": (1, 2, 1)}),
        (1, {}),
    ],
)
def test_convolutions_and_their_gradients(rank: int, options: dict[str, Any], rng: np.random.Generator) -> None:
    groups = options.get("feature_group_count", 1)
    x = rng.standard_normal((2, 4, 6, 5, 4)[: rank + 2]).astype(np.float32)
    w = rng.standard_normal((6, 4 // groups, 3, 3, 2)[: rank + 2]).astype(np.float32)

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return convolve(x, w, rank, **options)

    moved(function, x, w)
    moved(gradients(function), x, w)


def test_sides_that_are_no_images(rng: np.random.Generator) -> None:
    """A sum of a convolution and of an array in the program's order, and a result that leaves it."""

    def function(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        y = convolve(x, w) + x
        return y, jnp.where(y > 0, y, x.sum()), y.reshape(2, -1), y.sum(2), y.sum(1)

    x, w = rng.standard_normal((2, 4, 6, 5)), rng.standard_normal((4, 4, 3, 3))
    moved(function, x.astype(np.float32), w.astype(np.float32))


@pytest.mark.parametrize("window", [(1, 2, 1, 2), (1, 2, 2, 2), (1, 1, 2, 2), (1, 3, 1, 1)])
def test_the_first_of_equal_elements_is_chosen(window: tuple[int, ...], rng: np.random.Generator) -> None:
    """In the order of the program: behind a relu, most elements of a window are equal."""

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.nn.relu(convolve(x, w))
        pooled = lambda y: lax.reduce_window(y, -jnp.inf, lax.max, window, window, "VALID").sum()  # noqa: E731
        return jax.grad(pooled)(y)

    x = rng.integers(-2, 2, (2, 6, 6, 4)).astype(np.float32)
    instructions = moved(function, x, np.eye(6, dtype=np.float32).reshape(6, 6, 1, 1))
    assert any(i.opcode is Opcode.SELECT_AND_SCATTER for i in instructions)


def test_programs_without_convolutions_stay(rng: np.random.Generator) -> None:
    hlo = hlo_bytes(lambda x: x.transpose(0, 3, 1, 2) * 2 + 1, rng.standard_normal((2, 3, 4, 5)).astype(np.float32))
    module = simplified(import_module(hlo))
    assert channels_last(module) is module
