"""Dense matrix decompositions: each JAX primitive becomes one flagos.* custom call with LAPACK's conventions."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.errors import UnsupportedParameter
from flagos_backend.frontends.jax.lowering.rule import LoweringRule, custom_call

_MODULE: Final = "jax._src.lax.linalg"
_ELEMENT_TYPES: Final = frozenset(np.dtype(name) for name in ("float32", "float64", "complex64", "complex128"))


def _decompose(ctx: Any, target: str, operands: tuple[Any, ...], config: dict[str, Any] | None = None) -> list[Any]:
    """A call that works on the trailing two dimensions of its first operand and is batched over the others."""
    matrix = ctx.avals_in[0]
    if np.dtype(matrix.dtype) not in _ELEMENT_TYPES:
        raise UnsupportedParameter(
            primitive=target,
            parameter=f"element type {matrix.dtype}",
            # The first words are JAX's own, so that programs and tests that look for them keep working.
            reason=f"Unsupported dtype {matrix.dtype}: decompositions take float32, float64, complex64 and complex128",
            cure="Convert the matrix first",
        )
    return custom_call(ctx, target, operands, config, num_batch_dims=matrix.ndim - 2)


def _refuse_algorithm(primitive: str, algorithm: Any, accepted: frozenset[str]) -> None:
    """JAX's enumerations of algorithms: None and the names in ``accepted`` pass."""
    if algorithm is not None and algorithm.name not in accepted:
        raise UnsupportedParameter(
            primitive=primitive,
            parameter=f"algorithm {algorithm.name}",
            reason=f"it is computed by {' or '.join(sorted(accepted))}",
            cure="Leave the algorithm to the device",
        )


def _eigh(ctx: Any, a: Any, *, lower: bool, subset_by_index: Any, algorithm: Any = None, **_: Any) -> list[Any]:
    _refuse_algorithm("eigh", algorithm, frozenset({"QR"}))
    start, stop = subset_by_index or (0, ctx.avals_in[0].shape[-1])
    config: dict[str, Any] = {"lower": bool(lower)}
    if subset_by_index is not None:
        config["subset"] = [int(start), int(stop)]
    return _decompose(ctx, "flagos.eigh", (a,), config)


def _eig(
    ctx: Any,
    a: Any,
    *,
    compute_left_eigenvectors: bool,
    compute_right_eigenvectors: bool,
    implementation: Any = None,
    **_: Any,
) -> list[Any]:
    _refuse_algorithm("eig", implementation, frozenset({"LAPACK"}))
    config = {"left": bool(compute_left_eigenvectors), "right": bool(compute_right_eigenvectors)}
    return _decompose(ctx, "flagos.eig", (a,), config)


def _schur(ctx: Any, a: Any, *, compute_schur_vectors: bool, sort_eig_vals: bool, **_: Any) -> list[Any]:
    if sort_eig_vals:
        raise UnsupportedParameter(
            primitive="schur",
            parameter="sort_eig_vals",
            reason="LAPACK's sorting of Schur forms takes a callback on the host",
            cure="Reorder the decomposition afterwards",
        )
    return _decompose(ctx, "flagos.schur", (a,), {"vectors": bool(compute_schur_vectors)})


def _hessenberg(ctx: Any, a: Any) -> list[Any]:
    return _decompose(ctx, "flagos.hessenberg", (a,))


def _tridiagonal(ctx: Any, a: Any, *, lower: bool) -> list[Any]:
    return _decompose(ctx, "flagos.tridiagonal", (a,), {"lower": bool(lower)})


def _geqp3(ctx: Any, a: Any, jpvt: Any, **_: Any) -> list[Any]:
    return _decompose(ctx, "flagos.geqp3", (a, jpvt))


def _geqrf(ctx: Any, a: Any, **_: Any) -> list[Any]:
    return _decompose(ctx, "flagos.geqrf", (a,))


def _householder_product(ctx: Any, a: Any, taus: Any) -> list[Any]:
    return _decompose(ctx, "flagos.householder_product", (a, taus))


def _ormqr(ctx: Any, a: Any, taus: Any, c: Any, *, left: bool, transpose: bool) -> list[Any]:
    return _decompose(ctx, "flagos.ormqr", (a, taus, c), {"left": bool(left), "transpose": bool(transpose)})


def _lu(ctx: Any, a: Any) -> list[Any]:
    return _decompose(ctx, "flagos.lu", (a,))


def _svd_of_nothing(a: Any, *, full_matrices: bool, compute_uv: bool) -> list[Any]:
    """Of [..., m, n] without rows or columns: no singular values, and unit matrices for the vectors."""
    import jax.numpy as jnp

    *batch, m, n = a.shape
    values = jnp.zeros((*batch, 0), a.real.dtype)
    if not compute_uv:
        return [values]

    def unit(rows: int, columns: int) -> Any:
        return jnp.broadcast_to(jnp.eye(rows, columns, dtype=a.dtype), (*batch, rows, columns))

    return [values, unit(m, m if full_matrices else 0), unit(n if full_matrices else 0, n)]


def _svd(
    ctx: Any, a: Any, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any = None, algorithm: Any = None
) -> list[Any]:
    matrix = ctx.avals_in[0]
    smaller = min(matrix.shape[-2:])
    if subset_by_index is not None and tuple(subset_by_index) != (0, smaller):
        raise UnsupportedParameter(
            primitive="svd",
            parameter=f"subset_by_index={subset_by_index}",
            reason="LAPACK's algorithms compute all singular values",
            cure="Slice the full decomposition",
        )
    if smaller == 0:  # whatever the algorithm and the type, as on JAX's own platforms
        vectors = {"full_matrices": full_matrices, "compute_uv": compute_uv}
        return list(jax_internals.lower_function(_svd_of_nothing)(ctx, a, **vectors))
    _refuse_algorithm("svd", algorithm, frozenset({"DEFAULT", "QR", "DIVIDE_AND_CONQUER"}))
    return _decompose(ctx, "flagos.svd", (a,), {"full_matrices": bool(full_matrices), "compute_uv": bool(compute_uv)})


RULES: Final = (
    LoweringRule(_MODULE, "eigh_p", _eigh),
    LoweringRule(_MODULE, "eig_p", _eig),
    LoweringRule(_MODULE, "schur_p", _schur),
    LoweringRule(_MODULE, "hessenberg_p", _hessenberg),
    LoweringRule(_MODULE, "tridiagonal_p", _tridiagonal),
    LoweringRule(_MODULE, "geqp3_p", _geqp3),
    LoweringRule(_MODULE, "geqrf_p", _geqrf),
    LoweringRule(_MODULE, "householder_product_p", _householder_product),
    LoweringRule(_MODULE, "ormqr_p", _ormqr),
    LoweringRule(_MODULE, "lu_p", _lu),
    LoweringRule(_MODULE, "svd_p", _svd),
)

#: What the rules above call; partitioners may split each along its batch dimensions.
TARGETS: Final = tuple(
    f"flagos.{name}"
    for name in (
        "eigh",
        "eig",
        "schur",
        "hessenberg",
        "tridiagonal",
        "geqp3",
        "geqrf",
        "householder_product",
        "ormqr",
        "lu",
        "svd",
    )
)
