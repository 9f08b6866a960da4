"""Custom calls for matrix factorisations: eigen, Schur, singular values, QR, LU. Batched over leading dimensions.

A matrix that holds NaN or infinity, or on which the algorithm fails, gets NaN results; the others of its batch do not.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from flagos_backend.errors import UnsupportedElementType
from flagos_backend.ir.config import is_size
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference import householder, storage
from flagos_backend.kernels.reference.custom_calls import Config, custom_call, malformed
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.kernels.reference.schur import NotConverged, schur
from flagos_backend.process.torch_loading import Tensor, torch

_LINALG_ERROR: type[Exception] = getattr(torch.linalg, "LinAlgError")  # noqa: B009 (not in its stubs)
_TYPES = (ElementType.F32, ElementType.F64, ElementType.C64, ElementType.C128)
# Each is an order of all rows until they are composed.
_SWAPS_AT_ONCE = 128

# Factorises [b, m, n], b >= 1, all finite; several results each with the batch in front.
Factorise = Callable[[Tensor], tuple[Tensor, ...]]


def _matrix(instruction: Instruction) -> ArrayShape:
    shape = instruction.operands[0].shape if instruction.operands else None
    if not isinstance(shape, ArrayShape) or shape.rank < 2:
        raise malformed(instruction, f"its first operand is {shape}, not a matrix")
    if shape.element_type not in _TYPES:
        raise UnsupportedElementType.at(instruction, element_type=shape.element_type.name)
    return shape


def _one_or_all(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return results[0] if len(results) == 1 else results


def _zeros(instruction: Instruction) -> Kernel:
    """For matrices without elements: every result is zeros of its shape."""
    shapes = list(leaves(instruction.shape))

    def run(launch: Run, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        return _one_or_all(
            tuple(torch.zeros(s.dims, dtype=storage.dtype_of(s.element_type), device=launch.device) for s in shapes)
        )

    return run


def _guarded(run: Run, factorise: Factorise, a: Tensor) -> tuple[Tensor, ...]:
    """``factorise`` on a [..., m, n]; NaN for the matrices on which it cannot work."""
    batch = a.shape[:-2]
    flat = a.reshape(prod(batch), *a.shape[-2:])
    finite = flat.flatten(1).isfinite().all(dim=1)
    # Where the host would wait to know, whatever there is is replaced.
    replaces = run.asynchronous or not bool(finite.all())
    if replaces:
        flat = torch.where(finite[:, None, None], flat, torch.eye(*flat.shape[1:], dtype=a.dtype, device=a.device))
    try:
        results = factorise(flat)
    except (_LINALG_ERROR, NotConverged):
        results = _one_by_one(factorise, flat)
    if replaces:
        results = tuple(_with_nan(result, ~finite) for result in results)
    return tuple(result.reshape(*batch, *result.shape[1:]) for result in results)


def _with_nan(result: Tensor, failed: Tensor) -> Tensor:
    if not (result.is_floating_point() or result.is_complex()):
        return result
    return result.masked_fill(failed.reshape(-1, *[1] * (result.dim() - 1)), torch.nan)


def _one_by_one(factorise: Factorise, flat: Tensor) -> tuple[Tensor, ...]:
    """Each matrix alone, so that one that fails spoils no other."""
    found: list[tuple[Tensor, ...]] = []
    template = factorise(torch.eye(*flat.shape[1:], dtype=flat.dtype, device=flat.device).unsqueeze(0))
    for matrix in torch.split(flat, 1):
        try:
            found.append(factorise(matrix))
        except (_LINALG_ERROR, NotConverged):
            failed = torch.ones(1, dtype=torch.bool, device=flat.device)
            found.append(tuple(_with_nan(result, failed) for result in template))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _factorisation(instruction: Instruction, factorise: Factorise) -> Kernel:
    if _matrix(instruction).num_elements == 0:
        return _zeros(instruction)
    return lambda run, a: _one_or_all(_guarded(run, factorise, a))


# ---- Eigenvalues


def _range(instruction: Instruction, subset: Any, size: int) -> tuple[int, int]:
    given = subset if isinstance(subset, list) else []
    if len(given) != 2 or not all(map(is_size, given)) or not given[0] <= given[1] <= size:
        raise malformed(
            instruction, f"backend_config.subset is {subset!r}, not [first, last] within {size} eigenvalues"
        )
    return given[0], given[1]


@custom_call("flagos.eigh", lower=True, subset=None)
def _eigh(instruction: Instruction, config: Config) -> Kernel:
    triangle = "L" if config["lower"] else "U"
    size, subset = _matrix(instruction).dims[-1], config["subset"]
    first, last = (0, size) if subset is None else _range(instruction, subset, size)

    def factorise(a: Tensor) -> tuple[Tensor, ...]:
        values, vectors = torch.linalg.eigh(a, UPLO=triangle)
        return vectors[..., first:last], values[..., first:last]

    def of_triangle(run: Run, a: Tensor) -> tuple[Tensor, ...]:
        # The other triangle is not read: what it holds must not count as a failure.
        return _guarded(run, factorise, a.tril() if triangle == "L" else a.triu())

    return _zeros(instruction) if _matrix(instruction).num_elements == 0 else of_triangle


def _normalised(vectors: Tensor) -> Tensor:
    """Columns of unit length whose greatest component is real, as LAPACK's geev leaves them."""
    vectors = vectors / torch.linalg.vector_norm(vectors, dim=-2, keepdim=True)
    greatest = vectors.gather(-2, vectors.abs().argmax(dim=-2, keepdim=True))
    turned = vectors * (greatest.conj() / greatest.abs())
    return torch.where(greatest.imag == 0, vectors, turned)


def _left_eigenvectors(a: Tensor, values: Tensor) -> Tensor:
    """Columns u with uᴴ a = w uᴴ, in the order of ``values``: the eigenvectors of aᴴ, matched by eigenvalue."""
    found, vectors = torch.linalg.eig(a.mH)
    distance = (found.conj().unsqueeze(1) - values.unsqueeze(2)).abs()  # [b, value, found]
    order = torch.empty(values.shape, dtype=torch.int64, device=a.device)
    rows = torch.arange(len(a), device=a.device)
    for _ in range(values.shape[1]):
        nearest = distance.flatten(1).argmin(dim=1)
        value, match = nearest // values.shape[1], nearest % values.shape[1]
        order[rows, value] = match
        distance[rows, value, :] = torch.inf
        distance[rows, :, match] = torch.inf
    return _normalised(vectors.gather(2, order.unsqueeze(1).expand_as(vectors)))


@custom_call("flagos.eig", left=False, right=False)
def _eig(instruction: Instruction, config: Config) -> Kernel:
    left, right = config["left"], config["right"]

    def factorise(a: Tensor) -> tuple[Tensor, ...]:
        if not left and not right:
            return (torch.linalg.eigvals(a),)
        values, vectors = torch.linalg.eig(a)
        lefts = (_left_eigenvectors(a, values),) if left else ()
        return (values, *lefts, *((_normalised(vectors),) if right else ()))

    return _factorisation(instruction, factorise)


@custom_call("flagos.schur", vectors=True)
def _schur(instruction: Instruction, config: Config) -> Kernel:
    def factorise(a: Tensor) -> tuple[Tensor, ...]:
        wide = a.to(torch.complex128 if a.is_complex() else torch.float64).cpu()
        pairs = [schur(matrix.numpy()) for matrix in wide]
        results = [torch.stack([torch.from_numpy(pair[i]) for pair in pairs]) for i in range(1 + config["vectors"])]
        return tuple(result.to(a.dtype).to(a.device) for result in results)

    return _factorisation(instruction, factorise)


@custom_call("flagos.hessenberg")
def _hessenberg(instruction: Instruction, config: Config) -> Kernel:
    return _factorisation(instruction, householder.hessenberg)


@custom_call("flagos.tridiagonal", lower=True)
def _tridiagonal(instruction: Instruction, config: Config) -> Kernel:
    return _factorisation(instruction, lambda a: householder.tridiagonal(a, config["lower"]))


@custom_call("flagos.svd", full_matrices=True, compute_uv=True)
def _svd(instruction: Instruction, config: Config) -> Kernel:
    full, vectors = config["full_matrices"], config["compute_uv"]
    if prod(_matrix(instruction).dims[:-2]) == 0:
        return _zeros(instruction)

    def factorise(a: Tensor) -> tuple[Tensor, ...]:
        return torch.linalg.svd(a, full_matrices=full) if vectors else (torch.linalg.svdvals(a),)

    def singular_first(run: Run, a: Tensor) -> Tensor | tuple[Tensor, ...]:
        if not vectors:
            return _guarded(run, factorise, a)[0]
        u, s, vh = _guarded(run, factorise, a)
        return s, u, vh

    return singular_first


# ---- QR and LU


@custom_call("Qr", "flagos.geqrf", reads_config=False)
def _geqrf(instruction: Instruction, config: Config) -> Kernel:
    return _factorisation(instruction, lambda a: tuple(torch.geqrf(a)))


@custom_call("flagos.geqp3")
def _geqp3(instruction: Instruction, config: Config) -> Kernel:
    empty = _zeros(instruction)
    if _matrix(instruction).num_elements == 0:
        return empty
    return lambda run, a, jpvt: householder.pivoted_qr(a, jpvt)


@custom_call("ProductOfElementaryHouseholderReflectors", "flagos.householder_product", reads_config=False)
def _householder_product(instruction: Instruction, config: Config) -> Kernel:
    if _matrix(instruction).num_elements == 0:
        return _zeros(instruction)
    return lambda run, a, taus: torch.linalg.householder_product(a, taus)


@custom_call("flagos.ormqr", left=True, transpose=False)
def _ormqr(instruction: Instruction, config: Config) -> Kernel:
    left, transpose = config["left"], config["transpose"]

    def run(_: Run, a: Tensor, taus: Tensor, c: Tensor) -> Tensor:
        if c.numel() == 0 or taus.numel() == 0:
            return c
        return torch.ormqr(a[..., : taus.shape[-1]], taus, c, left=left, transpose=transpose)

    return run


def _composed(pivots: Tensor, first: int, size: int) -> Tensor:
    """The order [b, size] that swaps i <-> pivots[b, i], i = ``first`` and on, make of 0..size-1; in pairs, pairs of
    those and so on, as each swap by itself would be a handful of kernels."""
    batch, count = pivots.shape
    swaps = torch.arange(size, device=pivots.device).repeat(batch, count, 1)
    places = torch.arange(first, first + count, device=pivots.device).expand(batch, count).unsqueeze(2)
    others = pivots.long().unsqueeze(2)
    swaps.scatter_(2, places, others)
    swaps.scatter_(2, others, places)
    while swaps.shape[1] > 1:
        pairs = swaps.shape[1] // 2
        first_of_each, second = swaps[:, : 2 * pairs : 2], swaps[:, 1 : 2 * pairs : 2]
        swaps = torch.cat((first_of_each.gather(2, second), swaps[:, 2 * pairs :]), dim=1)
    return swaps[:, 0]


def row_order(pivots: Tensor, size: int) -> Tensor:
    """pivots s32 [..., k] -> s32 [..., size]: what swaps i <-> pivots[..., i], in order, make of 0..size-1."""
    batch, count = pivots.shape[:-1], pivots.shape[-1]
    flat = pivots.reshape(prod(batch), count)
    order = torch.arange(size, device=pivots.device).repeat(len(flat), 1)
    for first in range(0, count, _SWAPS_AT_ONCE):
        order = order.gather(1, _composed(flat[:, first : first + _SWAPS_AT_ONCE], first, size))
    return order.to(torch.int32).reshape(*batch, size)


def prepare_lu(instruction: Instruction, row_order: Callable[[Tensor, int], Tensor] = row_order) -> Kernel:
    """``row_order``: what finds the order of rows that the swaps of pivots [..., k] make of so many."""
    shape = _matrix(instruction)
    rows, rank = shape.dims[-2], min(shape.dims[-2:])
    batch = shape.dims[:-2]

    def run(_: Run, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if a.numel() == 0:
            pivots = torch.zeros((*batch, rank), dtype=torch.int32, device=a.device)
            return a, pivots, torch.arange(rows, dtype=torch.int32, device=a.device).expand(*batch, rows)
        lu, pivots, _ = torch.linalg.lu_factor_ex(a)
        pivots = pivots - 1
        return lu, pivots, row_order(pivots, rows)

    return run


@custom_call("flagos.lu")
def _lu(instruction: Instruction, config: Config) -> Kernel:
    return prepare_lu(instruction)
