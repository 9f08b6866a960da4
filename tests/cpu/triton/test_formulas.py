"""What generated kernels import, where no program tests it on this machine."""

import numpy as np
import torch
import triton
import triton.language as tl

from flagos_backend.codegen.triton import formulas as fm

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


@triton.jit
def compare(others, out):
    position, row = tl.arange(0, 256)[None, :], tl.arange(0, 64)[:, None]
    found = fm.is_at(position - 3, tl.load(others + row))
    tl.store(out + (row * 256 + position), found)


def test_positions_are_compared_by_eights(rng: np.random.Generator) -> None:
    others = rng.integers(-3, 256, 64, dtype=np.int32)
    others[:6] = -(1 << 31), (1 << 31) - 1, -1, -9, 0, 300
    found = torch.zeros(64, 256, dtype=torch.int8, device=DEVICE)
    compare[(1,)](torch.from_numpy(others).to(DEVICE), found)
    np.testing.assert_array_equal(found.cpu().numpy(), np.arange(-3, 253) == others[:, None])
