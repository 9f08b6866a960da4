"""A matrix of bytes laid out by columns, as one launch (byte_transposes_kernels.py): ATen's copies of such are slow."""

from __future__ import annotations

from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

_BLOCK, _WARPS = 64, 4


def by_columns(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """[m, n] -> [rows, columns] by columns, zeros beyond the first m and n; as it is if it lies so."""
    from flagos_backend.kernels.triton import byte_transposes_kernels as kernels

    if matrix.stride(0) == 1 and matrix.shape == (rows, columns):
        return matrix
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    transposed = torch.empty((columns, rows), dtype=matrix.dtype, device=matrix.device)
    grid = (-(-rows // _BLOCK), -(-columns // _BLOCK))
    sizes = (*matrix.shape, matrix.stride(0), rows, columns)
    launch(kernels.transpose, grid, matrix, transposed, *sizes, BLOCK=_BLOCK, num_warps=_WARPS)
    return transposed.mT
