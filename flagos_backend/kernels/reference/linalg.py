"""Cholesky and triangular-solve. Only the triangle that the attributes name is read."""

from __future__ import annotations

from flagos_backend.ir.attributes import CholeskyAttributes, TriangularSolveAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode, TransposeA
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.batch_norm import widened
from flagos_backend.kernels.reference.registry import Kernel, Run, kernel
from flagos_backend.process.torch_loading import Tensor, torch


@kernel(Opcode.CHOLESKY)
def prepare_cholesky(instruction: Instruction) -> Kernel:
    """a [..., n, n] -> its factor, zeros in the other triangle. A matrix that is not positive definite gives NaN."""
    upper = not instruction.attributes_as(CholeskyAttributes).lower

    def run(_: Run, a: Tensor) -> Tensor:
        if a.numel() == 0:
            return a
        factor, info = torch.linalg.cholesky_ex(widened(a), upper=upper)
        diagonal = factor.diagonal(dim1=-2, dim2=-1).isfinite().all(dim=-1)
        failed = (info != 0) | ~diagonal
        result: Tensor = factor.masked_fill(failed[..., None, None], torch.nan).to(a.dtype)
        return result

    return run


@kernel(Opcode.TRIANGULAR_SOLVE)
def prepare_triangular_solve(instruction: Instruction) -> Kernel:
    """Solves op(a) x = b, or x op(a) = b, for a [..., n, n]. A zero on the diagonal gives infinities and NaN."""
    attributes = instruction.attributes_as(TriangularSolveAttributes)
    shape = instruction.shape
    assert isinstance(shape, ArrayShape)
    transposed = attributes.transpose_a is not TransposeA.NO_TRANSPOSE
    adjoint = attributes.transpose_a is TransposeA.ADJOINT
    upper = attributes.lower is transposed
    left, unit = attributes.left_side, attributes.unit_diagonal

    def run(_: Run, a: Tensor, b: Tensor) -> Tensor:
        if b.numel() == 0:
            return b
        matrix = widened(a)
        if transposed:
            matrix = matrix.mH if adjoint else matrix.mT
        solution: Tensor = torch.linalg.solve_triangular(matrix, widened(b), upper=upper, left=left, unitriangular=unit)
        return solution.to(b.dtype)

    return run
