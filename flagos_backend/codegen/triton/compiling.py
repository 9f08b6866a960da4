"""Gets the kernels of a program ready, before its first run needs them one after the other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from flagos_backend.codegen.triton.kernel import RegionKernel
from flagos_backend.kernels.triton import compile_processes
from flagos_backend.process import progress
from flagos_backend.process.side_by_side import side_by_side
from flagos_backend.process.torch_loading import torch

logger = logging.getLogger("flagos_backend")

_Task = tuple[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """``measure`` takes one of several kernels. It waits for those of ``kernels``, and of ``warm_ups`` by name."""

    measure: Callable[[], object]
    kernels: Sequence[RegionKernel] = ()
    warm_ups: Collection[str] = ()

    @property
    def awaited(self) -> frozenset[Hashable]:
        launches = {kernel.compiled_from(launch) for kernel in self.kernels for launch in kernel.launches}
        return frozenset((*launches, *self.warm_ups))


def warm_up_together(
    kernels: Iterable[RegionKernel],
    warm_ups: Mapping[str, Callable[[], object]],
    device: torch.device,
    measurements: Iterable[Measurement] = (),
) -> None:
    """Returns when all ``kernels`` are compiled for ``device``, and ``warm_ups``, by what they are of, are done. What
    takes longest begins first: kernels of libraries, then those of the longest sources. Measurements are made in this
    thread, each when what it waits for is there, while the rest compiles. What fails is left to who needs it, who
    reports it."""
    launches = {kernel.compiled_from(launch): (kernel, launch) for kernel in kernels for launch in kernel.launches}
    ordered = sorted(launches.items(), key=lambda each: len(each[1][0].source), reverse=True)
    keys: list[Hashable] = [*warm_ups, *(key for key, _ in ordered)]
    tasks: list[_Task] = [*warm_ups.items()]
    tasks += [(kernel.text, functools.partial(kernel.compile_for, launch)) for _, (kernel, launch) in ordered]
    missing = [(measurement, set(measurement.awaited)) for measurement in measurements]

    def measure_what_is_there(number: int) -> None:
        for measurement, awaited in [*missing]:
            awaited.discard(keys[number])
            if not awaited:
                missing.remove((measurement, awaited))
                _measure(measurement)

    with compile_processes.many(len(tasks)):
        reasons = side_by_side(_reason_of_failure, tasks, device, measure_what_is_there)
    for (text, _), reason in zip(tasks, reasons, strict=True):
        if reason:
            logger.debug("%s is compiled when it is needed: %s", text, reason)


def _measure(measurement: Measurement) -> None:
    try:
        with progress.hidden():
            measurement.measure()
    except Exception as error:  # a vendor's kernels raise what they like
        logger.debug("measured when it is needed: %s", error)


def _reason_of_failure(task: _Task) -> str:
    try:
        task[1]()
    except Exception as error:  # a vendor's compiler raises what it likes
        return str(error)
    return ""
