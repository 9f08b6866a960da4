"""Piecewise polynomials of two pieces: both computed, and one chosen, of arguments that need not be rounded
correctly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erfinv

from flagos_backend.codegen.triton import schedule
from flagos_backend.codegen.triton.loop_transforms.piecewise_polynomials import chosen_last, with_near_arguments
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Apply, Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.regions import evaluate
from support.triton_programs import H100, NO_DEVICE_LIBRARY, f32
from support.triton_sources import sources

Function = Callable[..., Any]
Pass = Callable[[Region], Region]


def evaluated(function: Function, x: np.ndarray, change: Pass) -> np.ndarray:
    """``function`` of x, its one region changed."""
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, f32(*x.shape)))).entry)
    made = schedule(flat, H100)
    (region,) = made.items
    assert isinstance(region, Region)
    (result,) = evaluate(flat, replace(made, items=(change(region),)), [x])
    return result


def operations(function: Function, change: Pass) -> list[tuple[Opcode, str]]:
    items = schedule(flatten(for_accelerator(import_module(hlo_bytes(function, f32(100)))).entry), H100).items
    found = [e for item in items if isinstance(item, Region) for e in change(item).expressions()]
    return [(e.opcode, e.detail) for e in found if isinstance(e, Apply)]


def horner(x: jax.Array, less: jax.Array, pairs: list[tuple[float, float]], first: Any = None) -> jax.Array:
    t = jnp.where(less, x - 1, x + 1)
    total = jnp.where(less, 0.5, 2.0) if first is None else first
    for a, b in pairs:
        total = total * t + jnp.where(less, np.float32(a), np.float32(b))
    return total


def read_on_the_way(x: jax.Array) -> jax.Array:
    first = horner(x, x < 0, [(1, 2), (3, 4)])
    return first * horner(x, x < 0, [(5, 6), (7, 8)], first)


def of_one_argument(x: jax.Array) -> jax.Array:
    return horner(x, x < 0, [(1, 2), (3, 4)]) / (2 + horner(x, x < 0, [(5, 6), (7, 8)]) ** 2)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: horner(x, x < 0.3, [(1.5, 2.5), (-0.5, 0.25), (3.0, -1.0)]), id="of two constants"),
        pytest.param(lambda x: horner(x, x < 0.3, [(1.5, 2.5), (-0.5, 0.25)], jnp.tanh(x)), id="of what goes before"),
        pytest.param(of_one_argument, id="two of one argument"),
        pytest.param(read_on_the_way, id="read on the way"),
        pytest.param(jax.lax.erf_inv, id="the inverse of the error function"),
    ],
)
def test_the_pieces_are_what_they_were(function: Function, rng: np.random.Generator) -> None:
    x = rng.uniform(-1, 1, 5000).astype(np.float32)
    x[:4] = 0, 1, -1, np.nan
    unchanged, changed = (evaluated(function, x, change) for change in (lambda region: region, chosen_last))
    np.testing.assert_array_equal(changed, unchanged)
    selects = [operations(function, change).count((Opcode.SELECT, "")) for change in (lambda r: r, chosen_last)]
    assert selects[1] < selects[0]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: horner(x, x < 0.3, [(1.5, 2.5)]), id="one multiply-add"),
        pytest.param(
            lambda x: (jnp.where(x < 0, 1.0, 2.0) * x + jnp.where(x < 0, 3.0, 4.0)) * x + jnp.where(x < 0, 5.0, 6.0),
            id="an argument that is not chosen",
        ),
        pytest.param(
            lambda x: horner(horner(x, x < 0, []) * jnp.where(x < 1, x, 1 / x), x < 1, [(1, 2)]), id="two conditions"
        ),
    ],
)
def test_what_stays_as_it_is(function: Function) -> None:
    assert operations(function, chosen_last) == operations(function, lambda region: region)


def test_near_arguments(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-1, 1, 200_000), 1 - 10 ** rng.uniform(-7.2, -1, 50_000)]).astype(np.float32)
    x = np.concatenate([x, 10 ** rng.uniform(-30, 0, 50_000).astype(np.float32)])
    ours = evaluated(jax.lax.erf_inv, x, lambda region: chosen_last(with_near_arguments(region)))
    exact = erfinv(x.astype(np.float64))
    inside = np.abs(x) < 1
    apart = np.abs(ours - exact)[inside] / np.spacing(np.abs(exact[inside]).astype(np.float32))
    assert apart.max() < 5
    np.testing.assert_array_equal(ours[~inside], exact[~inside])


def test_special_numbers() -> None:
    x = np.array([1, -1, 0, -0.0, 1.5, -2, np.inf, -np.inf, np.nan, 1e-45, 3e38], np.float32)
    near, before = (evaluated(jax.lax.erf_inv, x, p) for p in (with_near_arguments, lambda region: region))
    np.testing.assert_allclose(near, before, rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(near[:4]), np.signbit(x[:4]))


def test_where_they_are_taken() -> None:
    normal = lambda key: jax.random.normal(jax.random.wrap_key_data(key), (5000,))  # noqa: E731
    shapes = [jax.ShapeDtypeStruct((2,), np.uint32)]
    source = sources(normal, shapes)
    assert "nv.log2_of_rest(" in source and "nv.sqrt_near(" in source and "log1p" not in source
    assert source.count("tl.where") == 2
    assert "near" not in sources(normal, shapes, NO_DEVICE_LIBRARY)


def in_pieces(
    x: jax.Array,
    *,
    bound: float = 5,
    less: float = 2.5,
    root_less: float = 3,
    square: Function = lambda x: x * -x,
    degree: int = 2,
) -> jax.Array:
    """A polynomial of a logarithm less a number, or its root less another; of no degree the argument itself."""
    w = -jnp.log1p(square(x))
    t = jnp.where(w < bound, w - less, jnp.sqrt(w) - root_less)
    total = jnp.where(w < bound, 0.5, 2.0)
    for n in range(degree):
        total = total * t + jnp.where(w < bound, np.float32(n + 1.5), np.float32(n - 1.5))
    return total if degree else t


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: in_pieces(x, bound=0.5), id="roots of small numbers"),
        pytest.param(lambda x: in_pieces(x, less=0.5), id="less little"),
        pytest.param(lambda x: in_pieces(x, root_less=0.01), id="a root less little"),
        pytest.param(lambda x: in_pieces(x, square=lambda x: x * x), id="of a sum"),
        pytest.param(lambda x: in_pieces(x, square=lambda x: x * (1 - x)), id="of a product"),
        pytest.param(lambda x: in_pieces(x) + jnp.sqrt(-jnp.log1p(x * -x)), id="its root is read"),
        pytest.param(lambda x: in_pieces(x) - jnp.log1p(x * -x), id="the log is read"),
        pytest.param(lambda x: in_pieces(x, degree=0), id="no polynomial"),
        pytest.param(lambda x: in_pieces(x) / (2 + in_pieces(x, degree=0) ** 2), id="the argument is read"),
    ],
)
def test_what_needs_exact_arguments(function: Function) -> None:
    assert (Opcode.LOG, Intrinsic.NEAR) in operations(in_pieces, with_near_arguments)
    assert operations(function, with_near_arguments) == operations(function, lambda region: region)
