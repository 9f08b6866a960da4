"""Small library calls run on the thread that makes them alone. PyTorch's other threads sleep between calls
(process/torch_loading.py), and waking them takes longer than such a call. ir/library_calls.py says which these are."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from flagos_backend.kernels.reference.registry import Kernel, Run, Value
from flagos_backend.process.torch_loading import torch


@functools.cache
def _switches() -> tuple[Callable[[], int], Callable[[int], None], Callable[[int], int]] | None:
    """How many threads OpenMP gives this thread; what sets that; and the same of MKL, which returns what it was. None
    where PyTorch's library has no such functions."""
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        known, choose = library.omp_get_max_threads, library.omp_set_num_threads
    except AttributeError:
        return None
    choose.restype = None
    return known, choose, getattr(library, "MKL_Set_Num_Threads_Local", lambda threads: 0)


def alone(kernel: Kernel) -> Kernel:
    """``kernel`` with one thread of PyTorch's, of which the calling thread may have more otherwise."""

    def run_alone(run: Run, *operands: Value) -> Value:
        switches = _switches()
        result: Value
        if switches is None or (threads := switches[0]()) == 1:
            result = kernel(run, *operands)
            return result
        _, choose, choose_mkl = switches
        choose(1)
        before = choose_mkl(1)
        try:
            result = kernel(run, *operands)
            return result
        finally:
            choose(threads)
            choose_mkl(before)

    return run_alone
