"""Writes decompositions that LAPACK computes as the numbers of a native step, which linear_algebra.py's steps share.

Which library serves what on the host: products, solves, Cholesky, LU and QR are our own kernels', what is here is
LAPACK's where SciPy is installed, and without it a library call of PyTorch, as is every call that breaks its
convention, which that refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.codegen.cpu.bytecode import LinearAlgebraKind
from flagos_backend.codegen.cpu.lapack import lapack_is_available
from flagos_backend.codegen.cpu.lower.linear_algebra import ADJOINT, ELEMENT_TYPES, LOWER, MAX_SIZE, RIGHT_SIDE
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.config import parse_config
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, leaves

_VECTORS, _LEFT_VECTORS, _FULL_MATRICES = (1 << n for n in range(5, 8))
# LAPACK counts the elements of a matrix in 32 bits.
_MAX_ELEMENTS = (1 << 31) - 1
_REAL = {ElementType.C64: ElementType.F32, ElementType.C128: ElementType.F64}
_COMPLEX = {ElementType.F32: ElementType.C64, ElementType.F64: ElementType.C128}

_Flags = Mapping[str, bool]
_Shapes = Sequence[ArrayShape]


@dataclass(frozen=True, slots=True)
class _Decomposition:
    """``defaults``: of the keys of its configuration, all true or false. ``flags``: of the step for these that are
    true. ``expected``: of the operands' shapes and the configuration, the shapes of all operands and results as the
    convention has them (kernels/reference/CUSTOM_CALLS.md)."""

    kind: LinearAlgebraKind
    expected: Callable[[_Shapes, _Flags], tuple[_Shapes, _Shapes]]
    defaults: _Flags
    flags: Mapping[str, int]


def _like(shape: ArrayShape, *dims: int, element_type: ElementType | None = None) -> ArrayShape:
    """Of the batch of ``shape``."""
    return ArrayShape(element_type or shape.element_type, (*shape.dims[:-2], *dims))


def _real(shape: ArrayShape, *dims: int) -> ArrayShape:
    return _like(shape, *dims, element_type=_REAL.get(shape.element_type, shape.element_type))


def _complex(shape: ArrayShape, *dims: int) -> ArrayShape:
    return _like(shape, *dims, element_type=_COMPLEX.get(shape.element_type, shape.element_type))


def _square(shape: ArrayShape) -> ArrayShape:
    return _like(shape, shape.dims[-1], shape.dims[-1])


def _eigh(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a = _square(operands[0])
    return [a], [a, _real(a, a.dims[-1])]


def _svd(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a = operands[0]
    m, n = a.dims[-2:]
    rank = min(m, n)
    left, right = (m, n) if flags["full_matrices"] else (rank, rank)
    vectors = [_like(a, m, left), _like(a, right, n)] if flags["compute_uv"] else []
    return [a], [_real(a, rank), *vectors]


def _eig(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a = _square(operands[0])
    n = a.dims[-1]
    return [a], [_complex(a, n), *[_complex(a, n, n)] * (flags["left"] + flags["right"])]


def _schur(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a = _square(operands[0])
    return [a], [a] * (1 + flags["vectors"])


def _hessenberg(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a = _square(operands[0])
    return [a], [a, _like(a, a.dims[-1] - 1)]


def _tridiagonal(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a = _square(operands[0])
    n = a.dims[-1]
    return [a], [a, _real(a, n), _real(a, n - 1), _like(a, n - 1)]


def _pivoted_qr(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a = operands[0]
    order = _like(a, a.dims[-1], element_type=ElementType.S32)
    return [a, order], [a, order, _like(a, min(a.dims[-2:]))]


def _apply_reflectors(operands: _Shapes, flags: _Flags) -> tuple[_Shapes, _Shapes]:
    a, c = operands[0], operands[-1]
    rows, columns = c.dims[-2:]
    k = a.dims[-1]
    return [_like(c, rows if flags["left"] else columns, k), _like(c, k), c], [c]


_Kind = LinearAlgebraKind
_DECOMPOSITIONS = {
    "flagos.eigh": _Decomposition(_Kind.EIGH, _eigh, {"lower": True}, {"lower": LOWER}),
    "flagos.svd": _Decomposition(
        _Kind.SVD,
        _svd,
        {"full_matrices": True, "compute_uv": True},
        {"full_matrices": _FULL_MATRICES, "compute_uv": _VECTORS},
    ),
    "flagos.eig": _Decomposition(
        _Kind.EIG, _eig, {"left": False, "right": False}, {"left": _LEFT_VECTORS, "right": _VECTORS}
    ),
    "flagos.schur": _Decomposition(_Kind.SCHUR, _schur, {"vectors": True}, {"vectors": _VECTORS}),
    "flagos.hessenberg": _Decomposition(_Kind.HESSENBERG, _hessenberg, {}, {}),
    "flagos.tridiagonal": _Decomposition(_Kind.TRIDIAGONAL, _tridiagonal, {"lower": True}, {"lower": LOWER}),
    "flagos.geqp3": _Decomposition(_Kind.PIVOTED_QR, _pivoted_qr, {}, {}),
    "flagos.ormqr": _Decomposition(
        _Kind.APPLY_REFLECTORS, _apply_reflectors, {"left": True, "transpose": False}, {"transpose": ADJOINT}
    ),
}


def decomposition_numbers(item: Instruction) -> tuple[int, ...] | None:
    """The numbers of ``item``; None for what native code does not take: another call, a part of the eigenvalues,
    nothing to compute, what breaks its convention, or any where there is no LAPACK."""
    if item.opcode is not Opcode.CUSTOM_CALL:
        return None
    decomposition = _DECOMPOSITIONS.get(item.attributes_as(CustomCallAttributes).target)
    if decomposition is None:
        return None
    flags = _configuration(item, decomposition.defaults)
    if flags is None or not _follows(item, decomposition, flags):
        return None
    operands, results = _arrays(item)
    matrix, last = operands[0], operands[-1] if decomposition.kind is _Kind.APPLY_REFLECTORS else operands[0]
    sizes = (prod(last.dims[:-2]), *last.dims[-2:])
    empty = any(shape.num_elements == 0 for shape in (*operands, *results))
    if empty or max(sizes) > MAX_SIZE or sizes[1] * sizes[2] > _MAX_ELEMENTS or not lapack_is_available():
        return None
    reflectors = 0
    number = sum(bit for key, bit in decomposition.flags.items() if flags[key])
    if decomposition.kind is _Kind.APPLY_REFLECTORS:
        rows, reflectors = matrix.dims[-2:]
        if reflectors > rows:
            return None
        number |= 0 if flags["left"] else RIGHT_SIDE
    return (decomposition.kind, ELEMENT_TYPES[matrix.element_type], *sizes, reflectors, number)


def _arrays(item: Instruction) -> tuple[_Shapes, _Shapes]:
    return [leaf for operand in item.operands for leaf in leaves(operand.shape)], list(leaves(item.shape))


def _configuration(item: Instruction, defaults: _Flags) -> _Flags | None:
    text = item.attributes_as(CustomCallAttributes).backend_config
    try:
        given = parse_config(text) if text else {}
    except ValueError:
        return None
    known = isinstance(given, dict) and all(key in defaults and isinstance(given[key], bool) for key in given)
    return {**defaults, **given} if known else None


def _follows(item: Instruction, decomposition: _Decomposition, flags: _Flags) -> bool:
    """Whether operands and results are as the convention has them."""
    operands, results = _arrays(item)
    if not operands or any(shape.rank < 2 for shape in (operands[0], operands[-1])[: 1 + (len(operands) > 2)]):
        return False
    if operands[0].element_type not in ELEMENT_TYPES or operands[0].num_elements == 0:
        return False
    expected = decomposition.expected(operands, flags)
    return all(
        [(shape.element_type, shape.dims) for shape in actual] == [(shape.element_type, shape.dims) for shape in wanted]
        for actual, wanted in zip((operands, results), expected, strict=True)
    )
