"""Loads what most programs on an accelerator want beside the compilation of the first one: tables of kernels, Triton
and the vendor's BLAS. That takes two tenths of a second, and half a second or more for Triton. The processes that
compile for this one get ready meanwhile. Called by the bridge."""

from __future__ import annotations

import logging
import threading

from flagos_backend.devices.accelerator import Accelerator
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.triton import compile_processes, launching
from flagos_backend.kernels.triton.loading import prepare_triton
from flagos_backend.process.torch_loading import torch

logger = logging.getLogger("flagos_backend")

_DTYPES = (torch.bfloat16, torch.float32)
_begun: set[torch.device] = set()


def load_beside(accelerator: Accelerator) -> None:
    """Once for each device. The process ends after the thread, under which what it loads must not go away."""
    # An interpreter that ends still runs exit handlers, but starts no threads.
    if accelerator.device in _begun or not threading.main_thread().is_alive():
        return
    _begun.add(accelerator.device)
    threading.Thread(target=_load, args=(accelerator,), name="flagos-load").start()


def _load(accelerator: Accelerator) -> None:
    try:
        is_device = accelerator.device.type != "cpu"
        compiles = is_device and not launching.unavailable(accelerator.target)
        target = accelerator.target.triton_target if compiles else None
        if target is not None:
            compile_processes.start(target)
        implementations_of("dot")
        if is_device:
            from flagos_backend.kernels.vendor.dot import load_library

            with accelerator.guard():
                if compiles:
                    prepare_triton()
                for dtype in _DTYPES:
                    load_library(accelerator.device.type, dtype)
    except Exception as error:  # what needs them says what is wrong, whatever that is
        logger.debug("%s: not loaded ahead: %s", accelerator.device, error)
