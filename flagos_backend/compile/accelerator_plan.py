"""The plan of a computation on an accelerator: fused regions run as generated kernels, the rest as chosen library
kernels. Between codegen/triton with kernels/choice.py and the replay; a Plan like the host's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flagos_backend.codegen.triton import RegionKernel
from flagos_backend.compile.kernel_candidates import KernelCandidates
from flagos_backend.compile.overlap import Wait
from flagos_backend.compile.ownership import Ownership, StorageSet
from flagos_backend.compile.plan_builder import Builder, Pending, PreparedKernel
from flagos_backend.devices.target import Target
from flagos_backend.fusion.updates import copied, targets
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape
from flagos_backend.kernels.implementation import Provider
from flagos_backend.kernels.reference.registry import Kernel, Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.indexing import View
from flagos_backend.loop_ir.region import Region
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime import slots
from flagos_backend.runtime.plan import Plan
from flagos_backend.runtime.slots import Tree

# What generated kernels ask of the arrays they are given.
_ALIGNMENT = 16


def build(
    computation: Computation,
    donated: Collection[int],
    device: torch.device,
    target: Target,
    excess_precision: bool = False,
) -> Plan:
    """The plan of an entry computation on ``device``; ``donated`` as for build_plan, ``excess_precision`` as in
    codegen/transforms/excess_precision.py. Raises what codegen and the choice of kernels raise."""
    kernels = KernelCandidates(target, excess_precision)
    if device.type != "cpu":  # there generated kernels are interpreted
        kernels.warm_up(computation, device)
    return _Builder(device, kernels).build(computation, donated, entry=True)


class _Builder(Builder):
    """``kernels``: of the plan and its nested plans."""

    def __init__(self, device: torch.device, kernels: KernelCandidates, outer: _Builder | None = None) -> None:
        super().__init__(device, outer=outer)
        self._kernels = kernels

    def nested(self) -> _Builder:
        return _Builder(self._device, self._kernels, self)

    def prepare(self, instruction: Instruction) -> PreparedKernel:
        choice = self._kernels.choice(instruction)
        is_reference = choice.provider is Provider.REFERENCE
        kernel, into = choice.kernel, choice.into
        if instruction.opcode in COLLECTIVES:
            kernel = _started(instruction, choice.kernel)
            into = _started_into(instruction, choice.kernel) if isinstance(instruction.shape, ArrayShape) else None
        return PreparedKernel(kernel, is_reference, f" [{choice.text}]", into, choice.in_place)

    def inline(self, computation: Computation, arguments: Sequence[Tree]) -> Tree:
        scheduled = self._kernels.scheduled(computation)
        walk = _Walk(self, scheduled.flat)
        leaves = [leaf for argument in arguments for leaf in slots.flatten(argument)]
        walk.slots.update(zip(scheduled.flat.parameters, leaves, strict=True))
        walk.buffers.update(scheduled.schedule.buffers)
        walk.views.update(scheduled.schedule.views)
        for item in scheduled.items:
            if isinstance(item, Wait):
                walk.emit_wait(item)
            elif isinstance(item, Region) and (array := copied(item)) is not None:
                walk.updated |= dict.fromkeys(targets(item), array)
            elif isinstance(item, Region):
                walk.emit_region(item, self._kernels.region_kernel(item))
            else:
                self._count.add(item)
                walk.emit_library(item)
        return walk.tree(computation.root)


class _Walk:
    """One computation on its way into a plan. ``slots``: where each buffer is; ``buffers`` and ``views`` as in the
    schedule; ``updated``: for each buffer that is an update of another one, and not begun yet, that one."""

    def __init__(self, builder: _Builder, flat: FlatComputation) -> None:
        self.builder = builder
        self.flat = flat
        self.slots: dict[Instruction, int] = {}
        self.buffers: dict[Instruction, Instruction] = {}
        self.views: dict[tuple[Instruction, int], View] = {}
        self.updated: dict[Instruction, Instruction] = {}
        self._shaped: dict[tuple[int, tuple[int, ...]], int] = {}
        self._under_way: dict[Instruction, tuple[int, ...]] = {}  # what each collective takes and makes

    # ---- values

    def slot(self, buffer: Instruction) -> int:
        """Where ``buffer`` is, whatever shape it has there."""
        if buffer not in self.slots:
            if buffer.opcode is not Opcode.CONSTANT:
                raise AssertionError(f"{buffer.name} is read before it is made")
            tree = self.builder.emit(buffer, [], ())
            assert isinstance(tree, int)
            self.slots[buffer] = tree
        return self.slots[buffer]

    def value(self, leaf: Instruction) -> int:
        """A slot that holds ``leaf`` in its own shape."""
        buffer = self.buffers.get(leaf, leaf)
        slot = self.slot(buffer)
        if not isinstance(leaf.shape, ArrayShape) or leaf.shape.element_type is ElementType.TOKEN:
            return slot
        assert isinstance(buffer.shape, ArrayShape)
        dims = leaf.shape.dims
        if dims == buffer.shape.dims:
            return slot
        key = (slot, dims)
        if key not in self._shaped:
            self._shaped[key] = self._view(leaf, slot, lambda run, value: value.reshape(dims), whole=True)
        return self._shaped[key]

    def _part(self, leaf: Instruction, view: View) -> int:
        """A slot that holds ``leaf`` as a view of the buffer that it is in."""
        dims, strides = _dims(leaf), view.strides

        def part(run: Run, value: torch.Tensor) -> torch.Tensor:
            line = value.contiguous()
            return line.as_strided(dims, strides, line.storage_offset() + view.offset)

        return self._view(leaf, self.slot(self.buffers.get(view.buffer, view.buffer)), part, whole=False)

    def _view(
        self, leaf: Instruction, slot: int, kernel: Callable[[Run, torch.Tensor], torch.Tensor], whole: bool
    ) -> int:
        """``whole``: it has what the slot has, row major."""
        result = self.builder.new_slot(_array(leaf))

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            shared = owner.union(pending.operands)
            # With a root of its own a part has no result buffer: the buffer's is of another size or order.
            own = frozenset() if whole else frozenset({owner.new_root()})
            owner.define(result, StorageSet(shared.roots | own, shared.distinct))
            return kernel, False, " view"

        self.builder.add(Pending(leaf, (slot,), (result,), finish, enqueues=False))
        return result

    def tree(self, instruction: Instruction) -> Tree:
        """The slots of an instruction's leaves, nested as its shape is."""
        leaves = iter(self.flat.leaves_of[instruction])

        def build(shape: Shape) -> Tree:
            if isinstance(shape, TupleShape):
                return tuple(build(element) for element in shape.elements)
            return self.value(next(leaves))

        return build(instruction.shape)

    # ---- steps

    def emit_library(self, instruction: Instruction) -> None:
        operands: list[Tree] = []
        for number, operand in enumerate(instruction.operands):
            # A call that takes views takes no tuples, so that flat operands have its numbers.
            view = self.views.get((instruction, number))
            operands.append(self.tree(operand) if view is None else self._part(operand, view))
        tree = self.builder.emit(instruction, operands, ())
        for leaf, slot in zip(self.flat.leaves_of[instruction], slots.flatten(tree), strict=True):
            self.slots[leaf] = slot
        if instruction.opcode in COLLECTIVES:
            used = (*operands, tree)
            self._under_way[instruction] = tuple(slot for value in used for slot in slots.flatten(value))

    def emit_wait(self, wait: Wait) -> None:
        """Until there, what the collectives take and make stays where it is."""
        last, used = wait.collectives[-1], [self._under_way.pop(started) for started in wait.collectives]

        def run_wait(run: Run, values: list[Any]) -> None:
            if run.communication is not None:
                run.communication.wait(last)

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            return run_wait, True, f"wait for {', '.join(started.name for started in wait.collectives)}"

        keeps = tuple(dict.fromkeys(itertools.chain.from_iterable(used)))
        self.builder.add(Pending(None, (), (), finish, enqueues=False, keeps=keeps))

    def emit_region(self, region: Region, kernel: RegionKernel) -> None:
        # A buffer that several regions fill (the parts of a concatenation) is made by the first of them.
        begun = [output for output in kernel.outputs if output in self.slots]
        fresh = [output for output in kernel.outputs if output not in self.slots]
        updated = {o: self.slot(self.updated.pop(o)) for o in fresh if o in self.updated}
        inputs = tuple(self.slot(source) for source in kernel.inputs)
        operands = (*inputs, *(self.slots[output] for output in begun), *updated.values())
        results = tuple(self.builder.new_slot(_array(output)) for output in fresh)
        self.slots.update(zip(fresh, results, strict=True))
        device = self.builder.device

        def finish(pending: Pending, owner: Ownership, dying: frozenset[int]) -> tuple[Callable[..., Any], bool, str]:
            reused: dict[Instruction, int] = {}
            for result, output in zip(results, fresh, strict=True):
                if output in updated:
                    slot = updated[output] if owner.may_overwrite(updated[output], operands, dying) else None
                else:
                    slot = _overwritten(kernel, output, inputs, operands, owner, dying, set(reused.values()))
                if slot is None:
                    owner.define(result, StorageSet(frozenset({owner.new_root()})))
                    self.builder.offer_buffer(owner, result, _array(output))
                else:
                    owner.overwrite(slot)
                    owner.define(result, owner.storages[slot])
                    reused[output] = slot
            slots = {**dict(zip(fresh, results, strict=True)), **{output: self.slots[output] for output in begun}}
            places = [
                _OutputPlace(slots[o], reused.get(o), None if o in reused else updated.get(o), _array(o))
                for o in kernel.outputs
            ]
            note = "".join(f" over #{slot}" for slot in reused.values())
            note += "".join(f" after a copy of #{place.copied}" for place in places if place.copied is not None)
            return (
                _region_step(kernel, inputs, places, device),
                True,
                f" [{'; '.join(filter(None, (kernel.text, kernel.choice)))}]{note}",
            )

        self.builder.add(Pending(kernel.outputs[0], operands, results, finish, nest=kernel.region))


def _started(collective: Instruction, kernel: Kernel) -> Kernel:
    """``kernel`` beside what follows it, up to the wait for ``collective``."""

    def run_started(run: Run, *operands: Any) -> Any:
        if run.communication is None:
            return kernel(run, *operands)
        with run.communication.started(collective, operands):
            return kernel(run, *operands)

    return run_started


def _started_into(collective: Instruction, kernel: Kernel) -> Kernel:
    """As ``_started``, of a collective with one result, which is made where there is an output for it."""

    def run_there(run: Run, output: torch.Tensor, *operands: Any) -> torch.Tensor:
        assert run.communicator is not None
        communicator = run.communicator.into(output)
        return communicator.settled(kernel(replace(run, communicator=communicator), *operands), output)

    plain, there = _started(collective, kernel), _started(collective, run_there)

    def into(run: Run, outputs: Sequence[Any], *operands: Any) -> Any:
        (output,) = outputs
        if output is None or run.communicator is None:
            return plain(run, *operands)
        return there(run, output, *operands)

    return into


def _overwritten(
    kernel: RegionKernel,
    output: Instruction,
    inputs: Sequence[int],
    operands: Sequence[int],
    owner: Ownership,
    dying: frozenset[int],
    taken: Collection[int],
) -> int | None:
    """The slot of the input that ``output`` may be written over."""
    for source, slot in zip(kernel.inputs, inputs, strict=True):
        same_size = _array(source).num_bytes == _array(output).num_bytes
        if slot in taken or not same_size or not kernel.may_overwrite(output, source):
            continue
        if owner.may_overwrite(slot, operands, dying):
            return slot
    return None


@dataclass(frozen=True, slots=True)
class _OutputPlace:
    """Where a kernel's output is made. ``over``: the slot of what it takes the place of. ``copied``: of what it is a
    copy of before the kernel runs, which updates it."""

    slot: int
    over: int | None
    copied: int | None
    shape: ArrayShape


def _region_step(
    kernel: RegionKernel, inputs: Sequence[int], places: Sequence[_OutputPlace], device: torch.device
) -> Callable[[Run, list[Any]], None]:
    # What is written over, too, has to be the array that is read, if that is one.
    read = dict.fromkeys((*inputs, *(p.over for p in places if p.over is not None)))
    typed = [(place, place.shape.dims, dtype_of(place.shape.element_type)) for place in places]

    def run_region(run: Run, values: list[Any]) -> None:
        for slot in read:
            values[slot] = _dense(values[slot])
        outputs = []
        for place, dims, dtype in typed:
            if place.over is not None:
                outputs.append(values[place.over].view(dtype).view(dims))
            elif values[place.slot] is not None:  # filled already in part, or put there by who runs the plan
                outputs.append(values[place.slot])
            else:
                outputs.append(torch.empty(dims, dtype=dtype, device=device))
            if place.copied is not None:
                outputs[-1].copy_(values[place.copied].reshape(dims))  # a library's result may have any strides
        if any(output.numel() for output in outputs):
            kernel([values[slot] for slot in inputs], outputs)
        for place, output in zip(places, outputs, strict=True):
            values[place.slot] = output

    return run_region


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The array as generated kernels take it: library kernels return views, and hosts lend memory of theirs."""
    if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _array(instruction: Instruction) -> ArrayShape:
    assert isinstance(instruction.shape, ArrayShape)
    return instruction.shape


def _dims(instruction: Instruction) -> tuple[int, ...]:
    return _array(instruction).dims
