"""Divides a plan into segments, each recorded and later replayed as one, and the steps between them that cannot be
recorded. Pure but for the recorder it is given (graphs.py); between the plan and the native replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from flagos_backend.errors import CaptureRefused
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime.accelerator.capturable import (
    MAX_STEPS,
    MAY_DIFFER,
    Limits,
    has_run,
    meets,
    reason_against,
    weight_of,
)
from flagos_backend.runtime.control_flow import ControlFlow, CountedLoop, owned_copy
from flagos_backend.runtime.plan import Plan, Step

if TYPE_CHECKING:
    from flagos_backend.collectives.multi_process import MultiProcessCommunicator

# A replay is one launch, with its nodes patched and its outputs allocated: about as much work of the host as launching
# two kernels. Shorter segments would cost memory and four captures for nothing.
MIN_STEPS = 3
# So often may recordings break before the rest of a program is left as it is.
MAX_REFUSALS = 16
# What recorded kernels were chosen for; that of native/replays.cc.
_ALIGNMENT = 256
# How many reasons the line of the log names.
_NAMED = 3


class Replay(Protocol):
    """A recorded plan. ``str()`` says of what kind and size it is.

    ``overwritten``: for each output the argument whose memory it takes over as it is, or -1.
    """

    @property
    def overwritten(self) -> tuple[int, ...]: ...

    def launch(self, arrays: Sequence[Any]) -> None:
        """Enqueues it. ``arrays``: arguments, then outputs, dense; () for a token. An output that takes over an
        argument's memory lies there."""


Record = Callable[[Plan], Replay]
"""Records a plan all of which has run before; nothing is computed. Raises CaptureRefused."""
WarmUp = Callable[[Plan], None]
"""Runs all of a plan, whatever data says, on values of no meaning. Raises CaptureRefused."""


class Recorder(Protocol):
    """A Record of one device. ``no_conditionals``: why it records nothing in which data decides what runs, or "";
    ``no_rendezvous``: why nothing in which devices meet, or ""."""

    @property
    def no_conditionals(self) -> str: ...

    @property
    def no_rendezvous(self) -> str: ...

    def __call__(self, plan: Plan) -> Replay: ...

    def warm_up(self, plan: Plan) -> None: ...


@dataclass(slots=True, eq=False)
class Segment:
    """Steps of a plan that are replayed as one: the kernel of a step that stands for them.

    What it hands on lies in memory of its own, or in an argument's: that of its temporaries is written again by the
    next replay. ``place``: the numbers of the steps that it is nested in, and of its own first and the one after it.
    ``meets``: whether devices meet in it.
    """

    plan: Plan
    replay: Replay
    place: tuple[int, ...] = ()
    launches: int = 0
    meets: bool = field(init=False)
    _outputs: tuple[tuple[ArrayShape, torch.dtype], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.meets = any(map(meets, self.plan.steps))
        self._outputs = tuple((shape, dtype_of(shape.element_type)) for shape in self.plan.result_shapes)

    def __call__(self, run: Run, values: list[Any]) -> None:
        arrays = []
        for slot in self.plan.parameters:
            values[slot] = _dense(run, values[slot])
            arrays.append(values[slot])
        for (shape, dtype), argument in zip(self._outputs, self.replay.overwritten, strict=True):
            if argument >= 0:
                # A single element may have any stride.
                row = arrays[argument].as_strided((arrays[argument].numel(),), (1,))
                arrays.append(row.view(dtype).view(shape.dims))
            elif shape.element_type is ElementType.TOKEN:
                arrays.append(())
            else:
                arrays.append(torch.empty(shape.dims, dtype=dtype, device=run.device))
        if self.meets:
            # Whoever waits in it for another device may hold up an allocation there: all have theirs by now.
            launch = cast("MultiProcessCommunicator", run.communicator)
            launch.begin_together(run.rendezvous(self.plan.name), lambda: self.replay.launch(arrays))
        else:
            self.replay.launch(arrays)
        self.launches += 1
        outputs = arrays[len(self.plan.parameters) :]
        for slot, output in zip(self.plan.results, outputs, strict=True):
            values[slot] = output

    def __str__(self) -> str:
        count = _weights(self.plan.steps)
        return f"{count} steps ({self.plan.name}) as {self.replay}, launched {self.launches} times"


def _dense(run: Run, value: Any) -> Any:
    """The array as it lay when it was recorded. Arguments of a program and results of library kernels may be views."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous() and value.data_ptr() % _ALIGNMENT == 0 and not value.is_conj() and not value.is_neg():
        return value
    return owned_copy(run, value.resolve_conj().resolve_neg())


@dataclass(frozen=True, slots=True)
class Part:
    """A segment, or why there are steps outside of all, or why what follows is two parts (``cut``). ``depth``: how many
    plans it is nested in."""

    depth: int
    segment: Segment | None
    reason: str = ""
    cut: bool = False

    def __str__(self) -> str:
        kind, text = ("segment", self.segment) if self.segment else ("cut" if self.cut else "outside", self.reason)
        return f"{'  ' * self.depth}{kind}: {text}"


@dataclass(frozen=True, slots=True)
class Division:
    """``plan``: what to run instead. ``parts``: in order, those of nested plans too. ``whole``: the replay of the plan
    as it was, if all of it could be recorded as one."""

    plan: Plan
    parts: tuple[Part, ...] = ()
    whole: Replay | None = None

    @property
    def rendezvous(self) -> dict[tuple[int, ...], Replay]:
        """The replays in which devices meet, by their places, in order."""
        if self.whole is not None:
            return {(): self.whole} if any(map(meets, self.plan.steps)) else {}
        segments = (part.segment for part in self.parts if part.segment is not None and part.segment.meets)
        return {segment.place: segment.replay for segment in segments}

    def summary(self) -> str:
        """One line."""
        if self.whole is not None:
            return f"replayed as {self.whole}"
        segments = sum(part.segment is not None for part in self.parts)
        reasons = list(dict.fromkeys(part.reason for part in self.parts if part.reason))
        why = "; ".join(reasons[:_NAMED]) + (f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else "")
        if not segments:
            return f"not replayed: {why}"
        return f"replayed in {segments} segment{'s' if segments > 1 else ''}{': ' if why else ''}{why}"

    def __str__(self) -> str:
        return "\n".join([self.summary(), *(f"    {part}" for part in self.parts)])


def divide(
    plan: Plan,
    record: Record,
    no_conditionals: str = Limits.conditionals,
    warm_up: WarmUp | None = None,
    no_rendezvous: str = Limits.rendezvous,
    in_parts: bool = False,
) -> Division:
    """Has ``plan``, which has run before, recorded whole, or in parts. ``no_conditionals``, ``no_rendezvous``: as of
    Recorder. ``warm_up``: without it, what has not run stays as it is. ``in_parts``: be it in a single one, which the
    plan then launches."""
    return _Divider(record, Limits(no_conditionals, no_rendezvous), warm_up).divide(plan, in_parts)


def outline(plan: Plan) -> Division:
    """How ``plan`` would be divided where graphs have conditional nodes and collectives, if nothing broke."""
    return _Divider(_Unrecorded, Limits(conditionals="", rendezvous=""), lambda plan: None).divide(plan)


class _Unrecorded:
    """Stands for a replay in an outline."""

    overwritten = ()

    def __init__(self, plan: Plan) -> None:
        pass

    def launch(self, arrays: Sequence[Any]) -> None:
        raise AssertionError("an outline does not run")

    def __str__(self) -> str:
        return "a graph, after its first runs"


class _Divider:
    """Divides one program and counts what breaks."""

    def __init__(self, record: Record, limits: Limits, warm_up: WarmUp | None) -> None:
        self._record = record
        self._limits = limits
        self._warm_up = warm_up
        self._has_run = True  # the plan that is being divided
        self._refusals = 0
        self._path: tuple[int, ...] = ()  # the steps that the plan is nested in, each with its number among their plans
        self._parts: list[Part] = []

    def divide(self, plan: Plan, in_parts: bool = False) -> Division:
        if not all(map(has_run, plan.steps)):
            # A warm-up is one device's alone.
            self._limits = replace(self._limits, rendezvous=self._limits.rendezvous or Limits.unrun)
        is_refused = any(map(self._reason_against, plan.steps)) or _weights(plan.steps) > MAX_STEPS
        if in_parts or is_refused or not self._all_has_run(plan):
            return Division(self._divided(plan), tuple(self._parts))
        try:
            return Division(plan, whole=self._record(plan))
        except CaptureRefused as refusal:
            steps = self._without_broken(plan, range(len(plan.steps)), refusal)
            return Division(replace(plan, steps=tuple(steps)), tuple(self._parts))

    def _depth(self) -> int:
        return len(self._path) // 2

    def _reason_against(self, step: Step) -> str:
        return reason_against(step, replace(self._limits, unrun="" if self._warm_up else Limits.unrun))

    def _all_has_run(self, plan: Plan) -> bool:
        """Whether all of ``plan`` has run, if need be in a warm-up. After one that broke, as where memory ran out,
        there is no other: what has not run stays as it is, and the rest is recorded."""
        if self._has_run and all(map(has_run, plan.steps)):
            return True
        try:
            if self._warm_up is not None:
                self._warm_up(plan)
                return True
        except CaptureRefused as refusal:
            self._warm_up = None
            self._parts.append(Part(self._depth(), None, refusal.facts["reason"]))
        return False

    def _divided(self, plan: Plan) -> Plan:
        return replace(plan, steps=tuple(self._parted(plan, range(len(plan.steps)))))

    def _parted(self, plan: Plan, numbers: range) -> list[Step]:
        """The steps ``numbers``, recorded between those that cannot be."""
        steps: list[Step] = []
        begin = numbers.start
        for number in numbers:
            if reason := self._reason_against(plan.steps[number]):
                steps += self._recorded(plan, range(begin, number))
                steps += self._left(plan, range(number, number + 1), reason)
                begin = number + 1
        return [*steps, *self._recorded(plan, range(begin, numbers.stop))]

    def _recorded(self, plan: Plan, numbers: range) -> list[Step]:
        """The steps ``numbers`` of ``plan``, each of which may be recorded."""
        weight = 0
        for number in numbers:
            weight += weight_of(plan.steps[number])
            if weight > MAX_STEPS and (cut := _cut(plan, numbers, number)):
                return [
                    *self._recorded(plan, range(numbers.start, cut)),
                    *self._recorded(plan, range(cut, numbers.stop)),
                ]
        if weight < MIN_STEPS and not any(map(meets, plan.steps[numbers.start : numbers.stop])):
            return self._left(
                plan, numbers, f"{weight} steps, where a replay pays from {MIN_STEPS} on" if weight else ""
            )
        if self._refusals >= MAX_REFUSALS:
            return self._left(plan, numbers, f"not tried, as {self._refusals} recordings broke")
        part = _part(plan, numbers)
        if not self._all_has_run(part):
            return self._parted(plan, numbers) if self._has_run else self._left(plan, numbers, "")
        try:
            segment = Segment(part, self._record(part), (*self._path, numbers.start, numbers.stop))
        except CaptureRefused as refusal:
            return self._without_broken(plan, numbers, refusal)
        self._parts.append(Part(self._depth(), segment))
        return [_step_of(plan, numbers, segment)]

    def _without_broken(self, plan: Plan, numbers: range, refusal: CaptureRefused) -> list[Step]:
        """After a recording of ``numbers`` broke: without the step that it broke in, or else in halves."""
        self._refusals += 1
        reason = refusal.facts["reason"]
        if refusal.step is None:
            cut = _cut(plan, numbers, numbers.start + len(numbers) // 2)
            if not cut or _weights(plan.steps[numbers.start : numbers.stop]) < 2 * MIN_STEPS:
                return self._left(plan, numbers, reason)
            self._parts.append(Part(self._depth(), None, reason, cut=True))
            return [*self._recorded(plan, range(numbers.start, cut)), *self._recorded(plan, range(cut, numbers.stop))]
        broken = _together(plan, numbers, numbers.start + refusal.step)
        return [
            *self._recorded(plan, range(numbers.start, broken.start)),
            *self._left(plan, broken, reason),
            *self._recorded(plan, range(broken.stop, numbers.stop)),
        ]

    def _left(self, plan: Plan, numbers: range, reason: str) -> list[Step]:
        """The steps ``numbers`` as they are, but that the plans they run are divided. ``reason``: "" if nobody asks."""
        if numbers and reason:
            self._parts.append(Part(self._depth(), None, reason))
        return [self._with_nested(number, plan.steps[number]) for number in numbers]

    def _with_nested(self, step_number: int, step: Step) -> Step:
        kernel = step.kernel
        if not isinstance(kernel, ControlFlow):
            return step
        plans, around, limits, path = [], self._has_run, self._limits, self._path
        if not isinstance(kernel, CountedLoop) and not limits.rendezvous:
            # Each group of devices may decide for itself, and a segment waits for all.
            self._limits = replace(limits, rendezvous=MAY_DIFFER)
        for number, plan in enumerate(step.nested):
            self._path = (*path, step_number, number)
            self._has_run = number in kernel.ran
            if self._has_run or self._warm_up:
                plans.append(self._divided(plan))
            else:
                plans.append(plan)
                self._parts.append(Part(self._depth(), None, f"{plan.name} has not run yet"))
        self._has_run, self._limits, self._path = around, limits, path
        return replace(step, kernel=kernel.over([plan.run for plan in plans]), nested=tuple(plans))


def _weights(steps: Sequence[Step]) -> int:
    return sum(map(weight_of, steps))


def _together(plan: Plan, numbers: range, number: int) -> range:
    """The steps of one instruction, which pass tuples to one another, around ``number`` and among ``numbers``."""
    instruction = plan.steps[number].instruction
    begin, end = number, number + 1
    while instruction and begin > numbers.start and plan.steps[begin - 1].instruction is instruction:
        begin -= 1
    while instruction and end < numbers.stop and plan.steps[end].instruction is instruction:
        end += 1
    return range(begin, end)


def _cut(plan: Plan, numbers: range, number: int) -> int | None:
    """Where ``numbers`` can be cut in two, at ``number`` or before it."""
    begin = _together(plan, numbers, number).start
    return begin if begin > numbers.start else None


def _part(plan: Plan, numbers: range) -> Plan:
    """The steps ``numbers`` as a plan over the same slots: from those that live into them to those that live out."""
    steps = plan.steps[numbers.start : numbers.stop]
    made = {slot for step in steps for slot in step.results}
    read = dict.fromkeys(slot for step in steps for slot in step.operands)
    later = {slot for step in plan.steps[numbers.stop :] for slot in step.operands} | {*plan.results}
    return replace(
        plan,
        name=f"{numbers.start} to {numbers.stop - 1} of {plan.name}",
        steps=steps,
        parameters=tuple(slot for slot in read if slot not in made and plan.initial[slot] is None),
        results=tuple(sorted(made & later)),
        result_buffers={
            slot: result_buffer
            for slot, result_buffer in plan.result_buffers.items()
            if slot in made and result_buffer.slot in made
        },
    )


def _step_of(plan: Plan, numbers: range, segment: Segment) -> Step:
    part = segment.plan
    made = {slot for step in part.steps for slot in step.results}
    frees = tuple(slot for step in part.steps for slot in step.frees if slot not in made)
    text = f"{', '.join(f'#{slot}' for slot in part.results)} = {segment.replay} of {part.name}"
    return Step(segment, tuple(part.parameters), part.results, frees, text, on_slots=True, nested=(part,))
