"""Runs what no launch has run yet, once and before it is captured: kernels are compiled and chosen, and libraries warm.
Between segments.py, which says what, and capture.py, which takes the same way through the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flagos_backend.errors import CaptureRefused
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime.accelerator.capture import reason_of
from flagos_backend.runtime.control_flow import ControlFlow
from flagos_backend.runtime.plan import Plan


class _EveryPart:
    """Conditionals of a warm-up: every branch runs, and of every loop one iteration, whatever the flags say. So loops
    end for values that they were not meant for."""

    def run_if(self, chosen: torch.Tensor, body: Callable[[], None]) -> None:
        body()

    def run_while(self, another: torch.Tensor, body: Callable[[], torch.Tensor]) -> None:
        body()


def warm_up(plan: Plan, run: Run) -> None:
    """Runs ``plan``, all steps of which may be captured, on zeros: it computes nothing but its results, which are
    dropped. From then on all of it has run. Raises CaptureRefused, as where memory runs out."""
    try:
        arguments = [_zeros(shape, run.device) for shape in plan.shapes_of(plan.parameters)]
        plan.run(replace(run, conditionals=_EveryPart()), arguments)
    except Exception as error:
        reason = f"what has not run broke in a warm-up: {reason_of(plan, error)}"
        raise CaptureRefused(reason=reason) from error
    _note_runs(plan)


def _note_runs(plan: Plan) -> None:
    for step in plan.steps:
        if isinstance(step.kernel, ControlFlow):
            step.kernel.ran.update(range(len(step.nested)))
        for nested in step.nested:
            _note_runs(nested)


def _zeros(shape: ArrayShape, device: torch.device) -> Any:
    if shape.element_type is ElementType.TOKEN:
        return ()
    return torch.zeros(shape.dims, dtype=dtype_of(shape.element_type), device=device)
