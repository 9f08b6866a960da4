"""Kernels of regions that may be tiled in several ways, of which the chip says which is faster. Between kernel.py and
whoever runs kernels on a device."""

from __future__ import annotations

from flagos_backend.codegen.triton.kernel import RegionKernel, array_of, prepare
from flagos_backend.codegen.triton.tiling import walks
from flagos_backend.devices.target import Target
from flagos_backend.ir.types import TupleShape
from flagos_backend.kernels import tuning
from flagos_backend.kernels.policy import Policy
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.loop_ir.region import Region
from flagos_backend.torch_loading import torch


def prepare_fastest(region: Region, target: Target, *, excess_precision: bool = False) -> RegionKernel:
    """As ``prepare``; where there are several ways, the fastest measured, in the time that a library call is given."""
    kernels = {walk.value: prepare(region, target, walk, excess_precision=excess_precision) for walk in walks(region)}
    usual = next(iter(kernels.values()))
    if all((kernel.source, kernel.launches) == (usual.source, usual.launches) for kernel in kernels.values()):
        return usual
    outcome = tuning.fastest(
        _task(usual),
        target,
        {name: _call(kernel) for name, kernel in kernels.items()},
        Policy.from_environment().tune_seconds,
        warm_ups={name: kernel.compile for name, kernel in kernels.items()},
    )
    chosen = kernels[outcome.name]
    chosen.text += f"; {outcome.name}: {outcome.text}"
    return chosen


def _task(kernel: RegionKernel) -> tuning.Task:
    operands = tuple(buffer.shape for buffer in kernel.inputs)
    results = TupleShape(tuple(map(array_of, kernel.outputs)))
    return tuning.Task(kernel.text, (kernel.source, repr(kernel.launches)), operands, results)


def _call(kernel: RegionKernel) -> Kernel:
    made = [(shape.dims, dtype_of(shape.element_type)) for shape in map(array_of, kernel.outputs)]

    def call(run: Run, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = [torch.empty(dims, dtype=dtype, device=run.device) for dims, dtype in made]
        kernel(inputs, outputs)
        return tuple(outputs)

    return call
