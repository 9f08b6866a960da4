"""Custom calls for products with sparse matrices in CSR and COO form, and the CSR solve."""

from __future__ import annotations

from flagos_backend.ir.config import is_size
from flagos_backend.ir.hlo import Instruction
from flagos_backend.kernels.reference.custom_calls import REQUIRED, Config, custom_call, malformed
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.process.torch_loading import Tensor, torch


def csr_rows(indptr: Tensor, count: int) -> Tensor:
    """The row of each of ``count`` entries; entries that no row holds get the number of rows."""
    entries = torch.arange(count, device=indptr.device)
    return torch.searchsorted(indptr.long(), entries, right=True) - 1


def multiply(data: Tensor, row: Tensor, col: Tensor, x: Tensor, shape: tuple[int, int], transpose: bool) -> Tensor:
    """The sparse matrix of ``shape`` times x [c] or [c, k]. Entries out of bounds are dropped, duplicates add up."""
    inside = (row >= 0) & (row < shape[0]) & (col >= 0) & (col < shape[1])
    to, source = (col, row) if transpose else (row, col)
    to, source, data = to[inside].long(), source[inside].long(), data[inside]
    result = x.new_zeros((shape[1] if transpose else shape[0], *x.shape[1:]))
    if x.numel() == 0 or data.numel() == 0:
        return result
    products = data.reshape(-1, *[1] * (x.dim() - 1)) * x.index_select(0, source)
    return result.scatter_add_(0, to.reshape(-1, *[1] * (x.dim() - 1)).expand_as(products), products)


def _shape(instruction: Instruction, config: Config) -> tuple[int, int]:
    shape = config["shape"]
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(is_size, shape)):
        raise malformed(instruction, f"backend_config.shape is {shape!r}, not [rows, columns]")
    return shape[0], shape[1]


@custom_call("flagos.csr_spmv", "flagos.csr_spmm", shape=REQUIRED, transpose=False)
def _csr(instruction: Instruction, config: Config) -> Kernel:
    shape, transpose = _shape(instruction, config), config["transpose"]

    def run(_: Run, data: Tensor, indices: Tensor, indptr: Tensor, x: Tensor) -> Tensor:
        return multiply(data, csr_rows(indptr, len(data)), indices, x, shape, transpose)

    return run


@custom_call("flagos.coo_spmv", "flagos.coo_spmm", shape=REQUIRED, transpose=False)
def _coo(instruction: Instruction, config: Config) -> Kernel:
    shape, transpose = _shape(instruction, config), config["transpose"]

    def run(_: Run, data: Tensor, row: Tensor, col: Tensor, x: Tensor) -> Tensor:
        return multiply(data, row, col, x, shape, transpose)

    return run


@custom_call("flagos.spsolve")
def _spsolve(instruction: Instruction, config: Config) -> Kernel:
    """Solves through the dense matrix. A singular one gives NaN."""

    def run(_: Run, data: Tensor, indices: Tensor, indptr: Tensor, b: Tensor) -> Tensor:
        size = len(b)
        if size == 0:
            return b
        identity = torch.eye(size, dtype=b.dtype, device=b.device)
        dense = multiply(data, csr_rows(indptr, len(data)), indices, identity, (size, size), transpose=False)
        solution, info = torch.linalg.solve_ex(dense, b)
        return torch.where(info == 0, solution, torch.nan)

    return run
