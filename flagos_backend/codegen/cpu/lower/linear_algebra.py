"""Writes factorisations and triangular solves as the numbers of a native step: their kind, type, sizes and flags.

Used by emitter.py; native/cpu/parse.cc reads the numbers.
"""

from __future__ import annotations

from math import prod
from typing import Final

from flagos_backend.codegen.cpu.bytecode import LinearAlgebraKind
from flagos_backend.ir.attributes import CholeskyAttributes, CustomCallAttributes, TriangularSolveAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode, TransposeA
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import dims_of

# The flags of LinearAlgebra of native/cpu/linear_algebra.h.
LOWER, _UNIT_DIAGONAL, RIGHT_SIDE, _TRANSPOSE, ADJOINT = (1 << n for n in range(5))
ELEMENT_TYPES: Final = {ElementType.F32: 0, ElementType.F64: 1, ElementType.C64: 2, ElementType.C128: 3}
_TARGETS = {
    "flagos.lu": LinearAlgebraKind.LU,
    **dict.fromkeys(("Qr", "flagos.geqrf"), LinearAlgebraKind.QR),
    **dict.fromkeys(
        ("ProductOfElementaryHouseholderReflectors", "flagos.householder_product"), LinearAlgebraKind.REFLECTORS
    ),
}
# The native step runs each QR on one thread: a larger one is for the library and its threads.
_MAX_QR = 1 << 24
MAX_SIZE = (1 << 31) // 64 - 1


def linear_algebra_numbers(item: Instruction) -> tuple[int, ...] | None:
    """The numbers of ``item``; None for what native code does not take: another operation or element type, or nothing
    to compute."""
    kind = _kind(item)
    shape = item.operands[0].shape if item.operands else None
    if kind is None or not isinstance(shape, ArrayShape) or shape.rank < 2:
        return None
    element_type = ELEMENT_TYPES.get(shape.element_type)
    dims = dims_of(item) if kind == LinearAlgebraKind.TRIANGULAR_SOLVE else shape.dims
    rows, columns = dims[-2:]
    sizes = (prod(dims[:-2]), rows, columns)
    if element_type is None or 0 in dims or max(sizes) > MAX_SIZE:
        return None
    reflectors = dims_of(item.operands[1])[-1] if kind == LinearAlgebraKind.REFLECTORS else 0
    if kind in (LinearAlgebraKind.QR, LinearAlgebraKind.REFLECTORS) and rows * columns * min(rows, columns) > _MAX_QR:
        return None
    if kind == LinearAlgebraKind.REFLECTORS and not 0 < reflectors <= columns <= rows:
        return None
    return (kind, element_type, *sizes, reflectors, _flags(item))


def _kind(item: Instruction) -> int | None:
    if item.opcode is Opcode.CUSTOM_CALL:
        return _TARGETS.get(item.attributes_as(CustomCallAttributes).target)
    return {
        Opcode.CHOLESKY: LinearAlgebraKind.CHOLESKY,
        Opcode.TRIANGULAR_SOLVE: LinearAlgebraKind.TRIANGULAR_SOLVE,
    }.get(item.opcode)


def _flags(item: Instruction) -> int:
    attributes = item.attributes
    if isinstance(attributes, CholeskyAttributes):
        return LOWER if attributes.lower else 0
    if not isinstance(attributes, TriangularSolveAttributes):
        return 0
    transpose = {TransposeA.TRANSPOSE: _TRANSPOSE, TransposeA.ADJOINT: ADJOINT}.get(attributes.transpose_a, 0)
    right = 0 if attributes.left_side else RIGHT_SIDE
    unit = _UNIT_DIAGONAL if attributes.unit_diagonal else 0
    return transpose | right | unit | (LOWER if attributes.lower else 0)
