"""Which steps of a plan can be recorded in a graph, and how long they are: what segments.py goes by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flagos_backend.collectives import Communicator
from flagos_backend.ir.attributes import CustomCallAttributes, WhileAttributes
from flagos_backend.ir.effects import COLLECTIVES, HOST_CALLBACK
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.reference.aten import drops_out
from flagos_backend.runtime.control_flow import Conditional, ControlFlow, CountedLoop, While
from flagos_backend.runtime.plan import Step

# Beyond this a graph takes longer to make than the runs it saves.
MAX_STEPS = 100_000
# Draws of a hidden generator: a graph would draw the same numbers for ever.
_RANDOM_CALLS = (
    "rand",
    "dropout",
    "bernoulli",
    "multinomial",
    "normal",
    "exponential",
    "cauchy",
    "geometric",
    "poisson",
)
# What they call is plans with steps of their own.
_STRUCTURE = (Opcode.WHILE, Opcode.CONDITIONAL)
# The host looks whether they converged. LU, Cholesky and QR take a known number of steps, and nothing waits.
_ITERATES = frozenset({"flagos.eig", "flagos.eigh", "flagos.schur", "flagos.svd"})
# Where data decides, each device, or each group of them, may for itself.
MAY_DIFFER = "data says whether they do"


@dataclass(frozen=True)
class Limits:
    """What a recorder cannot record, each with the reason, or "": ``conditionals``, in which data decides what runs;
    ``rendezvous``, in which devices meet; ``unrun``, what has not run before."""

    conditionals: str = "its graphs have no conditional nodes"
    rendezvous: str = Communicator.no_recording
    unrun: str = "not all of it has run"


def has_run(step: Step) -> bool:
    """Whether all that ``step`` may run did."""
    if isinstance(step.kernel, ControlFlow) and len(step.kernel.ran) < len(step.nested):
        return False
    return all(map(has_run, _nested_steps(step)))


def meets(step: Step) -> bool:
    """Whether devices meet in it."""
    is_collective = step.instruction is not None and step.instruction.opcode in COLLECTIVES
    return is_collective or any(map(meets, _nested_steps(step)))


def reason_against(step: Step, limits: Limits) -> str:
    """Why ``step`` cannot be recorded, or ""."""
    instruction, weight = step.instruction, weight_of(step)
    if instruction is None:
        return ""
    if isinstance(step.kernel, While | Conditional):
        decided = f"{instruction.opcode} {instruction.name} goes on as data says"
        if limits.conditionals:
            return f"{decided}: {limits.conditionals}"
        if limits.unrun and len(step.kernel.ran) < len(step.nested):
            return f"{decided}, and {limits.unrun}"
        limits = replace(limits, rendezvous=MAY_DIFFER)
    if weight > MAX_STEPS:
        return f"{instruction.opcode} {instruction.name} is {weight} steps, more than {MAX_STEPS}"
    if reason := _reason_of(instruction, limits):
        return reason
    reasons = (reason_against(nested, limits) for nested in _nested_steps(step))
    return next(filter(None, reasons), "")


def may_stay_outside(instruction: Instruction) -> bool:
    """Whether what ``instruction`` becomes cannot be recorded, or not by every recorder."""
    if instruction.opcode in _STRUCTURE:
        decided = (
            instruction.opcode is Opcode.CONDITIONAL or instruction.attributes_as(WhileAttributes).trip_count is None
        )
        return decided or any(may_stay_outside(i) for called in instruction.called for i in called.instructions)
    return bool(_reason_of(instruction, Limits()))


def _reason_of(instruction: Instruction, limits: Limits) -> str:
    if instruction.opcode in COLLECTIVES:
        # The host reads how much goes where.
        is_ragged = instruction.opcode is Opcode.RAGGED_ALL_TO_ALL
        reason = Communicator.no_recording if is_ragged else limits.rendezvous
        return f"{instruction.opcode} {instruction.name} meets other devices: {reason}" if reason else ""
    if instruction.opcode is Opcode.RNG or _is_random(instruction):
        return f"{instruction.name} draws from a generator"
    attributes = instruction.attributes
    if isinstance(attributes, CustomCallAttributes):
        if attributes.target == HOST_CALLBACK:
            return f"{instruction.opcode} {instruction.name} calls the host"
        if attributes.target in _ITERATES:
            return f"{attributes.target} {instruction.name} waits to know whether it converged"
        if attributes.has_side_effect:
            return f"{instruction.opcode} {instruction.name} has a side effect"
    if instruction.opcode not in _STRUCTURE and any(map(_loops, instruction.called)):
        return f"{instruction.opcode} {instruction.name} loops in a scalar function as data says"
    return ""


def _loops(computation: Computation) -> bool:
    return any(i.opcode is Opcode.WHILE or any(map(_loops, i.called)) for i in computation.instructions)


def _is_random(instruction: Instruction) -> bool:
    attributes = instruction.attributes
    if not isinstance(attributes, CustomCallAttributes) or not attributes.target.startswith("aten::"):
        return False
    return any(word in attributes.target for word in _RANDOM_CALLS) or drops_out(instruction)


def _nested_steps(step: Step) -> Iterator[Step]:
    return itertools.chain.from_iterable(plan.steps for plan in step.nested)


def weight_of(step: Step) -> int:
    """How many steps enqueue something."""
    if not step.nested:
        return int(step.enqueues)
    iterations = step.kernel.trip_count if isinstance(step.kernel, CountedLoop) else 1
    # Each part that data decides on is preceded by setting its condition.
    conditions = len(step.nested) if isinstance(step.kernel, While | Conditional) else 0
    return conditions + iterations * sum(map(weight_of, _nested_steps(step)))
