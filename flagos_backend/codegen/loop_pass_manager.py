"""Runs the transforms of loop nests, and the two that open every target's pipeline. Beside passes/pass_manager.py.

A nest comes from fusion as a Region. What a transform makes stores together what the nest did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flagos_backend.codegen.transforms.excess_precision import with_excess_precision
from flagos_backend.codegen.transforms.log2 import with_base_two
from flagos_backend.errors import LoopNestInvalid, PassFailed
from flagos_backend.loop_ir.printer import print_nest
from flagos_backend.loop_ir.region import Region
from flagos_backend.loop_ir.verifier import verify_loop_nest
from flagos_backend.passes.failure_dump import failure_dump
from flagos_backend.passes.pass_manager import PassOptions


@dataclass(frozen=True, slots=True)
class LoopPass:
    """One named transform of a loop nest. ``reason``: why it stands where it does."""

    name: str
    run: Callable[[Region], Sequence[Region]]
    reason: str


LoopPipeline = tuple[LoopPass, ...]


def one(function: Callable[[Region], Region]) -> Callable[[Region], Sequence[Region]]:
    """A transform that makes one nest of one."""
    return lambda region: (function(region),)


def log2(excess_precision: bool) -> LoopPass:
    """The first transform of every target."""
    run = functools.partial(with_base_two, excess_precision=excess_precision)
    return LoopPass("log2", one(run), "one rounding, exact at powers of two")


EXCESS_PRECISION = LoopPass(
    "excess_precision", one(with_excess_precision), "what is left keeps float32's digits within the kernel"
)


def run_loop_pipeline(pipeline: LoopPipeline, region: Region, options: PassOptions | None = None) -> Sequence[Region]:
    """The nests that ``region`` becomes. ``options``: those of the environment unless given; names of passes that are
    left out, and whether each result is verified, which raises PassFailed."""
    options = options or PassOptions.from_environment()
    if options.verify:
        _verify("fusion", region, region, options)
    regions: Sequence[Region] = (region,)
    for step in pipeline:
        if step.name in options.disabled:
            continue
        made: list[Region] = []
        for before in regions:
            results = step.run(before)
            if options.verify:
                for nest in results:
                    if nest is not before:
                        _verify(step.name, before, nest, options)
            made += results
        regions = made
    return regions


def _verify(name: str, before: Region, after: Region, options: PassOptions) -> None:
    try:
        verify_loop_nest(after)
    except LoopNestInvalid as error:
        facts = error.facts
        dump = failure_dump(name, before, after, print_nest, options.dump_to)
        cure = f"{dump}. Leave it out with FLAGOS_DISABLE_PASSES={name}" if name != "fusion" else dump
        raise PassFailed(name=name, reason=facts["rule"], place=facts["place"], dump=cure) from error
