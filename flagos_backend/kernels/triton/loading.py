"""What is done to Triton once, before its first launch. Kernels are loaded by one thread at a time: Triton itself
assumes that there is only one. NVIDIA's devices get one launcher for all signatures, the interpreter what it lacks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import threading
from typing import Any

from flagos_backend.kernels.triton import compile_processes

logger = logging.getLogger("flagos_backend")

_NVIDIA = "triton.backends.nvidia.driver"
_lock = threading.RLock()


@functools.cache
def prepare_triton() -> None:
    """Whatever launches kernels calls this first; it covers all of the process, as FlagGems' and users' launches load
    too. Threads that come together wait for one of them, which does it."""
    with _lock:
        _prepare()


@functools.cache
def _prepare() -> None:
    from triton.compiler.compiler import CompiledKernel

    serialize(CompiledKernel)
    logger.debug("launchers of Triton's kernels: %s", launchers())
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("flagos_backend.kernels.triton.interpreter_gaps").close()
        return
    compile_processes.install(importlib.import_module("triton.compiler"))
    for what, find in (("driver", _driver), ("key", _key)):
        try:
            find()
        except Exception as error:  # a launch says what is wrong, whatever that is
            logger.debug("Triton's %s is not there ahead of the first kernel: %s", what, error)


def _driver() -> None:
    """Opened by its first use, by each of the threads that compile the first kernels: on NVIDIA's devices a C compiler
    runs for it where Triton's cache is empty."""
    from triton.runtime import driver

    driver.active.get_current_target()


def _key() -> None:
    """What all of Triton's cache is keyed by: a digest of its library, half a gigabyte, which each thread reads."""
    importlib.import_module("triton.runtime.cache").triton_key()


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
