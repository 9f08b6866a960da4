"""The order of the passes, and a report of what each did. Between import and kernel choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flagos_backend.devices.target import HOST, Target
from flagos_backend.errors import PassFailed, VerificationFailed
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.verifier import verify as verify_module
from flagos_backend.passes.cse import eliminate_common_subexpressions
from flagos_backend.passes.dce import eliminate_dead_code
from flagos_backend.passes.fold_constants import fold_constants
from flagos_backend.passes.hoist_invariants import hoist_invariants
from flagos_backend.passes.inline_calls import inline_calls
from flagos_backend.passes.place_windows import place_windows
from flagos_backend.passes.select_branches import select_branches
from flagos_backend.passes.settle_donors import settle_donors
from flagos_backend.passes.simplify import simplify
from flagos_backend.passes.sink_gathers import sink_gathers
from flagos_backend.passes.spread_scatter import spread_scatter
from flagos_backend.passes.trip_count import find_trip_counts

Pass = Callable[[Module], Module]

# After the branches, which become calls. Folding and simplifying feed each other; what the second round does not reach
# is rare and stays correct.
_PASSES: tuple[tuple[str, Pass], ...] = (
    ("inline_calls", inline_calls),
    ("dce", eliminate_dead_code),
    ("simplify", simplify),
    ("fold_constants", fold_constants),
    ("cse", eliminate_common_subexpressions),
    ("trip_count", find_trip_counts),
    ("hoist_invariants", hoist_invariants),
    ("place_windows", place_windows),
    ("spread_scatter", spread_scatter),
    ("sink_gathers", sink_gathers),
    ("simplify", simplify),
    ("fold_constants", fold_constants),
    ("cse", eliminate_common_subexpressions),
    ("dce", eliminate_dead_code),
    ("settle_donors", settle_donors),
)


def passes_for(target: Target) -> tuple[tuple[str, Pass], ...]:
    """All passes with their names, in order."""
    branches = partial(select_branches, operations=target.untaken_operations)
    return ("inline_calls", inline_calls), ("select_branches", branches), *_PASSES


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did: instruction counts of the whole program, and the seconds it took."""

    name: str
    changed: bool
    instructions_before: int
    instructions_after: int
    seconds: float

    def __str__(self) -> str:
        change = f"{self.instructions_before} -> {self.instructions_after}" if self.changed else "no change"
        return f"{self.name}: {change}, {self.seconds * 1e3:.1f} ms"


def optimize_with_report(
    module: Module, target: Target = HOST, *, verify: bool
) -> tuple[Module, tuple[PassReport, ...]]:
    """``module`` after all passes, and a report of each. ``verify`` checks every intermediate result.

    Raises PassFailed when a pass breaks the graph, which only ``verify`` notices.
    """
    reports = []
    size = _size(module)
    for name, run in passes_for(target):
        start = time.perf_counter()
        result = run(module)
        seconds = time.perf_counter() - start
        if verify and result is not module:
            try:
                verify_module(result)
            except VerificationFailed as error:
                raise PassFailed(name=name, reason=error.facts["rule"], place=error.facts["place"]) from error
        before, size = size, size if result is module else _size(result)
        reports.append(PassReport(name, result is not module, before, size, seconds))
        module = result
    return module, tuple(reports)


def optimize(module: Module, target: Target = HOST, *, verify: bool = False) -> Module:
    return optimize_with_report(module, target, verify=verify)[0]


def _size(module: Module) -> int:
    return sum(len(computation.instructions) for computation in module.computations())
