"""Compares what generated kernels compute with the reference kernels, which are tested against stock XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from flagos_backend.codegen.triton import RegionKernel, schedule
from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from support import kernels
from support.numbers import NUMPY_DTYPE, distance

Build = Callable[..., Instruction]


def run_both(
    computation: Computation, arguments: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray], list[RegionKernel]]:
    """Results of generated kernels and of the reference, and the kernels."""
    ours, made = run_generated(computation, arguments)
    with torch.inference_mode():
        tensors = _tensors(computation, arguments)
        theirs = build_plan(computation).run(Run(), [tensor.cpu().clone() for tensor in tensors])
    return ours, _results(computation, theirs), made


def run_generated(
    computation: Computation, arguments: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[RegionKernel]]:
    """Results of generated kernels, and the kernels."""
    flat = flatten(computation)
    made: list[RegionKernel] = []
    results = kernels.run(flat, schedule(flat, kernels.target()), _tensors(computation, arguments), made.append)
    return _results(computation, results), made


def _tensors(computation: Computation, arguments: Sequence[np.ndarray]) -> list[torch.Tensor]:
    parameters = flatten(computation).parameters
    return [kernels.to_storage(a, p.shape.element_type) for a, p in zip(arguments, parameters, strict=True)]


def _results(computation: Computation, tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    types = [shape.element_type for shape in leaves(computation.root.shape)]
    return [_numpy(t, e) for t, e in zip(tensors, types, strict=True)]


def _numpy(tensor: torch.Tensor, element_type: ElementType) -> np.ndarray:
    content = (
        tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
    )
    return content.view(NUMPY_DTYPE[element_type]).reshape(tuple(tensor.shape))


def check(build: Build, arguments: Sequence[tuple[ElementType, np.ndarray]], ulp: float = 0) -> list[RegionKernel]:
    """``build(builder, *parameters)`` gives the same both ways, up to ``ulp`` units in the last place of floats."""
    builder = Builder("entry")
    parameters = [builder.parameter(ArrayShape(e, np.shape(a))) for e, a in arguments]
    root = build(builder, *parameters)
    ours, theirs, made = run_both(builder.build(root), [a for _, a in arguments])
    assert made
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        found = distance(a, b)
        if found.size:
            worst = np.unravel_index(int(np.argmax(found)), found.shape)
            assert found[worst] <= ulp, f"{found[worst]} ulp at {worst}: {a[worst]} instead of {b[worst]}"
    return made


def regions_of(computation: Computation) -> list[Region]:
    """What becomes generated kernels."""
    return [item for item in schedule(flatten(computation), kernels.target()).items if isinstance(item, Region)]


def reducer(opcode: Opcode, element_type: ElementType) -> Computation:
    """The scalar function of a reduce."""
    builder = Builder("reducer")
    a, b = (builder.parameter(ArrayShape(element_type)) for _ in range(2))
    return builder.build(builder.add(opcode, [a, b]))
