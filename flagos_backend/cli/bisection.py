"""Which pass of a pipeline first changes what a program computes: each stage is run on the reference kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flagos_backend.cli.failure import CommandFailed
from flagos_backend.cli.running import random_bytes
from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.printer import print_module
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference import small_floats, storage
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.passes.pass_manager import PassContext, PassOptions, Pipeline, names, run_pipeline

# What a pass may change by computing in another order, relative to the greatest magnitude of a result.
_TOLERANCE = {ElementType.F64: 1e-10, ElementType.F32: 1e-4, ElementType.F16: 1e-2, ElementType.BF16: 5e-2}
_COARSE = 0.5  # of 8- and 4-bit floats


@dataclass(frozen=True, slots=True)
class Stage:
    """After the pass ``name``: the greatest error of a result, relative to its tolerance; above 1 it is wrong."""

    name: str
    error: float


def bisect(module: Module, pipeline: Pipeline, target: Target, options: PassOptions, seed: int) -> list[Stage]:
    """Each pass that changed ``module``, with how far its results are from those of ``module`` as it came."""
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]
    rng = np.random.default_rng(seed)
    arguments = [random_bytes(shape, rng) for shape in shapes]
    expected = _results(module, arguments, shapes)
    stages: list[Stage] = []
    before = module
    for name in names(pipeline):
        until = PassOptions(verify=True, disabled=options.disabled, stop_after=name)
        after = run_pipeline(pipeline, module, PassContext(target), until).module
        if after is before or print_module(after) == print_module(before):
            continue
        before = after
        actual = _results(after, arguments, shapes)
        stages.append(Stage(name, max((_error(*pair) for pair in zip(expected, actual, strict=True)), default=0.0)))
    return stages


_Result = tuple[torch.Tensor, ArrayShape]


def _results(module: Module, arguments: Sequence[bytes], shapes: Sequence[ArrayShape]) -> list[_Result]:
    with torch.inference_mode():
        plan = build_plan(module.entry)
        tensors = [storage.from_bytes(data, shape) for data, shape in zip(arguments, shapes, strict=True)]
        run = Run(num_replicas=module.num_replicas, num_partitions=module.num_partitions)
        if module.num_replicas * module.num_partitions != 1:
            raise CommandFailed("--bisect runs programs for one device; this one is for several")
        return list(zip(plan.run(run, tensors), plan.result_shapes, strict=True))


def _error(expected: _Result, actual: _Result) -> float:
    (theirs, shape), (ours, _) = expected, actual
    kind = shape.element_type
    if kind is ElementType.TOKEN:
        return 0.0
    if not (kind.is_float or kind.is_complex):
        return 0.0 if torch.equal(theirs, ours) else float("inf")
    wide = torch.complex128 if kind.is_complex else torch.float64
    if small_floats.is_small(kind):
        theirs, ours = small_floats.decode(theirs, kind), small_floats.decode(ours, kind)
    theirs, ours = theirs.to(wide), ours.to(wide)
    same = (theirs == ours) | (theirs.isnan() & ours.isnan())
    difference = torch.where(same, torch.zeros((), dtype=wide), ours - theirs).abs()
    if not difference.numel():
        return 0.0
    if not bool(difference.isfinite().all()):
        return float("inf")
    finite = theirs.abs()[theirs.isfinite()]
    scale = max(1.0, float(finite.max()) if finite.numel() else 1.0)
    tolerance = _TOLERANCE.get(kind.real if kind.is_complex else kind, _COARSE)
    return float(difference.max()) / scale / tolerance
