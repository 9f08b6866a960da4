"""Every custom-call target: what its results must satisfy, in f64; refusals by name; the table in CUSTOM_CALLS.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from jax import lax

import flagos_backend.kernels.reference as reference
from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.errors import MalformedProgram, UnknownCustomCall, UnsupportedAttribute, UnsupportedElementType
from flagos_backend.importer import import_module
from flagos_backend.ir.types import ArrayShape, ElementType, Shape
from flagos_backend.kernels.reference.custom_calls import known_targets
from flagos_backend.kernels.reference.registry import Run
from programs import hlo_bytes
from support.against_xla import hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE

E = ElementType
TYPES = (E.F32, E.F64, E.C64, E.C128)
TOLERANCE = {E.F32: 3e-4, E.C64: 3e-4, E.F64: 1e-10, E.C128: 1e-10}
BATCHES = ((), (3,), (2, 1))


def shape(element_type: ElementType, *dims: int) -> str:
    return f"{element_type.name.lower()}[{','.join(map(str, dims))}]"


def call_text(target: str, operands: Sequence[str], results: Sequence[str], config: object = None) -> str:
    parameters = "\n".join(f"  p{i} = {operand} parameter({i})" for i, operand in enumerate(operands))
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    text = (
        ""
        if config is None
        else f", backend_config={json.dumps(config if isinstance(config, str) else json.dumps(config))}"
    )
    names = ", ".join(f"p{i}" for i in range(len(operands)))
    return f"""
ENTRY e {{
{parameters}
  ROOT r = {result} custom-call({names}), custom_call_target="{target}"{text}
}}"""


def call(
    target: str, arguments: Sequence[np.ndarray], operands: Sequence[str], results: Sequence[str], config: object = None
) -> list[np.ndarray]:
    return run_on_backend(hlo_of_text(call_text(target, operands, results, config)), arguments)


def matrices(element_type: ElementType, dims: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(dims)
    if element_type.is_complex:
        values = values + 1j * rng.standard_normal(dims)
    return values.astype(NUMPY_DTYPE[element_type])


def adjoint(a: np.ndarray) -> np.ndarray:
    return a.conj().swapaxes(-1, -2)


def close(actual: np.ndarray, expected: np.ndarray, element_type: ElementType) -> None:
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[element_type], atol=10 * TOLERANCE[element_type])


def is_unitary(q: np.ndarray, element_type: ElementType) -> None:
    close(adjoint(q) @ q, np.broadcast_to(np.eye(q.shape[-1]), (*q.shape[:-2], q.shape[-1], q.shape[-1])), element_type)


every_type = pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
every_batch = pytest.mark.parametrize("batch", BATCHES, ids=str)


@every_type
@every_batch
@pytest.mark.parametrize("lower", [True, False])
def test_eigh(element_type: ElementType, batch: tuple[int, ...], lower: bool, rng: np.random.Generator) -> None:
    a = matrices(element_type, (*batch, 5, 5), rng)
    hermitian = a + adjoint(a)
    given = np.where(np.tri(5, dtype=bool) if lower else np.tri(5, dtype=bool).T, hermitian, np.nan).astype(a.dtype)
    results = [shape(element_type, *a.shape), shape(element_type.real, *batch, 5)]
    v, w = call("flagos.eigh", [given], [results[0]], results, {"lower": lower})
    is_unitary(v, element_type)
    close(hermitian @ v, v * w[..., None, :], element_type)
    assert (np.diff(w, axis=-1) >= 0).all()
    subset = [shape(element_type, *batch, 5, 2), shape(element_type.real, *batch, 2)]
    v2, w2 = call("flagos.eigh", [given], [results[0]], subset, {"lower": lower, "subset": [1, 3]})
    close(w2, w[..., 1:3], element_type)
    close(hermitian @ v2, v2 * w2[..., None, :], element_type)


@every_type
@every_batch
def test_eig(element_type: ElementType, batch: tuple[int, ...], rng: np.random.Generator) -> None:
    a = matrices(element_type, (*batch, 5, 5), rng)
    cpx = E.C64 if element_type in (E.F32, E.C64) else E.C128
    matrix = shape(cpx, *a.shape)
    results = [shape(cpx, *batch, 5), matrix, matrix]
    w, left, right = call("flagos.eig", [a], [shape(element_type, *a.shape)], results, {"left": True, "right": True})
    close(a @ right, right * w[..., None, :], element_type)
    close(adjoint(left) @ a, w[..., :, None] * adjoint(left), element_type)
    for vectors in (left, right):
        close(np.linalg.norm(vectors, axis=-2), np.ones((*batch, 5)), element_type)
        greatest = np.take_along_axis(vectors, np.abs(vectors).argmax(-2)[..., None, :], -2)
        close(greatest.imag, np.zeros_like(greatest.imag), element_type)
    (alone,) = call("flagos.eig", [a], [shape(element_type, *a.shape)], results[:1])
    close(np.sort_complex(alone.astype(np.complex64)), np.sort_complex(w.astype(np.complex64)), E.F32)


@every_type
@every_batch
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_schur(element_type: ElementType, batch: tuple[int, ...], n: int, rng: np.random.Generator) -> None:
    a = matrices(element_type, (*batch, n, n), rng)
    matrix = shape(element_type, *a.shape)
    t, z = call("flagos.schur", [a], [matrix], [matrix, matrix], {"vectors": True})
    is_unitary(z, element_type)
    close(z @ t @ adjoint(z), a, element_type)
    below = np.tril(t, -1)
    if element_type.is_complex:
        assert not below.any()
        return
    assert not np.tril(t, -2).any()
    for block in t.reshape(-1, n, n):
        starts = np.flatnonzero(np.diagonal(block, -1))
        assert (np.diff(starts) > 1).all()
        for i in starts:
            assert block[i, i] == block[i + 1, i + 1]
            assert block[i, i + 1] * block[i + 1, i] < 0


@pytest.mark.parametrize(
    "a",
    [
        np.zeros((4, 4)),
        np.eye(4),
        np.roll(np.eye(5), 1, 0),
        np.diag(np.ones(4), -1),
        np.ones((4, 4)) * 1e-200,
        np.array([[0.0, 1.0], [-1.0, 0.0]]),
        np.array([[1.0, 1e8], [-1e-8, 1.0]]),
    ],
    ids=["zero", "identity", "cyclic", "nilpotent", "tiny", "rotation", "badly scaled"],
)
def test_schur_of_difficult_matrices(a: np.ndarray) -> None:
    matrix = shape(E.F64, *a.shape)
    t, z = call("flagos.schur", [a], [matrix], [matrix, matrix])
    is_unitary(z, E.F64)
    np.testing.assert_allclose(z @ t @ z.T, a, rtol=0, atol=1e-14 * max(np.abs(a).max(), 1e-300))


def reflectors(packed: np.ndarray, taus: np.ndarray, below: int) -> np.ndarray:
    """The product of the reflectors packed ``below`` rows under the diagonal of one matrix, first one leftmost."""
    m = len(packed)
    q = np.eye(m, dtype=packed.dtype)
    for i, tau in enumerate(taus):
        v = np.zeros(m, packed.dtype)
        v[i + below] = 1
        v[i + below + 1 :] = packed[i + below + 1 :, i]
        q = q @ (np.eye(m) - tau * np.outer(v, v.conj()))
    return q


@every_type
@pytest.mark.parametrize("n", [1, 2, 6])
def test_hessenberg(element_type: ElementType, n: int, rng: np.random.Generator) -> None:
    a = matrices(element_type, (2, n, n), rng)
    results = [shape(element_type, 2, n, n), shape(element_type, 2, n - 1)]
    packed, taus = call("flagos.hessenberg", [a], results[:1], results)
    for matrix, h, tau in zip(a, packed, taus, strict=True):
        q = reflectors(h, tau, 1)
        is_unitary(q, element_type)
        close(q @ np.triu(h, -1) @ adjoint(q), matrix, element_type)


@every_type
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_tridiagonal(element_type: ElementType, lower: bool, n: int, rng: np.random.Generator) -> None:
    a = matrices(element_type, (2, n, n), rng)
    hermitian = a + adjoint(a)
    real = element_type.real
    results = [shape(element_type, 2, n, n), shape(real, 2, n), shape(real, 2, n - 1), shape(element_type, 2, n - 1)]
    packed, d, e, taus = call("flagos.tridiagonal", [hermitian], results[:1], results, {"lower": lower})
    for i in range(2):
        t = np.diag(d[i]) + np.diag(e[i], 1) + np.diag(e[i], -1)
        # The upper form is the lower one seen from the other corner.
        turned = packed[i] if lower else np.flip(packed[i])
        q = reflectors(turned, taus[i] if lower else np.flip(taus[i]), 1)
        q = q if lower else np.flip(q)
        is_unitary(q, element_type)
        close(q @ t @ adjoint(q), hermitian[i], element_type)


@every_type
@every_batch
@pytest.mark.parametrize("dims", [(4, 4), (6, 3), (3, 6)])
@pytest.mark.parametrize("target", ["Qr", "flagos.geqrf"])
def test_qr(
    element_type: ElementType, batch: tuple[int, ...], dims: tuple[int, int], target: str, rng: np.random.Generator
) -> None:
    m, n = dims
    k = min(dims)
    a = matrices(element_type, (*batch, m, n), rng)
    results = [shape(element_type, *batch, m, n), shape(element_type, *batch, k)]
    packed, taus = call(target, [a], results[:1], results)
    product = "ProductOfElementaryHouseholderReflectors" if target == "Qr" else "flagos.householder_product"
    tall = shape(element_type, *batch, m, k)
    (q,) = call(product, [packed[..., :k], taus], [tall, results[1]], [tall])
    is_unitary(q, element_type)
    close(q @ np.triu(packed[..., :k, :]), a, element_type)


@every_type
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
def test_ormqr(element_type: ElementType, left: bool, transpose: bool, rng: np.random.Generator) -> None:
    a = matrices(element_type, (2, 5, 3), rng)
    results = [shape(element_type, 2, 5, 3), shape(element_type, 2, 3)]
    packed, taus = call("flagos.geqrf", [a], results[:1], results)
    c = matrices(element_type, (2, 5, 4) if left else (2, 4, 5), rng)
    config = {"left": left, "transpose": transpose}
    c_shape = shape(element_type, *c.shape)
    (ours,) = call("flagos.ormqr", [packed, taus, c], [*results, c_shape], [c_shape], config)
    for i in range(2):
        q = reflectors(packed[i], taus[i], 0)
        q = adjoint(q) if transpose else q
        close(ours[i], q @ c[i] if left else c[i] @ q, element_type)


@every_type
@pytest.mark.parametrize("dims", [(4, 4), (6, 3), (3, 6)])
def test_pivoted_qr(element_type: ElementType, dims: tuple[int, int], rng: np.random.Generator) -> None:
    m, n = dims
    a = matrices(element_type, (2, m, n), rng)
    order = np.zeros((2, n), np.int32)
    order[1, n - 1] = 1  # the second matrix wants its last column first
    operands = [shape(element_type, 2, m, n), shape(E.S32, 2, n)]
    results = [*operands, shape(element_type, 2, min(dims))]
    packed, pivots, taus = call("flagos.geqp3", [a, order], operands, results)
    assert pivots[1, 0] == n
    for i in range(2):
        assert sorted(pivots[i]) == list(range(1, n + 1))
        close(reflectors(packed[i], taus[i], 0) @ np.triu(packed[i]), a[i][:, pivots[i] - 1], element_type)
    diagonal = np.abs(np.diagonal(packed[0]))
    assert (diagonal[:-1] >= diagonal[1:] * (1 - 1e-5)).all()


@every_type
@every_batch
@pytest.mark.parametrize("dims", [(4, 4), (6, 3), (3, 6), (3, 0)])
def test_lu(element_type: ElementType, batch: tuple[int, ...], dims: tuple[int, int], rng: np.random.Generator) -> None:
    m, n = dims
    k = min(dims)
    a = matrices(element_type, (*batch, m, n), rng)
    results = [shape(element_type, *batch, m, n), shape(E.S32, *batch, k), shape(E.S32, *batch, m)]
    lu, pivots, permutation = call("flagos.lu", [a], results[:1], results)
    lower = np.tril(lu[..., :k], -1) + np.eye(m, k)
    close(lower @ np.triu(lu[..., :k, :]), np.take_along_axis(a, permutation[..., None], -2), element_type)
    for place in np.ndindex(batch):
        rows = np.arange(m)
        for i, other in enumerate(pivots[place]):
            rows[[i, other]] = rows[[other, i]]
        np.testing.assert_array_equal(rows, permutation[place])


@every_type
@every_batch
@pytest.mark.parametrize("dims", [(4, 4), (6, 3), (3, 6)])
@pytest.mark.parametrize("full", [True, False])
def test_svd(
    element_type: ElementType, batch: tuple[int, ...], dims: tuple[int, int], full: bool, rng: np.random.Generator
) -> None:
    m, n = dims
    k = min(dims)
    a = matrices(element_type, (*batch, m, n), rng)
    given = shape(element_type, *a.shape)
    left, right = (m, n) if full else (k, k)
    results = [
        shape(element_type.real, *batch, k),
        shape(element_type, *batch, m, left),
        shape(element_type, *batch, right, n),
    ]
    s, u, vh = call("flagos.svd", [a], [given], results, {"full_matrices": full, "compute_uv": True})
    is_unitary(u, element_type)
    is_unitary(adjoint(vh), element_type)
    close((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], a, element_type)
    (alone,) = call("flagos.svd", [a], [given], results[:1], {"compute_uv": False})
    close(alone, s, element_type)


FACTORISATIONS = {
    "flagos.eigh": (["f32[3,3,3]", "f32[3,3]"], {}),
    "flagos.eig": (["c64[3,3]", "c64[3,3,3]"], {"right": True}),
    "flagos.schur": (["f32[3,3,3]", "f32[3,3,3]"], {}),
    "flagos.hessenberg": (["f32[3,3,3]", "f32[3,2]"], {}),
    "flagos.tridiagonal": (["f32[3,3,3]", "f32[3,3]", "f32[3,2]", "f32[3,2]"], {}),
    "flagos.svd": (["f32[3,3]", "f32[3,3,3]", "f32[3,3,3]"], {}),
}


@pytest.mark.parametrize("target", FACTORISATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_matrix_that_is_not_finite_gives_nan_and_spares_its_batch(target: str, bad: float) -> None:
    a = np.stack([np.diag([1.0, 2, 3])] * 3).astype(np.float32)
    a[1, 2, 0] = bad
    results, config = FACTORISATIONS[target]
    for result in call(target, [a], ["f32[3,3,3]"], results, config):
        assert np.isnan(result[1]).all()
        assert np.isfinite(result[[0, 2]]).all()


@pytest.mark.parametrize(
    ("target", "results"),
    [
        ("flagos.eigh", ["f32[2,0,0]", "f32[2,0]"]),
        ("flagos.schur", ["f32[2,0,0]", "f32[2,0,0]"]),
        ("flagos.eig", ["c64[2,0]"]),
        ("flagos.geqrf", ["f32[2,0,0]", "f32[2,0]"]),
    ],
)
def test_matrices_without_elements(target: str, results: list[str]) -> None:
    call(target, [np.zeros((2, 0, 0), np.float32)], ["f32[2,0,0]"], results)


@every_type
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("columns", [None, 3])
def test_sparse_products(
    element_type: ElementType, transpose: bool, columns: int | None, rng: np.random.Generator
) -> None:
    rows, cols, nse = 5, 7, 12
    data = matrices(element_type, (nse,), rng)
    # Sorted rows with some repeated places, and two entries out of bounds, which count for nothing.
    row = np.sort(rng.integers(0, rows, nse)).astype(np.int32)
    col = rng.integers(0, cols, nse).astype(np.int32)
    col[3] = cols
    dense = np.zeros((rows, cols), data.dtype)
    for d, r, c in zip(data, row, col, strict=True):
        if c < cols:
            dense[r, c] += d
    indptr = np.searchsorted(row, np.arange(rows + 1)).astype(np.int32)
    matrix = dense.T if transpose else dense
    tail = () if columns is None else (columns,)
    x = matrices(element_type, (matrix.shape[1], *tail), rng)
    kind = "spmv" if columns is None else "spmm"
    config = {"shape": [rows, cols], "transpose": transpose}
    d, i = shape(element_type, nse), shape(E.S32, nse)
    xs, ys = shape(element_type, *x.shape), shape(element_type, matrix.shape[0], *tail)
    (csr,) = call(f"flagos.csr_{kind}", [data, col, indptr, x], [d, i, shape(E.S32, rows + 1), xs], [ys], config)
    close(csr, matrix @ x, element_type)
    row[5] = -1
    dense = np.zeros((rows, cols), data.dtype)
    for value, r, c in zip(data, row, col, strict=True):
        if c < cols and r >= 0:
            dense[r, c] += value
    (coo,) = call(f"flagos.coo_{kind}", [data, row, col, x], [d, i, i, xs], [ys], config)
    close(coo, (dense.T if transpose else dense) @ x, element_type)


@every_type
def test_sparse_solve(element_type: ElementType, rng: np.random.Generator) -> None:
    a = matrices(element_type, (4, 4), rng) + 4 * np.eye(4, dtype=NUMPY_DTYPE[element_type])
    a[0, 2] = a[3, 1] = 0
    row, col = np.nonzero(a)
    b = matrices(element_type, (4,), rng)
    indptr = np.searchsorted(row, np.arange(5)).astype(np.int32)
    n = len(row)
    operands = [shape(element_type, n), shape(E.S32, n), "s32[5]", shape(element_type, 4)]
    (x,) = call("flagos.spsolve", [a[row, col], col.astype(np.int32), indptr, b], operands, operands[3:])
    close(a @ x, b, element_type)
    (singular,) = call("flagos.spsolve", [0 * a[row, col], col.astype(np.int32), indptr, b], operands, operands[3:])
    assert np.isnan(singular).all()


def test_top_k_and_the_markers() -> None:
    x = np.array([[3, 1, 3, 2]], np.float32)
    for target in ("TopK", "mhlo.topk"):
        values, indices = call(target, [x], ["f32[1,4]"], ["f32[1,3]", "s32[1,3]"])
        np.testing.assert_array_equal(values, [[3, 3, 2]])
        np.testing.assert_array_equal(indices, [[0, 2, 3]])
    for target in ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint"):
        np.testing.assert_array_equal(call(target, [x], ["f32[1,4]"], ["f32[1,4]"], "anything")[0], x)
    with pytest.raises(MalformedProgram, match="not partitioned"):
        call("SPMDFullToShardShape", [x], ["f32[1,4]"], ["f32[1,2]"])


def test_a_sink_takes_anything_and_gives_nothing() -> None:
    text = """
ENTRY e {
  x = f32[2] parameter(0)
  y = f32[2] negate(x)
  sink = () custom-call(y), custom_call_target="dce_sink", custom_call_has_side_effect=true
  ROOT r = (f32[2]) tuple(x)
}"""
    np.testing.assert_array_equal(run_on_backend(hlo_of_text(text), [np.ones(2, np.float32)])[0], [1, 1])


def test_approximate_top_k_as_an_accelerator_lowers_it(rng: np.random.Generator) -> None:
    x = rng.permutation(3000).astype(np.float32).reshape(3, 1000)
    for select, best in ((lax.approx_max_k, -x), (lax.approx_min_k, x)):
        values, indices = run_on_backend(hlo_bytes(lambda x, select=select: select(x, 5), x, platform="tpu"), [x])
        order = np.argsort(best, axis=1)[:, :5]
        np.testing.assert_array_equal(indices, order)
        np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("mhlo.erf", torch.erf),
        ("mhlo.tan", torch.tan),
        ("mhlo.asin", torch.asin),
        ("mhlo.acos", torch.acos),
        ("mhlo.sinh", torch.sinh),
        ("mhlo.cosh", torch.cosh),
        ("mhlo.asinh", torch.asinh),
        ("mhlo.atanh", torch.atanh),
    ],
)
def test_elementwise_targets(target: str, function: object, rng: np.random.Generator) -> None:
    x = rng.uniform(-0.9, 0.9, 50).astype(np.float32)
    (ours,) = call(target, [x], ["f32[50]"], ["f32[50]"])
    np.testing.assert_allclose(ours, function(torch.from_numpy(x).double()).numpy(), rtol=1e-5)


def test_host_callback_gets_arrays_and_passes_tokens() -> None:
    text = """
ENTRY e {
  x = f32[2] parameter(0)
  y = s32[] parameter(1)
  before = token[] after-all()
  called = (token[], s32[3], f32[2]) custom-call(before, x, y), custom_call_target="flagos.host_callback",
    custom_call_has_side_effect=true, backend_config="{\\"id\\": 42}"
  a = s32[3] get-tuple-element(called), index=1
  b = f32[2] get-tuple-element(called), index=2
  ROOT r = (s32[3], f32[2]) tuple(a, b)
}"""

    def host(
        identifier: int, arguments: Sequence[torch.Tensor], shapes: Sequence[Shape], results: Sequence[Shape]
    ) -> list[torch.Tensor]:
        assert identifier == 42
        assert [a.tolist() for a in arguments] == [[1.0, 2.0], 7]
        assert list(shapes) == [ArrayShape(E.F32, (2,)), ArrayShape(E.S32)]
        assert list(results) == [ArrayShape(E.S32, (3,)), ArrayShape(E.F32, (2,))]
        return [torch.tensor([1, 2, 3], dtype=torch.int32), arguments[0] * 2]

    arguments = [np.array([1, 2], np.float32), np.array(7, np.int32)]
    a, b = run_on_backend(hlo_of_text(text), arguments, Run(host_callback=host))
    np.testing.assert_array_equal(a, [1, 2, 3])
    np.testing.assert_array_equal(b, [2, 4])


def compile_call(target: str, config: object = None, operand: str = "f32[3,3]") -> None:
    text = call_text(target, [operand], ["f32[3,3]", "f32[3]"], config)
    build_plan(import_module(hlo_of_text(text)).entry)


def test_an_unknown_target_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(UnknownCustomCall, match=r"my\.own_kernel") as caught:
        compile_call("my.own_kernel")
    assert all(target in str(caught.value) for target in known_targets())


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ('{"lower": ', MalformedProgram, "not JSON"),
        ("[1]", MalformedProgram, "not a JSON object"),
        ({"lower": 1}, MalformedProgram, "backend_config.lower"),
        ({"upper": True}, UnsupportedAttribute, "backend_config.upper"),
        *(
            ({"subset": subset}, MalformedProgram, "backend_config.subset")
            for subset in (True, 1, "12", {}, [], [1], [0, True], [0, 1.0], [2, 1], [-1, 2], [0, 99], [0, 10**400])
        ),
    ],
)
def test_a_bad_config_is_refused_by_name(config: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        compile_call("flagos.eigh", config)


@pytest.mark.parametrize(
    ("target", "config"),
    [
        ("flagos.csr_spmv", {}),
        ("flagos.csr_spmv", {"shape": [3]}),
        ("flagos.csr_spmv", {"shape": [3, True]}),
        ("flagos.csr_spmv", {"shape": [3, 1 << 63]}),
        ("flagos.host_callback", {}),
        ("flagos.host_callback", {"id": "1"}),
        ("flagos.host_callback", {"id": True}),
        ("flagos.host_callback", {"id": 1 << 63}),
    ],
)
def test_a_config_that_lacks_what_is_needed_is_refused(target: str, config: object) -> None:
    with pytest.raises(MalformedProgram, match=target):
        compile_call(target, config)


def test_an_element_type_without_a_factorisation_is_refused() -> None:
    with pytest.raises(UnsupportedElementType, match="F16"):
        compile_call("flagos.eigh", operand="f16[3,3]")


def test_the_document_names_every_target() -> None:
    document = Path(reference.__file__).with_name("CUSTOM_CALLS.md").read_text(encoding="utf-8")
    missing = [target for target in known_targets() if f"`{target.removeprefix('mhlo.')}`" not in document]
    assert [target for target in missing if f"`{target}`" not in document] == []


@pytest.mark.parametrize(
    ("view", "dims"),
    [
        ({"strides": [7, 1], "offset": 2}, (3, 4)),
        ({"strides": [1, 8]}, (4, 3)),
        ({"strides": [3, 1]}, (5, 6)),  # windows that overlap
        ({"strides": [0, 2]}, (3, 4)),
        ({"strides": [5], "offset": 19}, (0,)),
        ({"strides": [], "offset": 19}, ()),
    ],
)
@pytest.mark.parametrize("element_type", [E.F32, E.PRED, E.BF16, E.C128])
def test_strided_view(
    element_type: ElementType, view: dict[str, object], dims: tuple[int, ...], rng: np.random.Generator
) -> None:
    line = rng.integers(0, 2, 20).astype(NUMPY_DTYPE[element_type])
    strides, offset = view["strides"], view.get("offset", 0)
    assert isinstance(strides, list) and isinstance(offset, int)
    operand, result = shape(element_type, 20), shape(element_type, *dims)
    (found,) = call("flagos.strided_view", [line], [operand], [result], view)
    assert found.shape == dims
    for index in np.ndindex(*dims):
        assert found[index] == line[offset + sum(i * s for i, s in zip(index, strides, strict=True))]


@pytest.mark.parametrize(
    ("operand", "result", "config"),
    [
        ("f32[20]", "f32[3,4]", {"strides": [8, 1], "offset": 1}),  # one element too far
        ("f32[20]", "f32[3,4]", {"strides": [8]}),
        ("f32[20]", "f32[3,4]", {"strides": [8, -1]}),
        ("f32[20]", "f32[3]", {"strides": [1.5]}),
        ("f32[20]", "f32[3]", {"strides": True}),
        ("f32[20]", "f32[3]", {"strides": [True]}),
        ("f32[20]", "f32[1]", {"strides": [1 << 63]}),  # a stride that nothing takes
        ("f32[20]", "f32[3]", {"strides": [1], "offset": -1}),
        ("f32[20]", "f32[3]", {"strides": [1], "steps": 2}),
        ("f32[20]", "f32[3]", {}),
        ("f32[20]", "f32[3]", "no json"),
        ("f32[4,5]", "f32[3]", {"strides": [1]}),
        ("f32[20]", "s32[3]", {"strides": [1]}),
    ],
)
def test_a_strided_view_outside_of_its_operand_is_refused(operand: str, result: str, config: object) -> None:
    with pytest.raises(MalformedProgram, match=r"flagos\.strided_view"):
        call("flagos.strided_view", [np.zeros(20, np.float32)], [operand], [result], config)
