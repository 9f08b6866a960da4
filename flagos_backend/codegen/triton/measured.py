"""Kernels of regions that may be tiled in several ways, of which the chip says which is faster. Between kernel.py and
whoever runs kernels on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flagos_backend.codegen.triton.kernel import RegionKernel, array_of, prepare
from flagos_backend.codegen.triton.tiling import walks
from flagos_backend.devices.target import Target
from flagos_backend.ir.types import TupleShape
from flagos_backend.kernels import tuning
from flagos_backend.kernels.policy import Policy
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.loop_ir.region import Region
from flagos_backend.process.torch_loading import torch


@dataclass(frozen=True, slots=True)
class RegionKernels:
    """The ways to run a region: one, or several of which the device says which is fastest."""

    kernels: Mapping[str, RegionKernel]
    target: Target

    @staticmethod
    def of(region: Region, target: Target, *, excess_precision: bool = False) -> RegionKernels:
        """Nothing is compiled yet."""
        found = {walk.value: prepare(region, target, walk, excess_precision=excess_precision) for walk in walks(region)}
        name, usual = next(iter(found.items()))
        if all((kernel.source, kernel.launches) == (usual.source, usual.launches) for kernel in found.values()):
            found = {name: usual}
        return RegionKernels(found, target)

    @property
    def awaited(self) -> tuple[RegionKernel, ...]:
        """Those that ``fastest`` needs compiled: all where it measures them, and the one that it gives."""
        if len(self.kernels) == 1:
            return tuple(self.kernels.values())
        own = {name: kernel.compile for name, kernel in self.kernels.items()}
        names = tuning.awaited(self._task, self.target, self._calls, self._seconds, own)
        return tuple(self.kernels[name] for name in names)

    def fastest(self) -> RegionKernel:
        """The fastest measured, in the time that a library call is given."""
        if len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        own = {name: kernel.compile for name, kernel in self.kernels.items()}
        outcome = tuning.fastest(self._task, self.target, self._calls, self._seconds, warm_ups=own)
        chosen = self.kernels[outcome.name]
        chosen.choice = f"{outcome.name}: {outcome.text}"
        return chosen

    @property
    def _task(self) -> tuning.Task:
        return _task(next(iter(self.kernels.values())))

    @property
    def _calls(self) -> Mapping[str, Kernel]:
        return {name: _call(kernel) for name, kernel in self.kernels.items()}

    @property
    def _seconds(self) -> float:
        return Policy.from_environment().tune_seconds


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
