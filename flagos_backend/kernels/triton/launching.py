"""Launches of Triton functions, and compiling them ahead of the first one. Called by codegen/triton and our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.kernels.triton.loading import serialize_loading


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, **flags: Any) -> None:
    """Launches ``function`` on the current stream. Where arrays are on torch's meta device, only compiles it."""
    if isinstance(arguments[0], torch.Tensor) and arguments[0].is_meta:
        compile_only(function, grid, arguments, flags)
    else:
        serialize_loading()
        function[grid](*arguments, **flags)


def compile_only(function: Any, grid: tuple[int, ...], arguments: Sequence[Any], flags: dict[str, Any]) -> None:
    """Compiles ``function`` as a launch on ``arguments`` would, which may be dtypes for arrays aligned to 16 bytes,
    and loads it on the current device."""
    serialize_loading()
    compiled = function.warmup(*arguments, grid=grid, **flags)
    # Looking it up builds the vendor's launcher, with a C compiler on some, and loads the kernel.
    _ = compiled.run
