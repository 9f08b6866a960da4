"""Sort and top-k against stock XLA and NumPy: JAX's comparators, any other comparator, stability, NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.sort_keys import OperandKey, operand_key, sort_keys
from flagos_backend.ir.types import ElementType
from programs import hlo_bytes
from support.against_xla import check, check_function, check_hlo, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE, random_values

E = ElementType
TYPES = (E.PRED, E.S8, E.U8, E.S16, E.U16, E.S32, E.U32, E.S64, E.U64, E.F16, E.BF16, E.F32, E.F64, E.C64, E.C128)


def few_values(element_type: ElementType, dims: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Many ties; NaN, infinities and zeros of both signs among the floats."""
    dtype = NUMPY_DTYPE[element_type]
    if element_type.is_complex:
        values = np.empty(dims, dtype)
        values.real, values.imag = (few_values(element_type.real, dims, rng) for _ in range(2))
        return values
    if element_type.is_float:
        choices = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 2.5], np.float64).astype(dtype)
    else:
        choices = np.concatenate([random_values(element_type, 5, rng), np.array([0, 1], dtype)])
    return choices[rng.integers(0, len(choices), dims)]


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_jax_sort_carries_a_second_array_stably(element_type: ElementType, rng: np.random.Generator) -> None:
    keys = few_values(element_type, (3, 37), rng)
    values = np.arange(keys.size, dtype=np.int32).reshape(keys.shape)
    with jax.enable_x64(True):
        hlo = hlo_bytes(lambda k, v: lax.sort((k, v), dimension=1, num_keys=1), keys, values)
    check_hlo(hlo, (keys, values), None)


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_jax_sort_by_several_keys_along_any_dimension(dimension: int, rng: np.random.Generator) -> None:
    keys = [few_values(t, (4, 9, 5), rng) for t in (E.F32, E.S8, E.C64)]
    check_function(
        lambda a, b, c, v: lax.sort((a, b, c, v), dimension=dimension, num_keys=3),
        *keys,
        np.arange(180, dtype=np.int32).reshape(4, 9, 5),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.argsort(x, descending=True, stable=True),
        lambda x: jnp.sort(x, axis=0, descending=True),
        lambda x: lax.approx_max_k(x, 3),
        lambda x: jnp.median(x, axis=1),
        lambda x: jax.vmap(lambda row: jnp.unique(row, size=5))(x),
        lambda x: jax.vmap(lambda row: jnp.searchsorted(jnp.sort(row), row, method="sort"))(x),
    ],
)
def test_orderings_as_jax_programs_write_them(function: Callable[..., Any], rng: np.random.Generator) -> None:
    check_function(function, rng.permutation(60).astype(np.float32).reshape(4, 15), tolerance=1e-6)


def sort_text(comparator: str, count: int = 1, size: int = 23, element_type: str = "s32") -> str:
    names = "xyz"[:count]
    shape = f"{element_type}[2,{size}]"
    result = shape if count == 1 else f"({', '.join([shape] * count)})"
    parameters = "\n".join(f"  {n} = {shape} parameter({i})" for i, n in enumerate(names))
    scalars = "\n".join(f"  {n} = {element_type}[] parameter({i})" for i, n in enumerate("abcdef"[: 2 * count]))
    return f"""
less {{
{scalars}
{comparator}
}}
ENTRY e {{
{parameters}
  ROOT r = {result} sort({", ".join(names)}), dimensions={{1}}, is_stable=true, to_apply=less
}}"""


KEYED = {
    "less": "ROOT r = pred[] compare(a, b), direction=LT",
    "greater": "ROOT r = pred[] compare(a, b), direction=GT",
    "less, sides exchanged": "ROOT r = pred[] compare(b, a), direction=GT",
    "by absolute value": "p = s32[] abs(a)\n q = s32[] abs(b)\n ROOT r = pred[] compare(p, q), direction=LT",
    "by a select": """
      m = s32[] constant(7)
      p = s32[] remainder(a, m)
      q = s32[] remainder(b, m)
      equal = pred[] compare(p, q), direction=EQ
      first = pred[] compare(p, q), direction=GT
      second = pred[] compare(a, b), direction=LT
      ROOT r = pred[] select(equal, second, first)""",
    "by a select on inequality": """
      m = s32[] constant(7)
      p = s32[] remainder(a, m)
      q = s32[] remainder(b, m)
      differ = pred[] compare(q, p), direction=NE
      first = pred[] compare(p, q), direction=LT
      second = pred[] compare(b, a), direction=LT
      ROOT r = pred[] select(differ, first, second)""",
}
OTHER = {
    # An order, but not one by keys that can be read off: all the even ones first.
    "even before odd": """
      one = s32[] constant(1)
      zero = s32[] constant(0)
      p = s32[] and(a, one)
      q = s32[] and(b, one)
      even = pred[] compare(p, zero), direction=EQ
      odd = pred[] compare(q, zero), direction=NE
      ROOT r = pred[] and(even, odd)""",
    "by the difference": """
      zero = s32[] constant(0)
      d = s32[] subtract(a, b)
      ROOT r = pred[] compare(d, zero), direction=LT""",
}


@pytest.mark.parametrize("comparator", KEYED.values(), ids=KEYED)
def test_comparators_read_as_keys(comparator: str, rng: np.random.Generator) -> None:
    text = sort_text(comparator)
    assert sort_keys(import_module(hlo_of_text(text)).entry.root.called[0]) is not None
    check(text, rng.integers(-20, 20, (2, 23)).astype(np.int32))


def merging(outer: str, inner: str, order: str = ", type=TOTALORDER") -> str:
    """A comparison of a and b behind two selects each."""
    sides = [
        f"""
      n{x} = pred[] compare({x}, {x}), direction=NE
      z{x} = pred[] compare({x}, zero), direction=EQ
      i{x} = f32[] select({inner.format(x=x)}, {x})
      o{x} = f32[] select({outer.format(x=x)}, i{x})"""
        for x in "ab"
    ]
    numbers = {"zero": "0", "below": "-0", "one": "1", "quiet": "nan"}
    constants = "\n".join(f"{name} = f32[] constant({number})" for name, number in numbers.items())
    return f"{constants}{''.join(sides)}\n ROOT r = pred[] compare(oa, ob), direction=LT{order}"


@pytest.mark.parametrize(
    ("comparator", "wanted"),
    [
        ("ROOT r = pred[] compare(a, b), direction=LT, type=TOTALORDER", OperandKey(0, merged=False)),
        ("ROOT r = pred[] compare(a, b), direction=GT", OperandKey(0, merged=True)),
        (merging("n{x}, quiet", "z{x}, zero"), OperandKey(0, merged=True)),
        (merging("z{x}, zero", "n{x}, quiet"), OperandKey(0, merged=True)),
        (merging("n{x}, quiet", "z{x}, zero", ""), OperandKey(0, merged=True)),
        (merging("n{x}, quiet", "n{x}, quiet"), None),
        (merging("n{x}, quiet", "z{x}, below"), None),
        (merging("n{x}, one", "z{x}, zero"), None),
        (merging("z{x}, quiet", "z{x}, zero"), None),
        ("p = f32[] abs(a)\n q = f32[] abs(b)\n ROOT r = pred[] compare(p, q), direction=LT", None),
    ],
)
def test_keys_that_are_an_operand(comparator: str, wanted: OperandKey | None) -> None:
    text = sort_text(comparator, element_type="f32")
    keys = sort_keys(import_module(hlo_of_text(text)).entry.root.called[0])
    assert keys is not None
    assert operand_key(keys[0]) == wanted


def test_keys_of_jax_are_an_operand() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        module = import_module(hlo_bytes(lambda v, k: lax.sort((k, v), num_keys=1), *[jnp.ones((2, 9), dtype)] * 2))
        (sort,) = (i for c in module.computations() for i in c.instructions if i.opcode is Opcode.SORT)
        keys = sort_keys(sort.called[0])
        assert keys is not None
        assert operand_key(keys[0]) == OperandKey(0, merged=True)


@pytest.mark.parametrize("comparator", OTHER.values(), ids=OTHER)
@pytest.mark.parametrize("size", [2, 3, 8, 23, 33])
def test_any_other_comparator(comparator: str, size: int, rng: np.random.Generator) -> None:
    text = sort_text(comparator, size=size)
    assert sort_keys(import_module(hlo_of_text(text)).entry.root.called[0]) is None
    check(text, rng.integers(-20, 20, (2, size)).astype(np.int32))


def test_a_general_comparator_over_two_arrays_is_stable(rng: np.random.Generator) -> None:
    text = sort_text(
        """
      p = s32[] subtract(a, b)
      zero = s32[] constant(0)
      ROOT r = pred[] compare(p, zero), direction=LT""",
        count=2,
    )
    keys = rng.integers(0, 4, (2, 23)).astype(np.int32)
    check(text, keys, np.arange(46, dtype=np.int32).reshape(2, 23))


def test_an_inconsistent_comparator_still_gives_a_permutation(rng: np.random.Generator) -> None:
    text = sort_text("p = s32[] subtract(a, b)\n z = s32[] constant(3)\n ROOT r = pred[] compare(p, z), direction=NE")
    values = rng.integers(-5, 5, (2, 23)).astype(np.int32)
    (result,) = run_on_backend(hlo_of_text(text), [values])
    np.testing.assert_array_equal(np.sort(result), np.sort(values))


@pytest.mark.parametrize("order", ["", ", type=TOTALORDER"])
def test_total_order_tells_zeros_and_nan_signs_apart(order: str) -> None:
    values = np.array([[0.0, -0.0, np.nan, -np.nan, 1, -1, np.inf, -np.inf, 0.0, -0.0]] * 2, np.float32)
    values[:, 3] = -np.abs(values[:, 3])
    if not order:
        values = np.nan_to_num(values)
    text = sort_text(f"ROOT r = pred[] compare(a, b), direction=LT{order}", size=10, element_type="f32")
    (ours,) = check(text, values)
    if order:
        np.testing.assert_array_equal(np.signbit(ours[0]), [1, 1, 1, 1, 1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "element_type", [t for t in TYPES if not t.is_complex and t is not E.PRED], ids=lambda t: t.name
)
@pytest.mark.parametrize("k", [0, 1, 5, 31])
def test_top_k_breaks_ties_by_index(element_type: ElementType, k: int, rng: np.random.Generator) -> None:
    values = few_values(element_type, (3, 31), rng)
    with jax.enable_x64(True):
        hlo = hlo_bytes(lambda x: lax.top_k(x, k), values)
    check_hlo(hlo, (values,), None)


@pytest.mark.parametrize("dims", [(0, 4), (3, 0), (3, 1)])
def test_nothing_to_sort(dims: tuple[int, int]) -> None:
    check_function(lambda x: lax.sort((x, x), dimension=1), np.ones(dims, np.float32))
