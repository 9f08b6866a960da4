"""Builds plans from the IR, with kernels of the registry: calls are inlined, tuples resolved to slots, and each step
written over what dies at it, where that is safe. Between passes and plan.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flagos_backend.compile.ownership import (
    BORROWED,
    LoopSummary,
    Ownership,
    StorageSet,
    Summary,
    after_copy,
    call_results,
    close_loop,
    fresh_results,
    hand_over,
    is_own,
    join,
    kept_arguments,
    loop_results,
    parameter_root,
)
from flagos_backend.compile.plan_memory import (
    Follow,
    Made,
    PlanMemory,
    StepMemory,
    followed_conditional,
    followed_loop,
)
from flagos_backend.ir.attributes import (
    ConstantAttributes,
    ParameterAttributes,
    TupleIndexAttributes,
    WhileAttributes,
)
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.instruction_count import InstructionCount
from flagos_backend.ir.library_calls import runs_alone
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape, leaves
from flagos_backend.kernels.reference import registry, storage
from flagos_backend.kernels.reference.registry import Kernel, Storage
from flagos_backend.loop_ir.region import Region
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime import control_flow, library_threads
from flagos_backend.runtime.plan import Allocation, Plan, ResultBuffer, Step
from flagos_backend.runtime.slots import Tree, contiguous, flatten, in_buffers, pack, spread


def build_plan(computation: Computation, donated: Collection[int] = (), device: torch.device | None = None) -> Plan:
    """The plan of an entry computation.

    ``device``: the host unless given. ``donated``: leaves of the parameters, counted flat, whose storage the plan may
    write over and hand on. Every result comes out row major, in storage that it shares with no argument (donated ones
    excepted), no constant and no other result. Raises the errors of errors.py for what has no kernel.
    """
    return Builder(device or torch.device("cpu")).build(computation, donated, entry=True)


@dataclass(frozen=True, slots=True)
class Pending:
    """A step before it is known what dies at it. ``finish`` decides on storage and defines the results' places, and
    may add to ``nested``. ``instruction``: None for a step that computes nothing, which ``finish`` describes.
    ``keeps``: slots that nobody writes over before it, though it does not read them. ``nest``: as of Step."""

    instruction: Instruction | None
    operands: tuple[int, ...]
    results: tuple[int, ...]
    finish: Callable[[Pending, Ownership, frozenset[int]], tuple[Callable[..., Any], bool, str]]
    nested: Sequence[Plan] = ()
    enqueues: bool = True
    keeps: tuple[int, ...] = ()
    nest: Region | None = None


@dataclass(frozen=True, slots=True)
class PreparedKernel:
    """``is_reference``: what the registry promises of the instruction's storage, in place and not, holds for it.
    ``into``, ``in_place``: as of kernels.implementation.Variant. ``note`` is for explain."""

    kernel: Kernel
    is_reference: bool
    note: str = ""
    into: Kernel | None = None
    in_place: registry.InPlaceKernel | None = None


class Builder:
    """Builds one plan. Calls are inlined, tuples are resolved to the slots of their leaves and cost no step."""

    def __init__(self, device: torch.device, outer: Builder | None = None) -> None:
        self._device = device
        self._count: InstructionCount = outer._count if outer else InstructionCount()
        self._effects: Effects = outer._effects if outer else Effects()
        # Of what was built.
        self.summary = Summary(frozenset(), ())
        self.memory = PlanMemory(0, (), (), ())
        self._initial: list[Any] = []
        self._shapes: list[ArrayShape | None] = []
        self._pending: list[Pending] = []
        self._follows: dict[int, Follow] = {}  # of steps that run plans, by the identity of the pending step
        self._constants: list[int] = []
        self._token: int | None = None
        self._parameters: range = range(0)
        self._result_buffers: dict[int, ResultBuffer] = {}  # by the root of the storage

    def build(self, computation: Computation, owned: Collection[int], entry: bool = False) -> Plan:
        return self.begin(computation, entry)(owned)

    def begin(self, computation: Computation, entry: bool = False) -> Callable[[Collection[int]], Plan]:
        """What makes the plan, once it is known which parameters it may write over."""
        results = tuple(flatten(self.inline(computation, self._add_parameters(computation))))
        shapes = tuple(leaves(computation.root.shape)) if entry else None
        return lambda owned: self._finish(computation.name, results, owned, shapes)

    def build_iteration(self, condition: Computation, body: Computation, owned: Collection[int]) -> Plan:
        """An iteration of a loop, and whether there is another one: the last result."""
        state = self.inline(body, self._add_parameters(body))
        another = self.inline(condition, (state,))
        return self._finish(f"{body.name}, {condition.name}", (*flatten(state), *flatten(another)), owned)

    def _add_parameters(self, computation: Computation) -> list[Tree]:
        slots = [self._new_slots(parameter.shape) for parameter in computation.parameters]
        self._parameters = range(len(self._initial))
        return slots

    def nested(self) -> Builder:
        """A builder of the same kind, for a computation that a step of this one runs."""
        return Builder(self._device, self)

    @property
    def device(self) -> torch.device:
        return self._device

    def add(self, pending: Pending) -> None:
        self._pending.append(pending)

    def offer_buffer(self, owner: Ownership, slot: int, shape: ArrayShape) -> None:
        """The step that makes ``slot``, in storage of its own, takes what it finds in it for that storage."""
        (root,) = owner.storages[slot].roots
        self._result_buffers[root] = ResultBuffer(slot, shape)

    def prepare(self, instruction: Instruction) -> PreparedKernel:
        """What computes an instruction that is no structure."""
        kernel = registry.prepare(instruction)
        # What computes nothing stays recognisable: its result is its operand.
        if kernel is not registry.identity and self._device.type == "cpu" and runs_alone(instruction):
            kernel = library_threads.alone(kernel)
        return PreparedKernel(kernel, True)

    # ---- From instructions to pending steps

    def new_slot(self, shape: ArrayShape | None, value: Any = None) -> int:
        """``shape`` None: for a tuple."""
        self._initial.append(value)
        self._shapes.append(shape)
        return len(self._initial) - 1

    def _new_slots(self, shape: Shape) -> Tree:
        if isinstance(shape, TupleShape):
            return tuple(self._new_slots(element) for element in shape.elements)
        return self.new_slot(shape)

    def token_slot(self) -> int:
        if self._token is None:
            self._token = self._constant(ArrayShape(ElementType.TOKEN), ())
        return self._token

    def _constant(self, shape: ArrayShape, value: Any) -> int:
        slot = self.new_slot(shape, value)
        self._constants.append(slot)
        return slot

    def inline(self, computation: Computation, arguments: Sequence[Tree]) -> Tree:
        trees: dict[int, Tree] = {}
        for instruction in self._effects.needed(computation):
            self._count.add(instruction)
            operands = [trees[id(operand)] for operand in instruction.operands]
            trees[id(instruction)] = self.emit(instruction, operands, arguments)
        return trees[id(computation.root)]

    def emit(self, instruction: Instruction, operands: list[Tree], arguments: Sequence[Tree]) -> Tree:
        return _EMIT.get(instruction.opcode, Builder._emit_kernel)(self, instruction, operands, arguments)

    def _emit_constant(self, instruction: Instruction, *_: Sequence[Tree]) -> Tree:
        shape = instruction.shape
        assert isinstance(shape, ArrayShape)
        if shape.element_type is ElementType.TOKEN:
            return self.token_slot()
        data = instruction.attributes_as(ConstantAttributes).data
        return self._constant(shape, storage.from_bytes(data, shape).to(self._device))

    def _emit_call(self, instruction: Instruction, operands: list[Tree], _: Sequence[Tree]) -> Tree:
        return self.inline(instruction.called[0], operands)

    def _emit_kernel(self, instruction: Instruction, operands: list[Tree], _: Sequence[Tree]) -> Tree:
        prepared = self.prepare(instruction)
        if prepared.kernel is registry.identity:
            return operands[0]
        flat = tuple(
            operand if isinstance(operand, int) else self._packed(instruction, operand) for operand in operands
        )
        results = self._new_slots(instruction.shape)

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            chosen, note = _choose_storage(instruction, pending, prepared, owner, dying)
            places = [owner.storages[slot] for slot in pending.results]
            if prepared.into is not None and all(len(place.roots) == 1 for place in places):
                for slot, shape in zip(pending.results, leaves(instruction.shape), strict=True):
                    self.offer_buffer(owner, slot, shape)
                return in_buffers(prepared.into, flat, pending.results), True, prepared.note + note
            if isinstance(results, int):
                return chosen, False, prepared.note + note
            return spread(chosen, pending.operands, pending.results), True, prepared.note + note

        self.add(Pending(instruction, flat, tuple(flatten(results)), finish))
        return results

    def _packed(self, instruction: Instruction, tree: Tree) -> int:
        slot = self.new_slot(None)
        kernel = pack(tree)

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            owner.define(slot, owner.union(pending.operands))
            return kernel, False, " operand tuple"

        self.add(Pending(instruction, tuple(flatten(tree)), (slot,), finish, enqueues=False))
        return slot

    def _emit_while(self, instruction: Instruction, trees: list[Tree], _: Sequence[Tree]) -> Tree:
        condition, body = instruction.called
        operands = tuple(flatten(trees[0]))
        results = self._new_slots(instruction.shape)
        flat = tuple(flatten(results))
        trip_count = instruction.attributes_as(WhileAttributes).trip_count
        if self._effects.of_computation(condition):
            trip_count = None  # the condition must run, whatever it says
        iteration, first, owned = self.nested(), self.nested(), range(len(operands))
        if trip_count is None:
            plans: tuple[Plan, ...] = (
                first.build(condition, ()),
                iteration.build_iteration(condition, body, owned),
            )
            # Nobody looks at the last result again once the next iteration may write over it.
            loop = close_loop(replace(iteration.summary, results=iteration.summary.results[:-1]))
        else:
            plans = (iteration.build(body, owned),)
            loop = close_loop(iteration.summary)
        sizes = [shape.num_bytes for shape in leaves(instruction.shape)]

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            copied = hand_over(owner, loop.overwrites, operands, dying)
            initial = [after_copy(owner, slot, index in copied) for index, slot in enumerate(operands)]
            for slot, place in zip(flat, loop_results(owner, loop, initial, runs=bool(trip_count)), strict=True):
                owner.define(slot, place)
            callees = tuple(plan.run for plan in plans)
            copies = control_flow.Copies(tuple(dying), copied, tuple(sorted(loop.copied)))
            asked = first.memory if trip_count is None else None
            self._follows[id(pending)] = followed_loop(iteration.memory, asked, trip_count, operands, sizes, copies)
            if trip_count is None:
                iteration_plan = plans[1]
                handed_on = zip(iteration_plan.parameters, iteration_plan.results, strict=False)
                unchanged = frozenset(number for number, (before, after) in enumerate(handed_on) if before == after)
                kernel: Callable[..., Any] = control_flow.While(callees, operands, flat, copies, unchanged)
            else:
                kernel = control_flow.CountedLoop(callees, operands, flat, copies, trip_count)
            return kernel, True, _while_note(loop, copied, trip_count)

        self.add(Pending(instruction, operands, flat, finish, plans))
        return results

    def _emit_conditional(self, instruction: Instruction, operands: list[Tree], _: Sequence[Tree]) -> Tree:
        selector = operands[0]
        assert isinstance(selector, int)
        arguments = [tuple(flatten(operand)) for operand in operands[1:]]
        results = self._new_slots(instruction.shape)
        flat = tuple(flatten(results))
        builders = [self.nested() for _ in arguments]
        begun = [builder.begin(branch) for builder, branch in zip(builders, instruction.called, strict=True)]
        plans: list[Plan] = []

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            outcomes = []
            for builder, complete, slots in zip(builders, begun, arguments, strict=True):
                owned = [n for n, slot in enumerate(slots) if owner.may_overwrite(slot, slots, dying)]
                plans.append(complete(owned))
                for number in builder.summary.overwrites:
                    owner.overwrite(slots[number])
                outcomes.append(call_results(owner, builder.summary, [owner.storages[slot] for slot in slots]))
            branches = tuple(plan.run for plan in plans)
            shapes = tuple(leaves(instruction.shape))
            fresh = fresh_results(outcomes, [owner.storages[slot] for slot in pending.operands])
            for number, (slot, place) in enumerate(zip(flat, join(outcomes), strict=True)):
                has_buffer = number in fresh and shapes[number].element_type is not ElementType.TOKEN
                owner.define(slot, StorageSet(frozenset({owner.new_root()}), place.distinct) if has_buffer else place)
                if has_buffer:
                    self.offer_buffer(owner, slot, shapes[number])
            kept = kept_arguments([builder.summary for builder in builders], arguments)
            memories, sizes = [builder.memory for builder in builders], [shape.num_bytes for shape in shapes]
            self._follows[id(pending)] = followed_conditional(memories, arguments, sizes, tuple(dying))
            return control_flow.Conditional(branches, selector, arguments, flat, shapes, kept, tuple(dying)), True, ""

        slots = (selector, *(slot for branch in arguments for slot in branch))
        self.add(Pending(instruction, slots, flat, finish, plans))
        return results

    # ---- From pending steps to the plan

    def _finish(
        self,
        name: str,
        results: tuple[int, ...],
        owned: Collection[int],
        entry: tuple[ArrayShape, ...] | None = None,
    ) -> Plan:
        """``entry``: the shapes of the results of an entry computation."""
        owner = Ownership(owned)
        for number in self._parameters:
            owner.define(number, StorageSet(frozenset({parameter_root(number)})))
        for slot in self._constants:
            owner.define(slot, StorageSet(frozenset({BORROWED})))
        # Their closures hold this builder: let go of, no garbage collector has to find it.
        pendings, self._pending = self._pending, []
        last_use = {slot: index for index, p in enumerate(pendings) for slot in (*p.operands, *p.keeps)}
        kept = {*results, *self._constants}
        steps = [self._finish_step(i, p, owner, last_use, kept) for i, p in enumerate(pendings)]
        follows = {index: self._follows.pop(id(p)) for index, p in enumerate(pendings) if id(p) in self._follows}
        if entry is not None:
            results = self._own_results(results, entry, owner, owned, steps)
        unused = tuple(s for s in self._parameters if s not in last_use and s not in kept)
        if unused and steps:
            steps[0] = replace(steps[0], frees=(*steps[0].frees, *unused))
        self.summary = owner.summary(results)
        result_buffers = {
            slot: result_buffer
            for slot, place in owner.storages.items()
            if (result_buffer := self._result_buffer(place))
        }
        allocations = tuple(_allocations(owner, steps, results))
        self.memory = PlanMemory(len(self._initial), self._parameters, results, self._followed(steps, owner, follows))
        peak = self.memory.temporary_bytes if entry is not None else 0
        return Plan(
            name,
            tuple(steps),
            self._parameters,
            results,
            result_buffers,
            self._shapes,
            self._initial,
            allocations,
            peak,
        )

    def _followed(
        self, steps: Sequence[Step], owner: Ownership, follows: Mapping[int, Follow]
    ) -> tuple[StepMemory, ...]:
        """Which storage each result of ``steps`` lies in."""
        known = {root for slot in self._parameters for root in owner.storages[slot].roots}

        def made(step: Step, slot: int) -> Made:
            roots = owner.storages[slot].roots
            takes = step.enqueues and any(root not in known for root in roots if is_own(root))
            known.update(roots)
            shares = tuple(
                operand
                for operand in dict.fromkeys(step.operands)
                if not roots.isdisjoint(owner.storages[operand].roots)
            )
            shape = self._shapes[slot] if takes else None
            return Made(slot, shape.num_bytes if shape else 0, shares)

        return tuple(
            StepMemory(tuple(made(step, slot) for slot in step.results), step.frees, follows.get(index))
            for index, step in enumerate(steps)
        )

    def _result_buffer(self, place: StorageSet) -> ResultBuffer | None:
        """Steps write over operands of their own size only, and share them whole or with a root of their own."""
        return self._result_buffers.get(next(iter(place.roots))) if len(place.roots) == 1 else None

    def _finish_step(
        self, index: int, pending: Pending, owner: Ownership, last_use: dict[int, int], kept: set[int]
    ) -> Step:
        used = (*pending.operands, *pending.keeps)
        dying = frozenset(slot for slot in used if last_use[slot] == index and slot not in kept)
        kernel, on_slots, note = pending.finish(pending, owner, dying)
        frees = sorted(dying | {slot for slot in pending.results if slot not in last_use and slot not in kept})
        for slot in frees:
            owner.release(slot)
        results = ", ".join(f"#{slot}" for slot in pending.results)
        operands = ", ".join(f"#{slot}" for slot in pending.operands)
        instruction = pending.instruction
        text = note
        if instruction is not None:
            text = f"{results} = {instruction.name}: {instruction.shape} {instruction.opcode}({operands}){note}"
        slots = pending.operands, pending.results, tuple(frees)
        nested = tuple(pending.nested)
        return Step(kernel, *slots, text, on_slots, instruction, nested, pending.enqueues, pending.nest)

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
            place = owner.storages[slot]
            borrowed = any(root <= 0 and root not in allowed for root in place.roots)
            copies = borrowed or not place.distinct or not taken.isdisjoint(place.roots)
            taken |= place.roots
            target = self.new_slot(shape)
            owner.define(target, StorageSet(frozenset({owner.new_root()})) if copies else place)
            kernel: Callable[..., Any] = contiguous
            if copies:
                kernel = in_buffers(control_flow.copied_into, (slot,), (target,))
                self.offer_buffer(owner, target, shape)
            frees = () if slot in results[len(final) + 1 :] or slot in self._constants else (slot,)
            text = f"#{target} = {'copy' if copies else 'row major'} of #{slot}"
            steps.append(Step(kernel, (slot,), (target,), frees, text, on_slots=copies, enqueues=copies))
            final.append(target)
        return tuple(final)


def _parameter(_: Builder, instruction: Instruction, operands: list[Tree], arguments: Sequence[Tree]) -> Tree:
    return arguments[instruction.attributes_as(ParameterAttributes).number]


def _element(_: Builder, instruction: Instruction, operands: list[Tree], arguments: Sequence[Tree]) -> Tree:
    (tree,) = operands
    assert isinstance(tree, tuple)
    return tree[instruction.attributes_as(TupleIndexAttributes).index]


# How an instruction becomes slots, from those of its operands and of the computation's parameters.
_Emit = Callable[[Builder, Instruction, list[Tree], Sequence[Tree]], Tree]
_WITHOUT_KERNEL: dict[Opcode, _Emit] = {
    Opcode.ADD_DEPENDENCY: lambda builder, instruction, operands, arguments: operands[0],
    Opcode.AFTER_ALL: lambda builder, instruction, operands, arguments: builder.token_slot(),
    Opcode.CONSTANT: Builder._emit_constant,
    Opcode.COPY: lambda builder, instruction, operands, arguments: operands[0],
    Opcode.GET_TUPLE_ELEMENT: _element,
    Opcode.OPTIMIZATION_BARRIER: lambda builder, instruction, operands, arguments: operands[0],
    Opcode.PARAMETER: _parameter,
    Opcode.TUPLE: lambda builder, instruction, operands, arguments: tuple(operands),
}
_OF_OTHERS: dict[Opcode, _Emit] = {
    Opcode.CALL: Builder._emit_call,
    Opcode.CONDITIONAL: Builder._emit_conditional,
    Opcode.WHILE: Builder._emit_while,
}
_EMIT = _WITHOUT_KERNEL | _OF_OTHERS
#: What no kernel computes, and what runs other computations. All else is a kernel's.
WITHOUT_KERNEL, RUN_OTHERS = frozenset(_WITHOUT_KERNEL), frozenset(_OF_OTHERS)


def _allocations(owner: Ownership, steps: Sequence[Step], results: Sequence[int]) -> Iterator[Allocation]:
    """One for each storage that a step makes and no result lies in: it lives as long as any slot that may lie in it."""
    freed = {slot: number for number, step in enumerate(steps) for slot in step.frees}
    last: dict[int, int] = {}
    for slot, place in owner.storages.items():
        for root in place.roots:
            last[root] = max(last.get(root, 0), freed.get(slot, len(steps) - 1))
    known = {root for slot in results for root in owner.storages[slot].roots}
    for number, step in enumerate(steps):
        for slot in step.results:
            made = [root for root in owner.storages[slot].roots if root not in known and is_own(root)]
            known.update(made)
            if made and step.enqueues:
                yield Allocation(slot, number, max(last[root] for root in made))


def _choose_storage(
    instruction: Instruction, pending: Pending, prepared: PreparedKernel, owner: Ownership, dying: frozenset[int]
) -> tuple[Kernel, str]:
    """The in-place variant when it is safe, else the kernel itself; defines where the results lie."""
    variant = registry.prepare_in_place(instruction) if prepared.is_reference else prepared.in_place
    if variant is not None:
        reused = [pending.operands[number] for number in variant.operands]
        if all(owner.may_overwrite(slot, pending.operands, dying) for slot in reused):
            for slot, result in zip(reused, pending.results, strict=True):
                owner.overwrite(slot)
                owner.define(result, owner.storages[slot])
            return variant.kernel, f" over {', '.join(f'#{slot}' for slot in reused)}"
    kind = registry.storage_of(instruction)
    shared = StorageSet(frozenset()) if kind is Storage.FRESH else owner.union(pending.operands)
    for result in pending.results:
        distinct = shared.distinct and kind is not Storage.SHARED
        owner.define(result, StorageSet(shared.roots | {owner.new_root()}, distinct))
    return prepared.kernel, ""


def _while_note(loop: LoopSummary, copied: Sequence[int], trip_count: int | None) -> str:
    parts = [f"{trip_count} iterations"] if trip_count is not None else []
    for label, indices in (("over", loop.overwrites), ("copies first", copied), ("copies each iteration", loop.copied)):
        if indices:
            parts.append(f"{label} {', '.join(map(str, sorted(indices)))}")
    return f" [{'; '.join(parts)}]" if parts else ""
