"""Explains a compiled program as data: its steps with what each costs, its memory, and what runs slower than it could.
Between compiler.py, whose result it reads, and cli/explanation_text.py, which says it in words."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from flagos_backend.codegen.cpu.step_notes import StepNote
from flagos_backend.compile import machine_code
from flagos_backend.compile.compiler import CompiledProgram
from flagos_backend.devices.target import Target
from flagos_backend.ir.cost import Roofline, instruction_cost
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.implementation import Provider
from flagos_backend.loop_ir.printer import print_nest
from flagos_backend.loop_ir.region import Region
from flagos_backend.runtime.plan import Plan
from flagos_backend.runtime.plan import Step as PlanStep

_SOURCE = re.compile(r"(?P<operation>.*?)(?: \((?P<source>[^()]*:\d+)\))?", re.DOTALL)
_IMPLEMENTATION = re.compile(rf" \[({'|'.join(Provider)})\.(?P<rest>[^\]]*)")
_CONTROL = frozenset({Opcode.WHILE, Opcode.CONDITIONAL})


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a launch runs: a kernel, a library call, a loop or a choice with all that is in it.

    ``number``: which step of the running program; several of one number are one function of machine code. ``kind``:
    loop, reduction, product, call, collective, kernel, view or control. ``provider``: who wrote what runs: native,
    compiled (for this program), blas, torch, triton (generated), flagos (FlagGems), vendor, reference. ``operation``:
    the framework's own name of what is computed; ``source``: ``file:line`` of the user's program, "" where nobody said.
    ``flops`` and ``bytes``: of one launch. ``seconds``: at least, by the target's roofline; 0 where that is unknown.
    ``fallback``: why no faster kind of kernel runs it, and how to change that; "" where none would. ``nest``: of a loop
    nest, what it computes, in the text form of loop_ir/SPEC.md, as emitters read it; else "".
    """

    number: int
    text: str
    kind: str = ""
    provider: str = ""
    operation: str = ""
    source: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    fallback: str = ""
    nest: str = ""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a launch takes for itself, in use from step ``first`` through step ``last``, by position in
    ``steps``."""

    name: str
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """``target``: what it is compiled for; ``form``: how it runs. ``notes``: what was matched and measured while
    compiling. ``fallbacks``: as those of steps, of the whole program.

    Sizes are in bytes, of one device; they, and ``flops``, ``transcendentals`` and ``bytes_accessed``, which are of the
    program before fusion, are what executable_describe says. ``library_bytes``: what library calls bring beside
    ``temporary_bytes``, at most. ``flops_per_second``, ``bytes_per_second``: the target's roofline; 0: unknown.
    """

    name: str
    fingerprint: str = ""
    target: str = ""
    form: str = ""
    arguments: int = 0
    outputs: int = 0
    replicas: int = 1
    partitions: int = 1
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    library_bytes: int = 0
    peak_bytes: int = 0
    flops: float = 0.0
    transcendentals: float = 0.0
    bytes_accessed: float = 0.0
    flops_per_second: float = 0.0
    bytes_per_second: float = 0.0
    steps: tuple[Step, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    notes: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """A lower bound on the time of a launch: each step by itself at the target's roofline; 0: unknown."""
        return sum(step.seconds for step in self.steps)

    def alive_at_peak(self) -> tuple[Buffer, ...]:
        """The buffers of the step at which most bytes of them live, the greatest first."""
        times = sorted({buffer.first for buffer in self.buffers})
        alive = ([b for b in self.buffers if b.first <= time <= b.last] for time in times)
        most = max(alive, key=lambda buffers: sum(b.bytes for b in buffers), default=[])
        return tuple(sorted(most, key=lambda b: -b.bytes))

    def to_json(self) -> str:
        """An object with the fields of this class, those of Step and Buffer within it."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def explanation_of(compiled: CompiledProgram) -> Explanation:
    """What ``compiled`` became. On an accelerator, as of its first device."""
    native = compiled.native
    if native is not None:
        steps = tuple(_native_step(note, compiled.target.roofline) for note in native.code.notes)
        buffers = tuple(Buffer(b.name, b.bytes, b.first, b.last) for b in native.code.buffers)
    else:
        plan = compiled.plans(compiled.device).donating
        steps = tuple(_plan_step(number, step, plan, compiled.target) for number, step in enumerate(plan.steps))
        buffers = tuple(_plan_buffers(plan))
    arguments = [shape.num_bytes for shape in compiled.arguments]
    roofline = compiled.target.roofline
    return Explanation(
        name=compiled.module.name,
        fingerprint=compiled.fingerprint,
        target=_target_text(compiled.target),
        form=_form(compiled),
        arguments=len(compiled.arguments),
        outputs=len(compiled.outputs),
        replicas=compiled.program.num_replicas,
        partitions=compiled.program.num_partitions,
        argument_bytes=sum(arguments),
        output_bytes=sum(shape.num_bytes for shape in compiled.outputs),
        alias_bytes=sum(n for n, alias in zip(arguments, compiled.argument_aliases, strict=True) if alias >= 0),
        temporary_bytes=compiled.temporary_bytes,
        library_bytes=compiled.library_bytes,
        peak_bytes=compiled.peak_bytes,
        flops=compiled.cost.flops,
        transcendentals=compiled.cost.transcendentals,
        bytes_accessed=compiled.cost.bytes_accessed,
        flops_per_second=roofline.flops_per_second if roofline else 0.0,
        bytes_per_second=roofline.bytes_per_second if roofline else 0.0,
        steps=steps,
        buffers=buffers,
        notes=compiled.notes,
        fallbacks=tuple(_fallbacks(compiled)),
    )


def source_of(metadata: str) -> tuple[str, str]:
    """The framework's name of an operation, and ``file:line``, out of an Instruction's metadata; "" for what is not
    there."""
    found = _SOURCE.fullmatch(metadata)
    return (found["operation"], found["source"] or "") if found else (metadata, "")


def _target_text(target: Target) -> str:
    return "the host CPU" if target.is_host else f"{target.vendor} {target.architecture}"


def _form(compiled: CompiledProgram) -> str:
    if compiled.native is not None:
        thread = "in the launching thread" if compiled.is_small else "on the thread of its device"
        return f"as native code without Python, {thread}"
    if compiled.target.is_host:
        return "as steps that Python runs one by one"
    firsts = {ordinal: str(outcome).partition("\n")[0] for ordinal, outcome in sorted(compiled.outcomes.items())}
    outcomes = [f"device {ordinal}: {first}" for ordinal, first in firsts.items()]
    return "; ".join(outcomes) or "as steps that Python runs, recorded as a graph after its first runs where it can be"


def _fallbacks(compiled: CompiledProgram) -> Iterator[str]:
    if compiled.native is None and compiled.target.is_host:
        yield (
            f"Python runs the whole program step by step, because: {compiled.not_native}. Write it with arrays of "
            "elements of at most 64 bits, and with fewer operations that the library has to compute"
        )
    has_loops = compiled.native is not None and any(note.kind == "control" for note in compiled.native.code.notes)
    if has_loops and not machine_code.is_available():
        yield f"small steps in loops are not compiled: unset {machine_code.VARIABLE}, and install llvmlite"


def _native_step(note: StepNote, roofline: Roofline | None) -> Step:
    flops, moved = note.work
    operation, source = source_of(note.metadata)
    fallback = ""
    if note.called is not None:
        fallback = (
            f"{note.called.opcode} of {note.called.shape} has no native form: PyTorch computes it, and each call takes "
            "Python's interpreter, so one call for all of the data is better than many"
        )
    seconds = roofline.seconds(flops, moved) if roofline else 0.0
    nest = print_nest(note.item) if isinstance(note.item, Region) else ""
    of = note.number, note.text, note.kind, note.provider
    return Step(*of, operation, source, flops, moved, seconds, fallback, nest)


def _plan_step(number: int, step: PlanStep, plan: Plan, target: Target) -> Step:
    instruction = step.instruction
    operation, source = source_of(instruction.metadata if instruction else "")
    found = _IMPLEMENTATION.search(step.text)
    is_generated = found is None and not target.is_host and " [" in step.text
    provider = found[1] if found else "triton" if is_generated else "torch" if step.enqueues else ""
    flops = moved = 0.0
    if step.enqueues and instruction is not None:
        cost = instruction_cost(instruction)
        flops = cost.flops + cost.transcendentals
        # A generated kernel is many instructions, whose arrays in between have no memory.
        moved = _slot_bytes(step, plan) if is_generated else cost.bytes_accessed
    fallback = ""
    if found and found[1] == Provider.REFERENCE:
        fallback = f"the reference kernels compute it, several library calls: {found['rest'].partition('; ')[2]}"
    kind = _kind_of_call(instruction)
    kind = "kernel" if is_generated else kind if step.enqueues else "view"
    seconds = target.roofline.seconds(flops, moved) if target.roofline else 0.0
    nest = print_nest(step.nest) if step.nest else ""
    return Step(number, step.text, kind, provider, operation, source, flops, moved, seconds, fallback, nest)


def _kind_of_call(instruction: Instruction | None) -> str:
    if instruction is not None and instruction.opcode in _CONTROL:
        return "control"
    return "collective" if instruction is not None and instruction.opcode in COLLECTIVES else "call"


def _slot_bytes(step: PlanStep, plan: Plan) -> float:
    shapes = (plan.shapes[slot] for slot in dict.fromkeys((*step.operands, *step.results)))
    return float(sum(shape.num_bytes for shape in shapes if isinstance(shape, ArrayShape)))


def _plan_buffers(plan: Plan) -> Iterator[Buffer]:
    for allocation in plan.allocations:
        shape, instruction = plan.shapes[allocation.slot], plan.steps[allocation.first].instruction
        if shape is not None:
            name = instruction.name if instruction else f"#{allocation.slot}"
            yield Buffer(name, shape.num_bytes, allocation.first, allocation.last)
