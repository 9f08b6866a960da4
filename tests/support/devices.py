"""Runs one program on several devices of this process, one thread each, as the bridge does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from flagos_backend.collectives import InProcessCommunicator
from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.errors import CollectiveAborted
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import leaves
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from support.against_xla import from_storage, hlo_of_text, to_storage


def on_each(count: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(participant)`` on ``count`` threads at once; results or exceptions, by participant."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, participant) for participant in range(count)]
        return [future.exception() or future.result() for future in futures]


def run_on_devices(
    text: str, arguments: Sequence[Sequence[np.ndarray]], replicas: int = 1, partitions: int = 1
) -> list[list[np.ndarray]]:
    """The program's results on every device; ``arguments`` and results by flattened id."""
    module = import_module(hlo_of_text(text), num_replicas=replicas, num_partitions=partitions)
    return run_module_on_devices(module, arguments, replicas, partitions)


def transformed_on_devices(
    transform: Callable[[Module], Module],
    text: str,
    rng: np.random.Generator,
    replicas: int = 1,
    partitions: int = 1,
) -> Module:
    """The module that a pass makes of the program. On every device it gives the same results, bit for bit, of random
    parameters of F32."""
    before = import_module(hlo_of_text(text), num_replicas=replicas, num_partitions=partitions)
    after = transform(before)
    verify(after)
    shapes = [leaf.dims for parameter in before.entry.parameters for leaf in leaves(parameter.shape)]
    arguments = [
        [rng.standard_normal(dims).astype(np.float32) for dims in shapes] for _ in range(replicas * partitions)
    ]
    ours, theirs = (run_module_on_devices(module, arguments, replicas, partitions) for module in (after, before))
    for mine, expected in zip(ours, theirs, strict=True):
        for a, b in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    return after


def run_module_on_devices(
    module: Module, arguments: Sequence[Sequence[np.ndarray]], replicas: int = 1, partitions: int = 1
) -> list[list[np.ndarray]]:
    """The same of a module."""
    plan = build_plan(module.entry)
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]
    communicator = InProcessCommunicator(timeout=60)

    def work(device: int) -> list[np.ndarray]:
        run = Run(device, device // partitions, device % partitions, replicas, partitions, communicator=communicator)
        try:
            with torch.inference_mode():
                tensors = [to_storage(a, s) for a, s in zip(arguments[device], shapes, strict=True)]
                results = plan.run(run, tensors)
        except Exception as error:
            communicator.abort(13, str(error))
            raise
        return [from_storage(t, s) for t, s in zip(results, plan.result_shapes, strict=True)]

    outcomes = on_each(replicas * partitions, work)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:  # whoever came after it hears that it is over
        raise next((error for error in errors if not isinstance(error, CollectiveAborted)), errors[0])
    return outcomes
