"""What is done to Triton before its first launch. Kernels are loaded by one thread at a time: Triton itself assumes
that there is only one. NVIDIA's devices get one launcher for all signatures, and the interpreter what it lacks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import threading
from typing import Any

logger = logging.getLogger("flagos_backend")

_NVIDIA = "triton.backends.nvidia.driver"


@functools.cache
def prepare_triton() -> None:
    """Whatever launches kernels calls this first; it covers all of the process, as FlagGems' and users' launches load
    too."""
    from triton.compiler.compiler import CompiledKernel

    serialize(CompiledKernel)
    logger.debug("launchers of Triton's kernels: %s", launchers())
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("flagos_backend.kernels.triton.interpreter_gaps").close()


def launchers() -> str:
    """Whose launchers NVIDIA's devices get in this process, and why, from now on."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(_NVIDIA) is None:
        return "none: Triton has no backend of NVIDIA's"
    from flagos_backend.kernels.triton import cuda_launcher

    reason = cuda_launcher.install(importlib.import_module(_NVIDIA))
    return f"Triton's: {reason}" if reason else "ours, without a C compiler"


def serialize(compiled_kernel: type[Any]) -> None:
    """Makes loading safe among threads for a class with the loading of Triton's CompiledKernel, in two respects.

    A launcher is a module of C, and all of them have one name: importing one that the process has met before fills and
    returns the module that holds the name, which another thread may be about to take its own launcher from. And a
    kernel has its launcher before it is loaded, so that a second thread would launch nothing.
    """
    load = compiled_kernel._init_handles
    lock = threading.RLock()  # what is called while a kernel loads may launch another one

    @functools.wraps(load)
    def load_alone(kernel: Any) -> None:
        with lock:
            load(kernel)

    def run(kernel: Any) -> Any:
        if kernel.module is None:
            kernel._init_handles()
        return kernel._run

    compiled_kernel._init_handles = load_alone
    if isinstance(compiled_kernel.__dict__.get("run"), property):  # Triton up to 3.2 loads whenever it is asked for it
        compiled_kernel.run = property(run)
