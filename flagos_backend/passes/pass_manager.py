"""Runs a pipeline of passes: verifies, times, dumps, disables and stops. pipelines.py declares what is run."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flagos_backend.devices.target import HOST, Target
from flagos_backend.errors import PassFailed, PassOptionInvalid, VerificationFailed
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.printer import print_module
from flagos_backend.ir.verifier import verify as verify_module
from flagos_backend.passes.failure_dump import DUMP_VARIABLE, failure_dump
from flagos_backend.process import progress

logger = logging.getLogger("flagos_backend")

DISABLE_VARIABLE = "FLAGOS_DISABLE_PASSES"
_VERIFY_VARIABLE = "FLAGOS_DEBUG"
_VERIFY_LEVEL = 3
_dumps = itertools.count()


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may know beside the module. ``notes``: lines for explain, which passes add to."""

    target: Target = HOST
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NormalForm:
    """A property of modules: ``run``, the transform that brings it about, finds nothing left to change."""

    name: str
    run: Callable[[Module], Module]

    def holds(self, module: Module) -> bool:
        return self.run(module) is module


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One named transform of a module. Returns the module itself where it changes nothing.

    ``reason``: why it stands where it does in its pipeline. ``before``: passes that prepare the module; what they did
    is dropped unless this pass then changed something. ``after``: passes that clean up, and run only if it did.
    ``needs`` and ``establishes``: normal forms that hold before and after it.
    """

    name: str
    run: Callable[[Module, PassContext], Module]
    reason: str = ""
    before: tuple[Pass, ...] = ()
    after: tuple[Pass, ...] = ()
    needs: tuple[NormalForm, ...] = ()
    establishes: tuple[NormalForm, ...] = ()


Pipeline = tuple[Pass, ...]


@dataclass(frozen=True, slots=True)
class PassOptions:
    """How a pipeline is run.

    ``verify``: check each changed module and the normal forms. ``disabled``: names of passes that are left out:
    ``dce`` all of that name, ``dce.2`` the second one. ``stop_before`` and ``stop_after``: the name before or after
    which nothing runs any more. ``dump_to``: a folder that receives the module before the first pass and after each one
    that changed it. ``watch``: gets each module that is dumped, with the name of its pass.
    """

    verify: bool = False
    disabled: frozenset[str] = frozenset()
    stop_before: str = ""
    stop_after: str = ""
    dump_to: Path | None = None
    watch: Callable[[str, Module], None] | None = None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> PassOptions:
        """The options that FLAGOS_DEBUG, FLAGOS_DUMP_TO and FLAGOS_DISABLE_PASSES name."""
        return _options(*(variables.get(name, "") for name in (_VERIFY_VARIABLE, DISABLE_VARIABLE, DUMP_VARIABLE)))


@functools.lru_cache(maxsize=8)
def _options(level: str, disabled: str, folder: str) -> PassOptions:
    return PassOptions(
        verify=level.isdecimal() and int(level) >= _VERIFY_LEVEL,
        disabled=frozenset(filter(None, re.split(r"[,\s]+", disabled))),
        dump_to=Path(folder) if folder else None,
    )


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


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """``reports``: of each pass that ran, in order."""

    module: Module
    reports: tuple[PassReport, ...]
    notes: tuple[str, ...]


def in_order(pipeline: Iterable[Pass]) -> Iterator[Pass]:
    """Every pass of ``pipeline`` in the order in which they run, those before and after others included."""
    for step in pipeline:
        yield from in_order(step.before)
        yield step
        yield from in_order(step.after)


@functools.lru_cache(maxsize=64)
def names(pipeline: Pipeline) -> tuple[str, ...]:
    """A unique name for each of ``in_order(pipeline)``: the second dce is dce.2."""
    seen: Counter[str] = Counter()
    result = []
    for step in in_order(pipeline):
        seen[step.name] += 1
        result.append(step.name if seen[step.name] == 1 else f"{step.name}.{seen[step.name]}")
    return tuple(result)


def check_names(known: Iterable[str], wanted: Iterable[str], option: str) -> None:
    """Raises PassOptionInvalid for a name in ``wanted``, which ``option`` holds, that is not one of ``known``."""
    known = set(known)
    for name in sorted(set(wanted) - known):
        listed = ", ".join(sorted(known))
        raise PassOptionInvalid(variable=option, value=name, wanted=f"the name of a pass; known are: {listed}")


def run_pipeline(
    pipeline: Pipeline, module: Module, context: PassContext | None = None, options: PassOptions | None = None
) -> PipelineResult:
    """``module`` after the passes of ``pipeline``.

    Raises PassFailed when a pass breaks the graph or a normal form, which only ``options.verify`` notices.
    """
    run = _Run(pipeline, context or PassContext(), options or PassOptions())
    result = run.all(progress.counted(pipeline, "passes"), module)
    return PipelineResult(result, tuple(run.reports), tuple(run.context.notes))


class _Run:
    """One run of one pipeline."""

    def __init__(self, pipeline: Pipeline, context: PassContext, options: PassOptions) -> None:
        self.context = context
        self.options = options
        self.reports: list[PassReport] = []
        self._names = iter(names(pipeline))
        self._stopped = False
        self._size: tuple[Module, int] | None = None
        self._dump: _Dump | None = None

    def all(self, steps: Iterable[Pass], module: Module) -> Module:
        for step in steps:
            module = self._step(step, module)
        return module

    def _step(self, step: Pass, module: Module) -> Module:
        prepared = self.all(step.before, module)
        name = next(self._names)
        self._stopped = self._stopped or name == self.options.stop_before
        if self._stopped or not self.options.disabled.isdisjoint((step.name, name)):
            self._skip(step.after)
            # Stopped within the preparation, it is what was asked for.
            return prepared if self._stopped else module
        result = self._run(step, name, prepared)
        self._stopped = self._stopped or name == self.options.stop_after
        if result is prepared and not self._stopped:
            self._skip(step.after)
            return module
        return self.all(step.after, result)

    def _skip(self, steps: Pipeline) -> None:
        if steps:
            for _ in in_order(steps):
                next(self._names)

    def _run(self, step: Pass, name: str, module: Module) -> Module:
        if self._dump is None and self.options.dump_to is not None:
            self._dump = _Dump(self.options.dump_to, module)
        if self.options.verify:
            self._check(name, step.needs, "needs", module, module)
        start = time.perf_counter()
        result = step.run(module, self.context)
        seconds = time.perf_counter() - start
        report = PassReport(name, result is not module, self._count(module), self._count(result), seconds)
        self.reports.append(report)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: %s", module.name, report)
        if self._dump is not None and result is not module:
            self._dump.write(name, result)
        if self.options.watch is not None and result is not module:
            self.options.watch(name, result)
        if self.options.verify:
            if result is not module:
                self._verify(name, module, result)
            self._check(name, step.establishes, "establishes", module, result)
        return result

    def _count(self, module: Module) -> int:
        if self._size is None or self._size[0] is not module:
            self._size = module, sum(len(computation.instructions) for computation in module.computations())
        return self._size[1]

    def _verify(self, name: str, before: Module, after: Module) -> None:
        try:
            verify_module(after)
        except VerificationFailed as error:
            place, dump = error.facts["place"], self._where(name, before, after)
            raise PassFailed(name=name, reason=error.facts["rule"], place=place, dump=dump) from error

    def _check(self, name: str, forms: Iterable[NormalForm], verb: str, before: Module, after: Module) -> None:
        for form in forms:
            if not form.holds(after):
                reason = f"it {verb} the normal form '{form.name}', which does not hold"
                dump = self._where(name, before, after)
                raise PassFailed(name=name, reason=reason, place=f"module {after.name!r}", dump=dump)

    def _where(self, name: str, before: Module, after: Module) -> str:
        if self._dump is not None:
            return f"The modules are in {self._dump.folder}"
        return failure_dump(name, before, after, print_module)


class _Dump:
    """A folder with one program at each stage, as text."""

    def __init__(self, root: Path, module: Module) -> None:
        safe = re.sub(r"[^\w.-]+", "_", module.name)[:80] or "module"
        self.folder = root / f"{os.getpid()}.{next(_dumps):04d}.{safe}"
        self._count = itertools.count()
        self.write("input", module)

    def write(self, name: str, module: Module) -> None:
        path = self.folder / f"{next(self._count):02d}.{name}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(print_module(module) + "\n")
        except OSError as error:
            raise PassOptionInvalid(
                variable=DUMP_VARIABLE, value=self.folder.parent, wanted=f"a writable folder ({error.strerror})"
            ) from error
