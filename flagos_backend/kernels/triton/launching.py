"""Launches of Triton functions, and compiling them ahead of the first one. Called by codegen/triton and our kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from operator import mul
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.kernels.triton import compile_processes
from flagos_backend.kernels.triton.loading import prepare_triton
from flagos_backend.process.torch_loading import Tensor


def unavailable(target: Target) -> str:
    """Why kernels cannot be launched on ``target``, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if target.is_host or (target.device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        return "Triton has no compiler for the host"
    return ""


def exceeds_32_bits(*arrays: Tensor, since: int = 0) -> bool:
    """Whether places in one of the arrays, counted in elements along its dimensions from ``since`` on, take more than
    32 bits: kernels compute with 64, which costs registers, only where they do."""
    return any(sum(map(mul, array.shape[since:], array.stride()[since:])) >= 1 << 31 for array in arrays)


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, **flags: Any) -> None:
    """Launches ``function`` on the current stream. Where arrays are on torch's meta device, only compiles it."""
    if isinstance(arguments[0], Tensor) and arguments[0].is_meta:
        compile_only(function, grid, arguments, flags)
    else:
        prepare_triton()
        function[grid](*arguments, **flags)


def compile_only(function: Any, grid: tuple[int, ...], arguments: Sequence[Any], flags: dict[str, Any]) -> None:
    """Compiles ``function`` as a launch on ``arguments`` would, which may be dtypes for arrays aligned to 16 bytes,
    and loads it on the current device."""
    prepare_triton()
    with compile_processes.ahead():
        compiled = function.warmup(*arguments, grid=grid, **flags)
    # Looking it up builds the vendor's launcher, with a C compiler on some, and loads the kernel.
    _ = compiled.run
