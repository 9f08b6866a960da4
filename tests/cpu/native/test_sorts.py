"""Sorts in native code, against NumPy: keys of every type, ties, NaN, infinities, zeros of both signs, empty arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run, run_function
from plugin_abi.host import Artifact, Context

_DTYPES = {
    "pred": np.bool_,
    **{
        f"{sign}{bits}": np.dtype(f"{kind}{bits // 8}")
        for sign, kind in (("s", "i"), ("u", "u"))
        for bits in (8, 16, 32, 64)
    },
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
_SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1.0, -1.0, -0.0, 0.0)
# Rows that are inserted, compared, and sorted by digits.
_SHAPES = [((3, 1000), 1), ((2, 40, 5), 1), ((60, 9), 1)]
_EMPTY = [((5, 1), 1), ((0, 8), 1), ((4, 0), 1)]


def _values(element: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """With many ties in some rows, and none in others."""
    dtype = np.dtype(_DTYPES[element])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
        return np.where(rng.random(shape) < 0.3, rng.integers(0, 3, shape), values).astype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    values = (rng.standard_normal(shape) * 1e3).astype(dtype)
    special = np.array(_SPECIAL).astype(dtype)
    return np.where(rng.random(shape) < 0.3, special[rng.integers(0, len(special), shape)], values)


def _total_order(x: np.ndarray) -> np.ndarray:
    """Integers of Python in the order of ``x``: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    if x.dtype.kind in "iub":
        return x.astype(object) * 1
    bits = x.view(f"i{x.dtype.itemsize}").astype(object)
    largest = (1 << (8 * x.dtype.itemsize - 1)) - 1
    return np.where(bits < 0, bits ^ largest, bits)


def _merged(x: np.ndarray) -> np.ndarray:
    """As JAX orders floats: zeros of both signs are equal, and so are all NaNs, which come last."""
    if x.dtype.kind in "iub":
        return x.astype(object) * 1
    wide = x.astype(np.float64)
    ranks = np.unique(wide[~np.isnan(wide)])
    return np.where(np.isnan(wide), len(ranks), np.searchsorted(ranks, wide)).astype(object)


def _order(keys: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Where the elements come from, by ``keys``, the most significant first."""
    order = np.argsort(keys[-1], axis=axis, kind="stable")
    for key in reversed(keys[:-1]):
        at = np.argsort(np.take_along_axis(key, order, axis), axis=axis, kind="stable")
        order = np.take_along_axis(order, at, axis)
    return order


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"V{x.dtype.itemsize}")


def _comparator(elements: Sequence[str], less: str) -> str:
    parameters = "".join(
        f"  {side}{n} = {element}[] parameter({2 * n + k})\n"
        for n, element in enumerate(elements)
        for k, side in enumerate("lr")
    )
    return f"less {{\n{parameters}{less}}}\n"


def _sort(
    context: Context, elements: Sequence[str], arrays: Sequence[np.ndarray], axis: int, less: str
) -> list[np.ndarray]:
    dims = ",".join(map(str, arrays[0].shape))
    shapes = [f"{element}[{dims}]" for element in elements]
    parameters = "".join(f"  p{n} = {shape} parameter({n})\n" for n, shape in enumerate(shapes))
    result = shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"
    operands = ", ".join(f"p{n}" for n in range(len(shapes)))
    text = f"HloModule sorts\n{_comparator(elements, less)}ENTRY main {{\n{parameters}"
    text += f"  ROOT sorted = {result} sort({operands}), dimensions={{{axis}}}, is_stable=true, to_apply=less\n}}"
    with compile(context, text) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        return [get(b) for b in run(executable, *(put(context.devices[0].default_memory, a) for a in arrays))]


@pytest.mark.parametrize(
    ("element", "shape", "axis", "direction"),
    [
        *(
            (element, *rows, ("LT", "GT")[n % 2])
            for m, element in enumerate(_DTYPES)
            for n, rows in enumerate(_SHAPES, m)
        ),
        *(("f32", *rows, "LT") for rows in _EMPTY),
    ],
)
def test_a_key_in_total_order_alone_and_with_others(
    element: str, shape: tuple[int, ...], axis: int, direction: str, context: Context, rng: np.random.Generator
) -> None:
    x = _values(element, shape, rng)
    others = [_values(other, shape, rng) for other in ("s8", "bf16", "f32", "s64")]
    total = ", type=TOTALORDER" if np.dtype(_DTYPES[element]).kind not in "iub" else ""
    less = f"  ROOT less = pred[] compare(l0, r0), direction={direction}{total}\n"
    keys = _total_order(x)
    order = _order([-keys if direction == "GT" else keys], axis)
    (alone,) = _sort(context, [element], [x], axis, less)
    np.testing.assert_array_equal(_bits(alone), _bits(np.take_along_axis(x, order, axis)))
    together = _sort(context, [element, "s8", "bf16", "f32", "s64"], [x, *others], axis, less)
    for found, array in zip(together, [x, *others], strict=True):
        np.testing.assert_array_equal(_bits(found), _bits(np.take_along_axis(array, order, axis)))


def _of_jax(function: Callable[..., object], context: Context, *arrays: np.ndarray) -> list[np.ndarray]:
    results, text = run_function(context, function, *arrays)
    assert "with 0 library calls" in text
    return results


@pytest.mark.parametrize(("shape", "axis"), _SHAPES)
@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64", "s32", "u8"])
def test_the_order_of_jax(
    element: str, shape: tuple[int, ...], axis: int, context: Context, rng: np.random.Generator
) -> None:
    import jax
    from jax import lax

    x = _values(element, shape, rng)
    numbers = np.arange(x.size, dtype=np.int32).reshape(shape)
    order = _order([_merged(x)], axis)
    with jax.enable_x64(True):
        (alone,) = _of_jax(lambda a: lax.sort(a, dimension=axis), context, x)
        found, carried = _of_jax(lambda a, n: lax.sort((a, n), dimension=axis, num_keys=1), context, x, numbers)
    expected = np.take_along_axis(x, order, axis)
    np.testing.assert_array_equal(_bits(alone), _bits(expected))
    np.testing.assert_array_equal(_bits(found), _bits(expected))
    np.testing.assert_array_equal(carried, np.take_along_axis(numbers, order, axis))


@pytest.mark.parametrize(
    "elements",
    [
        ("s8", "f32", "u16"),
        ("f32", "s32"),
        ("u8", "u8", "u8", "u8", "u8"),
        ("s64", "f64"),
        ("pred", "s64", "f16"),
        ("f64", "s8"),
    ],
)
@pytest.mark.parametrize(("shape", "axis"), [((4, 700), 1), ((90, 3), 0), ((5, 8, 30), 2), ((2, 0), 1)])
def test_several_keys(
    elements: tuple[str, ...], shape: tuple[int, ...], axis: int, context: Context, rng: np.random.Generator
) -> None:
    import jax
    from jax import lax

    arrays = [_values(element, shape, rng) for element in elements]
    # Rows of few different keys, so that the last ones count.
    first = arrays[0].reshape(-1)[: max(1, min(3, arrays[0].size))]
    if first.size:
        arrays[0] = first[rng.integers(0, len(first), shape)]
        arrays[1] = arrays[1].reshape(-1)[rng.integers(0, min(4, arrays[1].size), shape)]
    order = _order([_merged(array) for array in arrays], axis)
    numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    with jax.enable_x64(True):
        found = _of_jax(lambda *a: lax.sort(a, dimension=axis, num_keys=len(elements)), context, *arrays, numbers)
    for result, array in zip(found, [*arrays, numbers], strict=True):
        np.testing.assert_array_equal(_bits(result), _bits(np.take_along_axis(array, order, axis)))


def test_complex_numbers_are_carried(context: Context, rng: np.random.Generator) -> None:
    keys = rng.integers(0, 9, (2, 50)).astype(np.int32)
    single = (rng.standard_normal((2, 50)) + 1j * rng.standard_normal((2, 50))).astype(np.complex64)
    double = single.astype(np.complex128) * 3
    less = "  ROOT less = pred[] compare(l0, r0), direction=LT\n"
    found = _sort(context, ["s32", "c64", "c128"], [keys, single, double], 1, less)
    order = np.argsort(keys, axis=1, kind="stable")
    for result, array in zip(found, [keys, single, double], strict=True):
        np.testing.assert_array_equal(result, np.take_along_axis(array, order, 1))


def test_in_a_loop(context: Context, rng: np.random.Generator) -> None:
    import jax.numpy as jnp
    from jax import lax

    x = rng.standard_normal(50).astype(np.float32)

    def sorted_sums(a: object) -> object:
        return lax.fori_loop(0, 6, lambda i, v: jnp.sort(jnp.where(v > 0, -v, v + 2)), a)

    (found,) = _of_jax(sorted_sums, context, x)
    for _ in range(6):
        x = np.sort(np.where(x > 0, -x, x + np.float32(2)))
    np.testing.assert_array_equal(found, x)


def test_many_elements_on_many_threads(context: Context, rng: np.random.Generator) -> None:
    x = rng.integers(-(1 << 62), 1 << 62, (6, 70000))
    x[:, ::3] = 5
    less = "  ROOT less = pred[] compare(l0, r0), direction=GT\n"
    numbers = np.broadcast_to(np.arange(70000, dtype=np.int32), x.shape).copy()
    found, carried = _sort(context, ["s64", "s32"], [x, numbers], 1, less)
    order = np.argsort(-x, axis=1, kind="stable")
    np.testing.assert_array_equal(carried, order)
    np.testing.assert_array_equal(found, np.take_along_axis(x, order, 1))


def test_another_comparator_is_left_to_the_library(context: Context, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 64)).astype(np.float32)
    less = "  a = f32[] add(l0, r1)\n  b = f32[] add(r0, l1)\n  ROOT less = pred[] compare(a, b), direction=LT\n"
    text = (
        f"HloModule sorts\n{_comparator(['f32', 'f32'], less)}"
        + """ENTRY main {
  x = f32[64] parameter(0)
  y = f32[64] parameter(1)
  ROOT sorted = (f32[64], f32[64]) sort(x, y), dimensions={0}, is_stable=true, to_apply=less
}"""
    )
    with compile(context, text) as executable:
        assert "sort(#0, #1)" in executable.artifact(Artifact.EXPLANATION).decode()
        memory = context.devices[0].default_memory
        found, _ = map(get, run(executable, put(memory, x), put(memory, y)))
    np.testing.assert_array_equal(found, x[np.argsort((x - y).astype(np.float64), kind="stable")])
