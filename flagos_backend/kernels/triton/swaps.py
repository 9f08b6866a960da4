"""The order of rows that the swaps of LU factorisations make, as one launch (swaps_kernels.py)."""

from __future__ import annotations

from math import prod

from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

# A place takes as many steps as there are swaps: one to a thread, and programs for all multiprocessors.
_MAX_BLOCK, _LANES = 128, 32


def row_order(pivots: Tensor, rows: int) -> Tensor:
    """pivots s32 [..., k], rows to swap with 0, 1, ..., k-1 -> s32 [..., rows]: which row comes to each place."""
    from flagos_backend.kernels.triton import swaps_kernels as kernels

    batch, count = pivots.shape[:-1], pivots.shape[-1]
    order = torch.empty((*batch, rows), dtype=torch.int32, device=pivots.device)
    if order.numel():
        block = min(_MAX_BLOCK, 1 << (rows - 1).bit_length())
        grid = (prod(batch), -(-rows // block))
        warps = max(1, block // _LANES)
        launch(kernels.compose_swaps, grid, pivots.contiguous(), order, count, rows, BLOCK=block, num_warps=warps)
    return order
