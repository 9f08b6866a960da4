"""A compiled computation: a straight line of steps over numbered slots, run by one loop. Built from the IR with kernels
of the registry; the last stage before execution, called by runtime/bridge.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flagos_backend.errors import UnsupportedOpcode
from flagos_backend.ir.attributes import (
    ConstantAttributes,
    ParameterAttributes,
    TupleIndexAttributes,
    WhileAttributes,
)
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape, leaves
from flagos_backend.kernels.reference import registry, storage
from flagos_backend.kernels.reference.registry import Kernel, Run, Storage, Value
from flagos_backend.runtime import control_flow
from flagos_backend.runtime.needed import Program
from flagos_backend.runtime.ownership import (
    BORROWED,
    LoopSummary,
    Ownership,
    Place,
    Summary,
    call_results,
    close_loop,
    join,
    loop_results,
    parameter_root,
)

_CPU = torch.device("cpu")

# Slots of the leaves of a value that may be a tuple.
Tree = int | tuple["Tree", ...]


@dataclass(frozen=True, slots=True)
class Step:
    """``result`` is set to kernel(run, *operand slots); without operands (None) the kernel works on the slots itself.
    ``frees`` are the slots that nobody reads afterwards."""

    kernel: Callable[..., Any]
    operands: tuple[int, ...] | None
    result: int
    frees: tuple[int, ...]
    text: str
    nested: tuple[Plan, ...] = ()


@dataclass(frozen=True, slots=True)
class Home:
    """The slot in whose storage a result is made from the first step that fills it on, and what lies there first."""

    slot: int
    shape: ArrayShape

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """The same storage as the slot has it; ``output`` is row major."""
        return output.view(-1).view(storage.dtype_of(self.shape.element_type)).view(self.shape.dims)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """``run`` may be called by several threads at once. A value of a tuple shape is passed as its leaves, in order."""

    name: str
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    result_shapes: tuple[ArrayShape, ...]
    num_parameters: int
    summary: Summary
    homes: tuple[Home | None, ...]
    """For each result where it is made, if whoever runs the plan may say where that is."""
    _initial: list[Any] = field(repr=False)
    _compiled: tuple[tuple[Callable[..., Any], tuple[int, ...] | None, int, tuple[int, ...]], ...] = field(repr=False)

    @staticmethod
    def build(computation: Computation, donated: Collection[int] = (), device: torch.device = _CPU) -> Plan:
        """The plan of an entry computation.

        ``donated``: leaves of the parameters, counted flat, whose storage the plan may write over and hand on. Every
        result comes out row major, in storage that it shares with no argument (donated ones excepted), no constant and
        no other result. Raises the errors of errors.py for what has no kernel.
        """
        return Builder(device).build(computation, donated, entry=True)

    @staticmethod
    def nested(computation: Computation, device: torch.device = _CPU) -> Plan:
        """The plan of a computation that a kernel calls: writes over no argument, and results may share storage."""
        return Builder(device).build(computation, ())

    @staticmethod
    def lift(computation: Computation) -> Plan:
        """The plan of a scalar function (reducer, comparator, map) that works on whole arrays, element by element.

        Arguments are arrays of shapes that broadcast; a result that depends on none of them is 0-d. Raises
        UnsupportedOpcode for an instruction that is not elementwise.
        """
        # Kernels call this while they are prepared, under the device that they are prepared for.
        return Builder(torch.get_default_device(), lifted=True).build(computation, ())

    def run(self, run: Run, arguments: list[Any], outputs: Sequence[Any] = ()) -> list[Any]:
        """Executes on the flat ``arguments`` and returns the flat results. Empties ``arguments``, so that the plan can
        free each at its last use. Callers enter torch.inference_mode() once per thread.

        ``outputs``: nothing, or an array for each result, where it is put if it has a home; others lie elsewhere.
        """
        if len(arguments) != self.num_parameters:
            raise ValueError(f"{self.name} takes {self.num_parameters} arrays, got {len(arguments)}")
        values = self._initial.copy()
        values[: self.num_parameters] = arguments
        arguments.clear()
        if outputs:
            for home, output in zip(self.homes, outputs, strict=True):
                if home is not None:
                    values[home.slot] = home.of(output)
        for kernel, operands, result, frees in self._compiled:
            if operands is None:
                kernel(run, values)
            else:
                values[result] = kernel(run, *[values[slot] for slot in operands])
            for slot in frees:
                values[slot] = None
        return [values[slot] for slot in self.results]

    def step_of(self, failure: Exception) -> str:
        """What the step, or the nested plan's step, computes that ``failure`` came out of; "" when it was none."""
        found = ""
        trace = failure.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is Plan.run.__code__:
                kernel, plan = trace.tb_frame.f_locals.get("kernel"), trace.tb_frame.f_locals["self"]
                found = next((step.text for step in plan.steps if step.kernel is kernel), found)
            trace = trace.tb_next
        return found

    def explain(self) -> str:
        """One line for each step: what it computes, what it writes over, what is free afterwards."""
        return "\n".join(self._lines(""))

    def _lines(self, indent: str) -> Iterator[str]:
        yield f"{indent}{self.name}: {self.num_parameters} parameters, {len(self.steps)} steps"
        for step in self.steps:
            freed = f"  frees {', '.join(f'#{slot}' for slot in step.frees)}" if step.frees else ""
            yield f"{indent}  {step.text}{freed}"
            for plan in step.nested:
                yield from plan._lines(indent + "    ")
        yield f"{indent}  returns {', '.join(f'#{slot}' for slot in self.results)}"


@dataclass(frozen=True, slots=True)
class Pending:
    """A step before it is known what dies at it. ``finish`` decides on storage and defines the results' places."""

    instruction: Instruction
    operands: tuple[int, ...]
    results: tuple[int, ...]
    finish: Callable[[Pending, Ownership, frozenset[int]], tuple[Callable[..., Any], bool, str]]
    nested: tuple[Plan, ...] = ()


def _flatten(tree: Tree) -> Iterator[int]:
    if isinstance(tree, int):
        yield tree
    else:
        for branch in tree:
            yield from _flatten(branch)


def _flat_values(value: Value) -> Iterator[Value]:
    # A token is the empty tuple and a leaf; an empty tuple shape has no leaves and is not spread.
    if isinstance(value, torch.Tensor) or not value:
        yield value
    else:
        for element in value:
            yield from _flat_values(element)


def _contiguous(run: Run, value: torch.Tensor) -> torch.Tensor:
    return value.contiguous()


def _pack(template: Tree) -> Kernel:
    """Makes the tuple value of flat operands."""
    return lambda run, *values: _packed(template, iter(values))


def _packed(tree: Tree, values: Iterator[Value]) -> Value:
    return next(values) if isinstance(tree, int) else tuple(_packed(t, values) for t in tree)


@dataclass(frozen=True, slots=True)
class PreparedKernel:
    """``is_reference``: what the registry promises of the instruction's storage, in place and not, holds for it.
    ``into``: as of kernels.implementation.Variant. ``note`` is for explain."""

    kernel: Kernel
    is_reference: bool
    note: str = ""
    into: Kernel | None = None


class Builder:
    """Builds one plan. Calls are inlined, tuples are resolved to the slots of their leaves and cost no step."""

    def __init__(self, device: torch.device, lifted: bool = False, program: Program | None = None) -> None:
        self._device = device
        self._lifted = lifted
        self._program = program or Program()
        self._initial: list[Any] = []
        self._pending: list[Pending] = []
        self._constants: list[int] = []
        self._token: int | None = None
        self._num_parameters = 0
        self._homes: dict[int, Home] = {}  # by the root of the storage

    def build(self, computation: Computation, owned: Collection[int], entry: bool = False) -> Plan:
        parameters = []
        for parameter in computation.parameters:
            parameters.append(self._new_slots(parameter.shape))
        self._num_parameters = len(self._initial)
        tree = self.inline(computation, parameters)
        results = tuple(_flatten(tree))
        shapes = tuple(leaves(computation.root.shape))
        return self._finish(computation, results, shapes, owned, entry)

    def nested(self) -> Builder:
        """A builder of the same kind, for a computation that a step of this one runs."""
        return Builder(self._device, self._lifted, self._program)

    @property
    def device(self) -> torch.device:
        return self._device

    def add(self, pending: Pending) -> None:
        self._pending.append(pending)

    def offer_home(self, owner: Ownership, slot: int, shape: ArrayShape) -> None:
        """The step that makes ``slot``, in storage of its own, takes what it finds in it for that storage."""
        (root,) = owner.places[slot].roots
        self._homes[root] = Home(slot, shape)

    def prepare(self, instruction: Instruction) -> PreparedKernel:
        """What computes an instruction that is no structure."""
        return PreparedKernel(registry.prepare(instruction), True)

    # ---- From instructions to pending steps

    def new_slot(self, value: Any = None) -> int:
        self._initial.append(value)
        return len(self._initial) - 1

    def _new_slots(self, shape: Shape) -> Tree:
        if isinstance(shape, TupleShape):
            return tuple(self._new_slots(element) for element in shape.elements)
        return self.new_slot()

    def _token_slot(self) -> int:
        if self._token is None:
            self._token = self._constant(())
        return self._token

    def _constant(self, value: Any) -> int:
        slot = self.new_slot(value)
        self._constants.append(slot)
        return slot

    def inline(self, computation: Computation, arguments: Sequence[Tree]) -> Tree:
        trees: dict[int, Tree] = {}
        for instruction in self._program.needed(computation):
            self._program.count(instruction)
            operands = [trees[id(operand)] for operand in instruction.operands]
            trees[id(instruction)] = self.emit(instruction, operands, arguments)
        return trees[id(computation.root)]

    def emit(self, instruction: Instruction, operands: list[Tree], arguments: Sequence[Tree]) -> Tree:
        match instruction.opcode:
            case Opcode.PARAMETER:
                return arguments[instruction.attributes_as(ParameterAttributes).number]
            case Opcode.CONSTANT:
                return self._emit_constant(instruction)
            case Opcode.TUPLE:
                return tuple(operands)
            case Opcode.COPY | Opcode.ADD_DEPENDENCY | Opcode.OPTIMIZATION_BARRIER:
                return operands[0]
            case Opcode.GET_TUPLE_ELEMENT:
                tree = operands[0]
                assert isinstance(tree, tuple)
                return tree[instruction.attributes_as(TupleIndexAttributes).index]
            case Opcode.AFTER_ALL:
                return self._token_slot()
            case Opcode.CALL:
                return self.inline(instruction.called[0], operands)
            case Opcode.WHILE:
                return self._emit_while(instruction, operands[0])
            case Opcode.CONDITIONAL:
                return self._emit_conditional(instruction, operands)
            case _ if self._lifted:
                return self._emit_lifted(instruction, operands)
            case _:
                return self._emit_kernel(instruction, operands)

    def _emit_constant(self, instruction: Instruction) -> Tree:
        shape = instruction.shape
        assert isinstance(shape, ArrayShape)
        if shape.element_type is ElementType.TOKEN:
            return self._token_slot()
        data = instruction.attributes_as(ConstantAttributes).data
        return self._constant(storage.from_bytes(data, shape).to(self._device))

    def _emit_lifted(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        opcode = instruction.opcode
        shapes = [instruction.shape, *(operand.shape for operand in instruction.operands)]
        scalar = all(isinstance(shape, ArrayShape) and not shape.dims for shape in shapes)
        if scalar and opcode in (Opcode.BROADCAST, Opcode.RESHAPE, Opcode.TRANSPOSE):
            return operands[0]
        if scalar and opcode is Opcode.MAP:
            return self.inline(instruction.called[0], operands)
        if not scalar or not registry.is_elementwise(opcode):
            reason = "inside a scalar function (reducer, comparator, map) every instruction must be elementwise"
            raise UnsupportedOpcode.at(instruction, opcode=opcode, reason=reason)
        return self._emit_kernel(instruction, operands)

    def _emit_kernel(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        prepared = self.prepare(instruction)
        if prepared.kernel is registry.identity:
            return operands[0]
        flat = tuple(
            operand if isinstance(operand, int) else self._packed(instruction, operand) for operand in operands
        )
        results = self._new_slots(instruction.shape)

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            chosen, note = _choose_storage(pending, prepared, owner, frozenset() if self._lifted else dying)
            places = [owner.places[slot] for slot in pending.results]
            if prepared.into is not None and all(len(place.roots) == 1 for place in places):
                for slot, shape in zip(pending.results, leaves(instruction.shape), strict=True):
                    self.offer_home(owner, slot, shape)
                return _at_home(prepared.into, flat, pending.results), True, prepared.note + note
            if isinstance(results, int):
                return chosen, False, prepared.note + note
            return _spread(chosen, pending), True, prepared.note + note

        self.add(Pending(instruction, flat, tuple(_flatten(results)), finish))
        return results

    def _packed(self, instruction: Instruction, tree: Tree) -> int:
        slot = self.new_slot()
        kernel = _pack(tree)

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            owner.define(slot, owner.union(pending.operands))
            return kernel, False, " operand tuple"

        self.add(Pending(instruction, tuple(_flatten(tree)), (slot,), finish))
        return slot

    def _emit_while(self, instruction: Instruction, operand: Tree) -> Tree:
        condition, body = instruction.called
        operands = tuple(_flatten(operand))
        results = self._new_slots(instruction.shape)
        flat = tuple(_flatten(results))
        condition_plan = self.nested().build(condition, ())
        body_plan = self.nested().build(body, () if self._lifted else range(len(operands)))
        loop = close_loop(body_plan.summary)
        trip_count = instruction.attributes_as(WhileAttributes).trip_count
        if self._program.any_side_effect(condition):
            trip_count = None  # the condition must run, whatever it says

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            copied = _hand_over(owner, loop.overwrites, operands, dying)
            initial = [_after_copy(owner, slot, index in copied) for index, slot in enumerate(operands)]
            for slot, place in zip(flat, loop_results(owner, loop, initial), strict=True):
                owner.define(slot, place)
            if self._lifted:
                return control_flow.lifted_while(condition_plan.run, body_plan.run, operands, flat), True, ""
            kernel = control_flow.while_loop(
                condition_plan.run, body_plan.run, operands, flat, tuple(dying), copied, sorted(loop.copied), trip_count
            )
            return kernel, True, _while_note(loop, copied, trip_count)

        self.add(Pending(instruction, operands, flat, finish, (condition_plan, body_plan)))
        return results

    def _emit_conditional(self, instruction: Instruction, operands: list[Tree]) -> Tree:
        selector = operands[0]
        assert isinstance(selector, int)
        arguments = [tuple(_flatten(operand)) for operand in operands[1:]]
        results = self._new_slots(instruction.shape)
        flat = tuple(_flatten(results))
        plans = tuple(
            self.nested().build(branch, () if self._lifted else range(len(slots)))
            for branch, slots in zip(instruction.called, arguments, strict=True)
        )
        branches = [plan.run for plan in plans]

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            copied, outcomes = [], []
            for plan, slots in zip(plans, arguments, strict=True):
                copied.append(_hand_over(owner, plan.summary.overwrites, slots, dying))
                places = [_after_copy(owner, slot, index in copied[-1]) for index, slot in enumerate(slots)]
                outcomes.append(call_results(owner, plan.summary, places))
            for slot, place in zip(flat, join(outcomes), strict=True):
                owner.define(slot, place)
            if self._lifted:
                return control_flow.lifted_conditional(selector, branches, arguments, flat), True, ""
            return control_flow.conditional(selector, branches, arguments, flat, tuple(dying), copied), True, ""

        slots = (selector, *(slot for branch in arguments for slot in branch))
        self.add(Pending(instruction, slots, flat, finish, plans))
        return results

    # ---- From pending steps to the plan

    def _finish(
        self,
        computation: Computation,
        results: tuple[int, ...],
        shapes: tuple[ArrayShape, ...],
        owned: Collection[int],
        entry: bool,
    ) -> Plan:
        owner = Ownership(owned)
        for number in range(self._num_parameters):
            owner.define(number, Place(frozenset({parameter_root(number)})))
        for slot in self._constants:
            owner.define(slot, Place(frozenset({BORROWED})))
        # Their closures hold this builder: let go of, no garbage collector has to find it.
        pendings, self._pending = self._pending, []
        last_use = {slot: index for index, pending in enumerate(pendings) for slot in pending.operands}
        kept = {*results, *self._constants}
        steps = [self._finish_step(i, p, owner, last_use, kept) for i, p in enumerate(pendings)]
        homes: tuple[Home | None, ...] = (None,) * len(results)
        if entry:
            results = self._own_results(results, shapes, owner, owned, steps)
            homes = tuple(self._home(owner.places.get(slot)) for slot in results)
        unused = tuple(s for s in range(self._num_parameters) if s not in last_use and s not in kept)
        if unused and steps:
            steps[0] = replace(steps[0], frees=(*steps[0].frees, *unused))
        compiled = tuple((step.kernel, step.operands, step.result, step.frees) for step in steps)
        return Plan(
            computation.name,
            tuple(steps),
            results,
            shapes,
            self._num_parameters,
            owner.summary(results),
            homes,
            self._initial,
            compiled,
        )

    def _home(self, place: Place | None) -> Home | None:
        """Steps write over operands of their own size only, and share them whole or with a root of their own."""
        if place is None or len(place.roots) != 1:
            return None
        return self._homes.get(next(iter(place.roots)))

    def _finish_step(
        self, index: int, pending: Pending, owner: Ownership, last_use: dict[int, int], kept: set[int]
    ) -> Step:
        dying = frozenset(slot for slot in pending.operands if last_use[slot] == index and slot not in kept)
        kernel, on_slots, note = pending.finish(pending, owner, dying)
        frees = sorted(dying | {slot for slot in pending.results if slot not in last_use and slot not in kept})
        for slot in frees:
            owner.release(slot)
        results = ", ".join(f"#{slot}" for slot in pending.results)
        operands = ", ".join(f"#{slot}" for slot in pending.operands)
        instruction = pending.instruction
        text = f"{results} = {instruction.name}: {instruction.shape} {instruction.opcode}({operands}){note}"
        return Step(
            kernel,
            None if on_slots else pending.operands,
            pending.results[0] if pending.results else -1,
            tuple(frees),
            text,
            pending.nested,
        )

    def _own_results(
        self,
        results: tuple[int, ...],
        shapes: tuple[ArrayShape, ...],
        owner: Ownership,
        owned: Collection[int],
        steps: list[Step],
    ) -> tuple[int, ...]:
        """Adds the steps that give every result row-major storage of its own."""
        allowed = {parameter_root(number) for number in owned}
        taken: set[int] = set()
        final = []
        for slot, shape in zip(results, shapes, strict=True):
            if shape.element_type is ElementType.TOKEN:
                final.append(slot)
                continue
            place = owner.places[slot]
            borrowed = any(root <= 0 and root not in allowed for root in place.roots)
            copies = borrowed or not place.distinct or not taken.isdisjoint(place.roots)
            taken |= place.roots
            target = self.new_slot()
            owner.define(target, Place(frozenset({owner.new_root()})) if copies else place)
            kernel: Kernel = control_flow.owned_copy if copies else _contiguous
            frees = () if slot in results[len(final) + 1 :] or slot in self._constants else (slot,)
            text = f"#{target} = {'copy' if copies else 'row major'} of #{slot}"
            steps.append(Step(kernel, (slot,), target, frees, text))
            final.append(target)
        return tuple(final)


def _choose_storage(
    pending: Pending, prepared: PreparedKernel, owner: Ownership, dying: frozenset[int]
) -> tuple[Kernel, str]:
    """The in-place variant when it is safe, else the kernel itself; defines where the results lie."""
    variant = registry.prepare_in_place(pending.instruction) if prepared.is_reference else None
    if variant is not None:
        reused = [pending.operands[number] for number in variant.operands]
        if all(owner.may_overwrite(slot, pending.operands, dying) for slot in reused):
            for slot, result in zip(reused, pending.results, strict=True):
                owner.overwrite(slot)
                owner.define(result, owner.places[slot])
            return variant.kernel, f" over {', '.join(f'#{slot}' for slot in reused)}"
    kind = registry.storage_of(pending.instruction)
    shared = Place(frozenset()) if kind is Storage.FRESH else owner.union(pending.operands)
    for result in pending.results:
        distinct = shared.distinct and kind is not Storage.SHARED
        owner.define(result, Place(shared.roots | {owner.new_root()}, distinct))
    return prepared.kernel, ""


def _at_home(into: Kernel, operands: Sequence[int], results: Sequence[int]) -> Kernel:
    """Computes into what the results' slots hold already, if anything."""

    def run_at_home(run: Run, values: list[Any]) -> None:
        outcome = into(run, [values[slot] for slot in results], *[values[slot] for slot in operands])
        for slot, value in zip(results, _flat_values(outcome), strict=True):
            values[slot] = value

    return run_at_home


def _spread(kernel: Kernel, pending: Pending) -> Kernel:
    """Puts the leaves of a tuple result into their slots."""
    operands, results = pending.operands, pending.results

    def run_for_effect(run: Run, values: list[Any]) -> None:
        kernel(run, *[values[slot] for slot in operands])

    if not results:  # The empty tuple of a callback without results, which looks like a token.
        return run_for_effect

    def run_spread(run: Run, values: list[Any]) -> None:
        outcome = kernel(run, *[values[slot] for slot in operands])
        for slot, value in zip(results, _flat_values(outcome), strict=True):
            values[slot] = value

    return run_spread


def _hand_over(
    owner: Ownership, overwrites: frozenset[int], slots: Sequence[int], dying: frozenset[int]
) -> tuple[int, ...]:
    """Gives up the arguments that a callee writes over; returns those that it must be given copies of instead."""
    copied = []
    for index in sorted(overwrites):
        if owner.may_overwrite(slots[index], slots, dying):
            owner.overwrite(slots[index])
        else:
            copied.append(index)
    return tuple(copied)


def _after_copy(owner: Ownership, slot: int, copied: bool) -> Place:
    return Place(frozenset({owner.new_root()})) if copied else owner.places[slot]


def _while_note(loop: LoopSummary, copied: Sequence[int], trip_count: int | None) -> str:
    parts = [f"{trip_count} turns"] if trip_count is not None else []
    for label, indices in (("over", loop.overwrites), ("copies first", copied), ("copies each turn", loop.copied)):
        if indices:
            parts.append(f"{label} {', '.join(map(str, sorted(indices)))}")
    return f" [{'; '.join(parts)}]" if parts else ""
