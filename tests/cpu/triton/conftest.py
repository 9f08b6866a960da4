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

    for limit in ("MAX_ROW", "MAX_LONG_ROW", "_TILE", "_ROW_STEP", "_FOLD_STEP", "_LONG_ROW_STEP", "_HOLDING_STEP"):
        monkeypatch.setattr(tiling, limit, 256)


@pytest.fixture
def spread_rows(short_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 256 elements are held by up to eight multiprocessors each."""
    from flagos_backend.codegen.triton import RegionKernel, prepare, tiling
    from flagos_backend.devices.target import Target
    from flagos_backend.fusion.region import Region
    from flagos_backend.kernels.triton import launching
    from support import kernels

    if torch.accelerator.is_available():
        if kernels.target().most_in_cluster == 1:
            pytest.skip("multiprocessors of this accelerator do not read each other's memory")
        if not launching.folds_in_clusters():
            pytest.skip("Triton folds over several multiprocessors from version 3.8 on")

    def prepare_spread(region: Region, target: Target) -> RegionKernel:
        way = tiling.Walk.SPREAD if tiling.Walk.SPREAD in tiling.walks(region, target) else tiling.Walk.ALONE
        return prepare(region, target, way)

    monkeypatch.setattr(Target, "most_in_cluster", 8)
    monkeypatch.setattr(kernels, "prepare", prepare_spread)
