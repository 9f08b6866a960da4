"""Library-shaped operations of arrays without elements, their transformations, and JAX's own CPU as the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax import lax

Function = Callable[..., Any]
Shape = tuple[int, ...]

TALL_AND_WIDE: list[Shape] = [(3, 0), (0, 3), (0, 3, 2)]
SQUARE: list[Shape] = [(0, 0), (0, 3, 3)]
CASES: dict[str, tuple[Function, list[Shape]]] = {
    "lu": (lax.linalg.lu, TALL_AND_WIDE),
    "scipy.linalg.lu": (jax.scipy.linalg.lu, TALL_AND_WIDE),
    "qr": (lambda a: lax.linalg.qr(a, full_matrices=False), TALL_AND_WIDE),
    "full qr": (lambda a: lax.linalg.qr(a, full_matrices=True), TALL_AND_WIDE),
    "svd": (lax.linalg.svd, TALL_AND_WIDE),
    "svd by polar": (lambda a: lax.linalg.svd(a, algorithm=lax.linalg.SvdAlgorithm.POLAR), [(3, 0), (2, 0, 3)]),
    "singular values": (lambda a: lax.linalg.svd(a, compute_uv=False), TALL_AND_WIDE),
    "cholesky": (lax.linalg.cholesky, SQUARE),
    "eigh": (lax.linalg.eigh, SQUARE),
    "eig": (lax.linalg.eig, SQUARE),
    "schur": (lax.linalg.schur, SQUARE),
    "hessenberg": (lax.linalg.hessenberg, SQUARE),
    "solve": (lambda a: jnp.linalg.solve(a, a), SQUARE),
    "determinant": (jnp.linalg.det, SQUARE),
    "fft": (jnp.fft.fft2, [(0, 3), (2, 0, 4)]),
    "sort": (lambda a: lax.sort(a, dimension=0), TALL_AND_WIDE),
    "cumulative sum": (lambda a: lax.cumsum(a, 0), TALL_AND_WIDE),
    "product": (lambda a: jnp.einsum("...ij,...kj->...ik", a, a), TALL_AND_WIDE),
    "update": (lambda a: a.at[np.zeros(0, np.int32)].add(1), TALL_AND_WIDE),
}
_TYPES = ("float32", "float64", "complex64", "complex128", "bfloat16")


def _loss(function: Function) -> Function:
    """The sum of the squares of all results that are no integers."""

    def loss(a: jax.Array) -> Any:
        inexact = [x for x in jax.tree.leaves(function(a)) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum((jnp.abs(x) ** 2).sum() for x in inexact).astype(jnp.float32)

    return loss


_TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    "vmap": jax.vmap,
    "gradient": lambda function: jax.grad(_loss(function)),
    "gradient in vmap": lambda function: jax.vmap(jax.grad(_loss(function))),
    "tangent": lambda function: lambda a: jax.jvp(function, (a,), (a,)),
}


class Transformed(NamedTuple):
    """A program of one array of that shape and type."""

    name: str
    transformation: str
    shape: Shape
    dtype: str

    def function(self) -> Function:
        return _TRANSFORMATIONS[self.transformation](CASES[self.name][0])


def transformed() -> list[Transformed]:
    """Every case transformed in every way, of every type; vmap goes over two arrays, or over none of some."""
    found = []
    for (name, (_, shapes)), how, dtype in itertools.product(CASES.items(), _TRANSFORMATIONS, _TYPES):
        for shape in shapes:
            over = [(2, *shape), (0, *(dim or 2 for dim in shape))] if "vmap" in how else [shape]
            found += [Transformed(name, how, each, dtype) for each in over]
    return found


def check(function: Function, shape: Shape, dtype: str) -> None:
    """Ours has the results of JAX's CPU, their shapes and types. What that refuses, ours may, but never as INTERNAL."""
    results: list[Any] = []
    for platform in ("flagos", "cpu"):
        array = jax.device_put(np.zeros(shape, jnp.dtype(dtype)), jax.devices(platform)[0])
        try:
            found = jax.tree.leaves(jax.jit(function)(array))
            results.append([np.asarray(x) for x in found if x.dtype != jax.dtypes.float0])
        except Exception as error:
            assert "INTERNAL" not in str(error), f"{platform}: {error}"
            results.append(type(error))
    ours, expected = results
    if isinstance(expected, type):
        return
    assert not isinstance(ours, type), (shape, ours)
    for x, y in zip(ours, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x, y, err_msg=str(shape))
