"""Which kernels an accelerator runs for a computation: fusion within the limits of this emitter."""

from __future__ import annotations

import functools

from flagos_backend.codegen.triton.cost import is_over_at_once
from flagos_backend.codegen.triton.tiling import choose, only_reductions, supports
from flagos_backend.devices.target import Target
from flagos_backend.fusion.channels import with_unrolled_channels
from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.merge import merge
from flagos_backend.fusion.policy import ACCELERATOR
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.region import Region


def schedule(computation: FlatComputation, target: Target) -> Schedule:
    """Regions, each for one RegionKernel, and library calls."""
    unrolled = with_unrolled_channels(computation, fuse(computation, ACCELERATOR))
    return merge(computation, unrolled, functools.partial(_accepts, target), expensive_launches=True)


def _accepts(target: Target, region: Region) -> bool:
    """Whether there is a tiling, and it keeps the device as busy as its parts would, or is over before they had
    started: reductions that other points wait for cannot be split."""
    if not supports(region):
        return False
    if not region.reductions or only_reductions(region):
        return True
    programs = choose(region, target).grid
    return programs >= target.multiprocessors or is_over_at_once(region, programs, target)
