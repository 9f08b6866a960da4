"""Generated Triton kernels: on this machine's accelerator if it has one, else through Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 256 elements are walked."""
    from flagos_backend.codegen.triton import tiling

    for limit in (
        "MAX_ROW",
        "MAX_LONG_ROW",
        "_TILE",
        "_ROW_STEP",
        "_REDUCTION_STEP",
        "_LONG_ROW_STEP",
        "_HOLDING_STEP",
    ):
        monkeypatch.setattr(tiling, limit, 256)
