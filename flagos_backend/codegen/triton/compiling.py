"""Gets the kernels of a program ready, before its first run needs them one after the other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping

from flagos_backend.codegen.triton.kernel import RegionKernel
from flagos_backend.kernels.triton import compile_processes
from flagos_backend.process.side_by_side import side_by_side
from flagos_backend.process.torch_loading import torch

logger = logging.getLogger("flagos_backend")

_Task = tuple[str, Callable[[], object]]


def warm_up_together(
    kernels: Iterable[RegionKernel], warm_ups: Mapping[str, Callable[[], object]], device: torch.device
) -> None:
    """Returns when all ``kernels`` are compiled for ``device``, and ``warm_ups``, by what they are of, are done. What
    fails is left to the first run, which reports it. What takes longest begins first: kernels of libraries, then those
    of the longest sources."""
    launches = {kernel.compiled_from(launch): (kernel, launch) for kernel in kernels for launch in kernel.launches}
    ordered = sorted(launches.values(), key=lambda each: len(each[0].source), reverse=True)
    tasks: list[_Task] = [*warm_ups.items()]
    tasks += [(kernel.text, functools.partial(kernel.compile_for, launch)) for kernel, launch in ordered]
    with compile_processes.many(len(tasks)):
        reasons = side_by_side(_reason_of_failure, tasks, device)
    for (text, _), reason in zip(tasks, reasons, strict=True):
        if reason:
            logger.debug("%s is compiled when it is needed: %s", text, reason)


def _reason_of_failure(task: _Task) -> str:
    try:
        task[1]()
    except Exception as error:  # a vendor's compiler raises what it likes
        return str(error)
    return ""
