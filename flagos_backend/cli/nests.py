"""The loop nests of a program, and one transform on a file of nests. Part of ``flagos opt``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from flagos_backend.cli.failure import CommandFailed, WrongUsage
from flagos_backend.codegen.cpu.fusion_policy import schedule as cpu_schedule
from flagos_backend.codegen.cpu.pipelines import cpu_emission_pipeline, cpu_loop_pipeline, native_pipeline
from flagos_backend.codegen.loop_pass_manager import EXCESS_PRECISION, LoopPass, run_loop_pipeline
from flagos_backend.devices.target import HOST, Target
from flagos_backend.errors import LoopNestTextInvalid
from flagos_backend.ir.hlo import Computation, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.parser import parse_nests
from flagos_backend.loop_ir.region import Region
from flagos_backend.passes.pass_manager import PassContext, PassOptions, run_pipeline

_CALLERS = frozenset({Opcode.CALL, Opcode.CONDITIONAL, Opcode.WHILE})


def nests_of(module: Module, target: Target) -> Iterator[Region]:
    """What fusion makes of ``module``, which has been through the graph passes of ``target``; bodies of loops and
    branches first."""
    if target is HOST:
        lowered = run_pipeline(native_pipeline(), module, PassContext(target)).module
        schedules = (cpu_schedule(flatten(computation)) for computation in _steps(lowered.entry))
    else:
        from flagos_backend.codegen.triton import schedule as triton_schedule

        schedules = (triton_schedule(flatten(computation), target) for computation in _steps(module.entry))
    for schedule in schedules:
        yield from (item for item in schedule.items if isinstance(item, Region))


def _steps(computation: Computation) -> dict[Computation, None]:
    """The computations that run as steps, callees first: not those that reductions and sorts apply to elements."""
    found: dict[Computation, None] = {}
    for instruction in computation.instructions:
        if instruction.opcode in _CALLERS:
            for callee in instruction.called:
                found |= _steps(callee)
    return found | {computation: None}


def transformed(path: Path, name: str, target: Target) -> Iterator[tuple[Region, Sequence[Region]]]:
    """Each nest of a file, and what it becomes by the transform ``name`` of ``target``; each result is verified."""
    transforms = _transforms(target)
    if name not in transforms:
        raise WrongUsage(f"there is no transform {name!r}; known are: {', '.join(transforms)}")
    try:
        nests = parse_nests(path.read_text())
    except LoopNestTextInvalid as error:
        raise WrongUsage(f"{path} does not parse: {error}") from error
    except UnicodeDecodeError as error:
        raise WrongUsage(f"{path} does not parse: it is no text") from error
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read ({error.strerror})") from error
    for nest in nests:
        yield nest, run_loop_pipeline((transforms[name],), nest, PassOptions(verify=True))


def _transforms(target: Target) -> dict[str, LoopPass]:
    if target is HOST:
        pipeline = (*cpu_loop_pipeline(), *cpu_emission_pipeline())
    else:
        from flagos_backend.codegen.triton.loop_pipeline import triton_loop_pipeline

        pipeline = triton_loop_pipeline(target)
    return {step.name: step for step in (*pipeline, EXCESS_PRECISION)}
