"""Modules at the points of the declared pipelines where tests look at them."""

from __future__ import annotations

from flagos_backend.devices.target import HOST, Target
from flagos_backend.ir.hlo import Module
from flagos_backend.passes.pass_manager import PassContext, PassOptions, PipelineResult, run_pipeline
from flagos_backend.passes.pipelines import optimize, pipeline_for

#: An accelerator that has none of the extras of any vendor.
SIMULATED = Target("cpu", "simulated")


def run_until(name: str, module: Module, target: Target = HOST) -> Module:
    """``module`` as the pass ``name`` of ``target``'s pipeline gets it, each result verified."""
    options = PassOptions(verify=True, stop_before=name)
    return run_pipeline(pipeline_for(target), module, PassContext(target), options).module


def simplified(module: Module, target: Target = HOST) -> Module:
    """``module`` after the passes that all targets have in common, its collectives as they are."""
    pipeline = pipeline_for(target, own_participants=False)
    return run_pipeline(pipeline, module, PassContext(target), PassOptions(verify=True, stop_after="donation")).module


def for_accelerator(module: Module, target: Target = SIMULATED) -> Module:
    """``module`` after the whole pipeline of an accelerator."""
    return optimize(module, target, verify=True)


def matched_attention(module: Module) -> PipelineResult:
    """``module`` after the matching of attention, with its notes."""
    return run_alone("match_attention", module, SIMULATED)


def run_alone(name: str, module: Module, target: Target = HOST) -> PipelineResult:
    """``module`` after the pass ``name`` of ``target``'s pipeline, and those that belong before and after it."""
    (step,) = {step for step in pipeline_for(target) if step.name == name}
    return run_pipeline((step,), module, PassContext(target), PassOptions(verify=True))
