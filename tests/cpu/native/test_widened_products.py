"""Products of integers and 16-bit floats: integers exactly as NumPy's, wrapping around; floats rounded once."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_INTEGERS = {
    "s8": np.int8,
    "u8": np.uint8,
    "s16": np.int16,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
}
_FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}


def _run(
    context: Context, types: tuple[str, str, str], a: np.ndarray, b: np.ndarray, attributes: str, result: str
) -> tuple[np.ndarray, str]:
    shapes = [f"{t}[{','.join(map(str, x.shape))}]" for t, x in zip(types, (a, b), strict=False)]
    text = f"""ENTRY main {{
  a = {shapes[0]} parameter(0)
  b = {shapes[1]} parameter(1)
  ROOT c = {types[2]}[{result}] dot(a, b), {attributes}
}}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        return get(run(executable, put(memory, a), put(memory, b))[0]), executable.artifact(
            Artifact.EXPLANATION
        ).decode()


def _integers(element: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Many of the bounds, whose products add up to the most."""
    info = np.iinfo(_INTEGERS[element])
    values = rng.integers(info.min, info.max + 1, shape)
    return np.where(rng.random(shape) < 0.5, info.min if info.min < 0 else info.max, values).astype(info.dtype)


@pytest.mark.parametrize("k", [2, 300, 1024, 1025, 5000])
@pytest.mark.parametrize(
    "types",
    [
        ("s8", "s8", "s32"),
        ("u8", "s8", "s32"),
        ("s8", "u8", "u32"),
        ("u8", "u8", "s8"),
        ("s8", "u16", "s32"),
        ("s16", "s16", "s32"),
        ("s16", "s8", "s16"),
        ("u16", "u16", "u32"),
        ("s32", "s32", "s32"),
        ("s32", "u8", "s32"),
        ("s8", "s8", "s64"),
    ],
    ids="-".join,
)
def test_integers(types: tuple[str, str, str], k: int, context: Context, rng: np.random.Generator) -> None:
    a, b = _integers(types[0], rng, 7, k), _integers(types[1], rng, k, 9)
    ours, explanation = _run(context, types, a, b, "lhs_contracting_dims={1}, rhs_contracting_dims={0}", "7,9")
    assert "(integers)" in explanation and "0 library calls" in explanation
    np.testing.assert_array_equal(ours, (a.astype(np.int64) @ b.astype(np.int64)).astype(_INTEGERS[types[2]]))


@pytest.mark.parametrize("types", [("s16", "s16", "s64"), ("u16", "s8", "s64")], ids="-".join)
def test_sums_of_more_than_32_bits(types: tuple[str, str, str], context: Context, rng: np.random.Generator) -> None:
    a, b = _integers(types[0], rng, 7, 5000), _integers(types[1], rng, 5000, 9)
    ours, explanation = _run(context, types, a, b, "lhs_contracting_dims={1}, rhs_contracting_dims={0}", "7,9")
    assert "(BLAS)" in explanation
    np.testing.assert_array_equal(ours, a.astype(np.int64) @ b.astype(np.int64))


def test_a_batch_and_transposed_operands(context: Context, rng: np.random.Generator) -> None:
    a, b = _integers("s8", rng, 3, 20, 40), _integers("s8", rng, 3, 50, 20)
    attributes = "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_contracting_dims={2}"
    ours, explanation = _run(context, ("s8", "s8", "s32"), a, b, attributes, "3,40,50")
    assert "(integers)" in explanation
    np.testing.assert_array_equal(ours, np.einsum("bkm,bnk->bmn", a.astype(np.int32), b.astype(np.int32)))


@pytest.mark.parametrize(
    ("before", "to", "result", "read_before"),
    [
        ("s8", "s32", "s32", True),
        ("u8", "s16", "s32", True),
        ("s8", "u32", "s32", True),  # of negative numbers, the same 32 bits
        ("s8", "u16", "s32", False),  # of negative numbers, not the same 32 bits
        ("s8", "u16", "u16", True),
        ("s32", "s8", "s32", False),
    ],
)
def test_converted_integers(
    before: str, to: str, result: str, read_before: bool, context: Context, rng: np.random.Generator
) -> None:
    a, b = _integers(before, rng, 20, 30), _integers(to, rng, 30, 40)
    text = f"""ENTRY main {{
  p = {before}[20,30] parameter(0)
  b = {to}[30,40] parameter(1)
  a = {to}[20,30] convert(p)
  ROOT c = {result}[20,40] dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, put(memory, a), put(memory, b))[0])
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
    types = f"{before} {to}" if read_before else to
    assert f"native product c{'.wide' if result == 'u16' else ''} {types} 20x40x30 (integers)" in explanation
    wide = a.astype(_INTEGERS[to]).astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(ours, wide.astype(_INTEGERS[result]))


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (5, 70, 9), (0, 3, 4), (3, 0, 4), (64, 256, 300)])
@pytest.mark.parametrize(
    "types",
    [
        ("f16", "f16", "f16"),
        ("f16", "f16", "f32"),
        ("bf16", "bf16", "f32"),
        ("bf16", "f16", "f32"),
        ("bf16", "bf16", "bf16"),
    ],
    ids="-".join,
)
def test_floats(
    types: tuple[str, str, str], m: int, k: int, n: int, context: Context, rng: np.random.Generator
) -> None:
    a, b = (rng.standard_normal(dims).astype(_FLOATS[t]) for dims, t in zip(((m, k), (k, n)), types, strict=False))
    attributes = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    ours, explanation = _run(context, types, a, b, attributes, f"{m},{n}")
    assert 0 in (m, k, n) or "0 library calls" in explanation
    exact = a.astype(np.float64) @ b.astype(np.float64)
    tolerance = {"f16": 1e-3, "bf16": 4e-3, "f32": 1e-5}[types[2]]
    np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=tolerance, atol=tolerance * 0.02 * max(k, 1))


def test_an_operand_that_is_read_where_it_stands(context: Context, rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal(shape).astype(np.float16) for shape in ((30, 20), (40, 30)))
    text = """ENTRY main {
  x = f16[30,20] parameter(0)
  y = f16[40,30] parameter(1)
  n = f16[40,30] negate(y)
  t = f16[30,40] transpose(n), dimensions={1,0}
  s = f16[10,20] slice(x), slice={[5:15], [0:20]}
  u = f16[10,40] slice(t), slice={[5:15], [0:40]}
  ROOT c = f16[20,40] dot(s, u), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, put(memory, x), put(memory, y))[0])
    exact = x[5:15].astype(np.float64).T @ -y.T[5:15].astype(np.float64)
    np.testing.assert_allclose(ours, exact, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("element", ["f16", "bf16"])
@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "sums"])
@pytest.mark.parametrize("vectors", [1, 2, 3, 4])
@pytest.mark.parametrize(("count", "depth"), [(1, 33), (300, 700), (45, 100), (1300, 37)])
def test_a_few_vectors(
    element: str, wide: bool, vectors: int, count: int, depth: int, context: Context, rng: np.random.Generator
) -> None:
    """Either operand has few rows or columns, stored as rows or as columns; alone and in a batch."""
    dtype, result = _FLOATS[element], "f32" if wide else element
    # What is rounded once, and a sum of floats besides.
    tolerance = 2e-6 if wide else 2e-6 + float(ml_dtypes.finfo(dtype).eps) / 2
    for few_are_rows in (True, False):
        m, n = (vectors, count) if few_are_rows else (count, vectors)
        for lhs, rhs in (("mk", "kn"), ("km", "kn"), ("mk", "nk"), ("km", "nk"), ("bmk", "bkn"), ("bkm", "bnk")):
            sizes = {"b": 3, "m": m, "n": n, "k": depth}
            a, b = (rng.standard_normal([sizes[c] for c in side]).astype(dtype) for side in (lhs, rhs))
            batch = "lhs_batch_dims={0}, rhs_batch_dims={0}, " if "b" in lhs else ""
            contracted = f"lhs_contracting_dims={{{lhs.index('k')}}}, rhs_contracting_dims={{{rhs.index('k')}}}"
            out = "bmn" if "b" in lhs else "mn"
            dims = ",".join(str(sizes[c]) for c in out)
            ours, explanation = _run(context, (element, element, result), a, b, batch + contracted, dims)
            is_one_sum = vectors == count == 1  # which is a reduction
            assert ("(vectors)" in explanation) != is_one_sum and "0 library calls" in explanation
            exact = np.einsum(f"{lhs},{rhs}->{out}", a.astype(np.float64), b.astype(np.float64))
            least = np.einsum(f"{lhs},{rhs}->{out}", *(np.abs(x.astype(np.float64)) for x in (a, b)))
            np.testing.assert_array_less(np.abs(ours.astype(np.float64) - exact), tolerance * np.maximum(least, 1e-3))


def test_a_few_vectors_that_are_not_finite(context: Context, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((3, 200)).astype(ml_dtypes.bfloat16), np.ones((200, 500), ml_dtypes.bfloat16)
    a[1, 7], a[2, 8] = np.nan, -np.inf
    attributes = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    ours, _ = _run(context, ("bf16", "bf16", "bf16"), a, b, attributes, "3,500")
    assert np.isfinite(ours[0].astype(np.float32)).all()
    assert np.isnan(ours[1].astype(np.float32)).all() and np.isneginf(ours[2].astype(np.float32)).all()
