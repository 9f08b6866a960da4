"""Cuts a nest that reads concatenates, pads or rolls where they are put together, so that each box of points reads one
array by plain strides. Between fusion_policy.py, which asks for what it pays, and the transforms of plain loads."""

from __future__ import annotations

from collections.abc import Sequence

from flagos_backend.codegen.cpu.steps import NotNativeError
from flagos_backend.loop_ir.boxes import boxes
from flagos_backend.loop_ir.region import Region


def split_at_seams(region: Region) -> Sequence[Region]:
    """Regions without guards that together store what ``region`` does; itself where it chooses nothing.

    Raises:
        NotNativeError: no boxes are free of choices, which fusion never asks for.
    """
    found = boxes(region)
    if found is None:
        raise NotNativeError(f"a nest of {region.stores[0].target.name} whose choices no boxes are free of")
    return found
