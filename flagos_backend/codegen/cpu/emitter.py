"""Writes a computation as a native program: the bytecode that native/cpu/native_program.cc parses and runs without
Python.

Everything the program touches is planned here: loop nests, registers, and where each temporary stands in the arena.
"""

from __future__ import annotations

import bisect
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, islice

from flagos_backend.codegen.cpu import emit_map_loop as point_loop
from flagos_backend.codegen.cpu import emit_row_loop as row_loop
from flagos_backend.codegen.cpu.arena import Interval, plan_arena
from flagos_backend.codegen.cpu.buffer_assignment import BufferAssignment, changed_by_branches
from flagos_backend.codegen.cpu.bytecode import MAGIC, ItemKind
from flagos_backend.codegen.cpu.fusion_policy import schedule
from flagos_backend.codegen.cpu.llvm.code import NotCompilableError
from flagos_backend.codegen.cpu.llvm.runs import Branch, Loop, Program, Run, runs_of, write_run
from flagos_backend.codegen.cpu.llvm.runs import Module as MachineModule
from flagos_backend.codegen.cpu.lower.argminmax import with_argminmax
from flagos_backend.codegen.cpu.lower.dot import MatrixProduct
from flagos_backend.codegen.cpu.lower.instruction import Call, InstructionLowering
from flagos_backend.codegen.cpu.pipelines import cpu_emission_pipeline, cpu_loop_pipeline
from flagos_backend.codegen.cpu.step_notes import BufferNote, StepNote, label
from flagos_backend.codegen.cpu.steps import (
    Item,
    NotNativeError,
    Step,
    array_of,
    is_empty,
    operations,
    over,
    scratch_of,
    scratches,
    sources,
    targets,
    text_of,
)
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import simplify
from flagos_backend.codegen.loop_pass_manager import run_loop_pipeline
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.ir.attributes import ConstantAttributes, WhileAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.flat import FlatComputation, flatten
from flagos_backend.loop_ir.region import Region
from flagos_backend.process import progress

logger = logging.getLogger(__name__)

# Loops of fewer iterations are over before compiling them pays.
_MANY_ITERATIONS = 8
# Instead of a place: the library call that makes the array brings the memory that it is in.
_CALLEE_ALLOCATED = -1
_RESULT_CALLEE_ALLOCATED = -2  # beside the argument that a result is written over, and -1 for none
# How a loop carries a value: in two buffers that take turns, unchanged, or overwritten in place.
_BUFFERED, _INVARIANT, _OVERWRITTEN = range(3)


@dataclass(frozen=True, slots=True)
class NativeCode:
    """``bytecode``: little-endian int64; ``constants``: the data they point into; ``steps``: a line each, for explain,
    which has more from ``notes`` and ``buffers``.

    ``calls``: the instructions that the program hands back to its host, by number, with their flat operands.
    ``llvm``: LLVM IR of the ``functions`` that it calls, which have a name each, or None where nobody calls it.
    ``arena_bytes``: of temporaries; ``callee_allocated_bytes``: of those that calls allocate, the most that live at
    once. ``operations``: how many operations of arrays the other steps replace. ``multiplies``: whether steps are
    products.
    """

    bytecode: bytes = field(repr=False)
    constants: bytes = field(repr=False)
    calls: tuple[Call, ...]
    llvm: str = field(repr=False)
    functions: tuple[str | None, ...]
    steps: tuple[str, ...]
    notes: tuple[StepNote, ...] = field(repr=False)
    buffers: tuple[BufferNote, ...] = field(repr=False)
    arena_bytes: int
    callee_allocated_bytes: int
    operations: int
    multiplies: bool


def emit(
    module: Module,
    argument_aliases: Sequence[int] = (),
    excess_precision: bool = False,
    machine_code: bool = False,
) -> NativeCode:
    """The entry computation, after the passes of ``native_pipeline``, as a native program.

    ``argument_aliases``: for each flat argument, the flat output that may be written over it, or -1.
    ``excess_precision``: as in codegen/transforms/excess_precision.py. ``machine_code``: whether small steps of loops
    become functions for LLVM to compile.

    Raises:
        NotNativeError: a value has no place in memory (elements wider than 8 bytes where tiles move them).
    """
    shared = _Shared(excess_precision, machine_code)
    emitter = _Emitter(module.entry, shared, "", outermost=True)
    bytecode, arena_bytes = emitter.emit({output: n for n, output in enumerate(argument_aliases) if output >= 0})
    return NativeCode(
        struct.pack(f"<{len(bytecode)}q", *bytecode),
        bytes(shared.data),
        tuple(shared.calls),
        shared.machine.text(),
        tuple(None if function is None else function.name for function in shared.machine.functions),
        tuple(emitter.lines),
        tuple(emitter.notes),
        emitter.buffers,
        arena_bytes,
        emitter.callee_allocated_bytes,
        shared.operations,
        shared.multiplies,
    )


class _Shared:
    """What a program and the programs nested in it have in common."""

    def __init__(self, excess_precision: bool, machine_code: bool) -> None:
        self.excess_precision = excess_precision
        self.machine_code = machine_code
        self.machine = MachineModule()
        self.data = bytearray()
        self.calls: list[Call] = []
        self.operations = 0
        self.multiplies = False

    def place(self, content: bytes) -> int:
        """The offset at which ``content`` now stands."""
        self.data.extend(b"\0" * (-len(self.data) % 64))
        offset = len(self.data)
        self.data.extend(content)
        return offset


class _Emitter:
    """One computation. ``indent`` sets the lines of nested programs apart in the explanation. ``outermost``: its steps
    run once, so that memory which library calls bring lives as long as it is needed. ``repeated``: they run in a loop,
    so that compiling them pays."""

    def __init__(
        self,
        computation: Computation,
        shared: _Shared,
        indent: str,
        *,
        outermost: bool = False,
        repeated: bool = False,
    ) -> None:
        self.shared = shared
        self.outermost = outermost
        self.repeated = repeated
        self.indent = indent
        self.name = computation.name
        self.flat: FlatComputation = with_argminmax(flatten(computation))
        for instruction in (*self.flat.parameters, *self.flat.outputs):
            array_of(instruction)
        self.schedule: Schedule = schedule(self.flat)
        self.items: list[Item] = []
        self.assignment = BufferAssignment(self.flat, self.schedule.buffers, self.items)
        self.lowering = InstructionLowering(self.flat, self.schedule, self.assignment, shared.calls)
        self.slots: dict[Instruction, int] = {}
        self.lines: list[str] = []
        self.notes: list[StepNote] = []
        self.buffers: tuple[BufferNote, ...] = ()
        self.callee_allocated_bytes = 0  # of temporaries that library calls allocate, the most that live at once
        self.nested_notes: dict[int, tuple[tuple[int, tuple[StepNote, ...]], ...]] = {}  # by the identity of steps
        self.branches: dict[Step, tuple[tuple[_Emitter, tuple[Instruction, ...]], ...]] = {}  # with what each takes
        self.callee_allocated: set[Instruction] = set()  # results of library calls that allocate their memory
        self.loops: dict[int, Loop] = {}  # by the identity of steps: what these run, as branch_programs
        self.branch_programs: dict[int, tuple[Branch, ...]] = {}
        self.program: Program | None = None  # once everything has its place
        self.written: Callable[[], None] | None = None  # says so, where a person watches
        self.released: dict[Step, list[Instruction]] = {}  # library call -> what nobody reads from then on
        scheduled = progress.counted(self.schedule.items, "kernels") if self.outermost else self.schedule.items
        self.items += (lowered for item in scheduled for lowered in self._lower(item))
        self.assignment.share()

    def emit(self, aliases: Mapping[int, int], *, copied_back: bool = False) -> tuple[list[int], int]:
        """The program's bytecode and the bytes of scratch memory it needs.

        ``aliases``: results, by number, and the parameters over which they may be written; ``copied_back``: over which
        they must be, because the caller has one place for both.
        """
        results = self.assignment.assign(aliases, copied_back=copied_back)
        self.items[:] = map(self._with_branches, self.items)
        self.written = progress.counter(len(self.items), "kernels written") if self.outermost else None
        self.slots.update((parameter, number) for number, parameter in enumerate(self.flat.parameters))
        for number, result in enumerate(results):
            parameter = self.assignment.in_place.get(result)
            if parameter is not None:
                self.slots[result] = self.slots[parameter]
            elif result not in self.slots:
                self.slots[result] = len(self.flat.parameters) + number
        self._find_callee_allocated()
        constants = self._place_constants(len(self.flat.parameters) + len(results))
        arena_bytes, temporaries = self._place_temporaries(len(self.flat.parameters) + len(results) + len(constants))
        self.program = Program(
            self.items,
            self.slots,
            len(self.flat.parameters),
            results,
            len(constants),
            [offset for offset, _ in temporaries],
            self.loops,
            self.branch_programs,
        )
        bytecode = [MAGIC, len(self.flat.parameters), len(results), len(constants), len(temporaries), arena_bytes]
        bytecode += [array_of(p).num_bytes for p in self.flat.parameters]
        bytecode += [array_of(r).num_bytes for r in results]
        bytecode += [self._written_over(result) for result in results]
        for offset, size in (*constants, *temporaries):
            bytecode += [offset, size]
        steps = list(self._steps(self.program))
        bytecode.append(len(steps))
        for step in steps:
            bytecode += step
        return bytecode, arena_bytes

    # ---- items ----

    def _lower(self, item: Region | Instruction) -> Sequence[Item]:
        if isinstance(item, Region):
            return run_loop_pipeline(cpu_loop_pipeline(), item)
        if item.opcode is Opcode.WHILE:
            return [self._lower_while(item)]
        if item.opcode is Opcode.CONDITIONAL:
            return [self._lower_conditional(item)]
        return self.lowering.lower(item)

    # ---- control flow ----

    def _nested(self, computation: Computation, *, repeated: bool) -> _Emitter:
        return _Emitter(computation, self.shared, self.indent + "  ", repeated=repeated)

    def _lower_while(self, item: Instruction) -> Step:
        trip_count = item.attributes_as(WhileAttributes).trip_count
        first_function = len(self.shared.machine.functions)
        repeated = self.repeated or trip_count is None or trip_count >= _MANY_ITERATIONS
        try:
            condition, body = (self._nested(called, repeated=repeated) for called in item.called)
            condition_bytecode, condition_scratch = condition.emit({})
            body_bytecode, body_scratch = body.emit({n: n for n in range(len(body.flat.parameters))})
        except NotNativeError:
            return self.lowering.call(item)
        leaves, buffers = self.flat.leaves_of[item], self.lowering.buffers(item)
        modes = [
            _OVERWRITTEN if output in body.assignment.in_place else _INVARIANT if output is parameter else _BUFFERED
            for output, parameter in zip(
                map(body.assignment.buffer_of, body.flat.outputs), body.flat.parameters, strict=True
            )
        ]
        carried = tuple(zip(leaves, modes, buffers, strict=True))
        self.assignment.aliases.update((leaf, source) for leaf, mode, source in carried if mode == _INVARIANT)
        targets = tuple(leaf for leaf, mode, _ in carried if mode != _INVARIANT)
        changed = tuple(
            pair for leaf, mode, source in carried if mode != _INVARIANT for pair in over(leaf, source, buffers)
        )
        second = tuple(
            Instruction(Opcode.COPY, t.shape, (t,), name=f"{t.name}.next")
            for t, mode, _ in carried
            if mode == _BUFFERED
        )
        scratch = scratch_of(item, max(condition_scratch, body_scratch))
        numbers = (-1 if trip_count is None else trip_count, len(modes), *modes)
        nested = (len(condition_bytecode), *condition_bytecode, len(body_bytecode), *body_bytecode)
        iterations = "while" if trip_count is None else f"{trip_count} times"
        text = "\n".join((f"native loop {item.name} {iterations}", *condition.lines, *body.lines))
        step = Step(ItemKind.WHILE, buffers, targets, text, numbers, changed, (*second, scratch), nested)
        times = 1 if trip_count is None else trip_count
        self.nested_notes[id(step)] = ((times, tuple(condition.notes)), (times, tuple(body.notes)))
        assert condition.program is not None and body.program is not None
        buffered, overwritten = ([mode == kind for mode in modes] for kind in (_BUFFERED, _OVERWRITTEN))
        functions = range(first_function, len(self.shared.machine.functions))
        self.loops[id(step)] = Loop(condition.program, body.program, trip_count, buffered, overwritten, functions)
        return step

    def _lower_conditional(self, item: Instruction) -> Step:
        """Without the branches: what they write over depends on what is read after them."""
        try:
            branches = tuple(self._nested(called, repeated=self.repeated) for called in item.called)
            for branch in branches:
                branch.assignment.check_copies()
        except NotNativeError:
            return self.lowering.call(item)
        index, *operands = (self.flat.leaves_of[operand] for operand in item.operands)
        is_pred = array_of(index[0]).element_type is ElementType.PRED
        buffers, targets = self.lowering.buffers(item), self.flat.leaves_of[item]
        numbers = (int(is_pred), len(branches), *(len(leaves) for leaves in operands), len(targets))
        rest = iter(buffers[1:])
        taken = [tuple(islice(rest, len(leaves))) for leaves in operands]
        changed = changed_by_branches([branch.assignment for branch in branches], taken, targets)
        step = Step(ItemKind.CONDITIONAL, buffers, targets, f"native conditional {item.name}", numbers, changed)
        self.branches[step] = tuple(zip(branches, taken, strict=True))
        return step

    def _with_branches(self, item: Item) -> Item:
        """A conditional whose places are known, with its branches."""
        if not isinstance(item, Step) or item.kind != ItemKind.CONDITIONAL:
            return item
        changed = [pair for pair in item.over if self.assignment.is_changed_in_place(*pair)]
        nested: list[int] = []
        lines = [item.text]
        scratch_bytes = 0
        branch_programs = []
        for branch, taken in self.branches[item]:
            first_function = len(self.shared.machine.functions)
            aliases = {item.targets.index(t): taken.index(source) for t, source in changed if source in taken}
            bytecode, scratch = branch.emit(aliases, copied_back=True)
            assert branch.program is not None
            functions = range(first_function, len(self.shared.machine.functions))
            branch_programs.append(Branch(branch.program, taken, functions))
            nested += [len(bytecode), *bytecode]
            lines += [f"{self.indent}  branch {branch.name}", *branch.lines]
            scratch_bytes = max(scratch_bytes, scratch)
        memory = scratch_of(item.sources[0], scratch_bytes)
        step = replace(item, text="\n".join(lines), scratch=(memory,), nested=tuple(nested))
        self.branch_programs[id(step)] = tuple(branch_programs)
        self.nested_notes[id(step)] = tuple((1, tuple(branch.notes)) for branch, _ in self.branches[item])
        return step

    # ---- places ----

    def _find_callee_allocated(self) -> None:
        """Arrays that are where the library that makes them puts them: nobody copies them to a place of ours."""
        for item in self.items if self.outermost else ():
            if isinstance(item, Step) and item.kind == ItemKind.CALL:
                self.callee_allocated.update(
                    t for t in item.targets if t not in self.assignment.in_place and array_of(t).num_bytes
                )

    def _written_over(self, result: Instruction) -> int:
        """The number of the parameter that a result is written over, or what stands for none."""
        if self.slots[result] < len(self.flat.parameters):
            return self.slots[result]
        return _RESULT_CALLEE_ALLOCATED if result in self.callee_allocated else -1

    def _place_constants(self, first_slot: int) -> list[tuple[int, int]]:
        places: list[tuple[int, int]] = []
        for source in dict.fromkeys(self.assignment.buffer_of(s) for item in self.items for s in sources(item)):
            if source.opcode is Opcode.CONSTANT:
                content = source.attributes_as(ConstantAttributes).data
                self.slots[source] = first_slot + len(places)
                places.append((self.shared.place(content), len(content)))
        return places

    def _place_temporaries(self, first_slot: int) -> tuple[int, list[tuple[int, int]]]:
        first: dict[Instruction, int] = {}
        last: dict[Instruction, int] = {}
        for number, item in enumerate(self.items):
            for target in map(self.assignment.allocation_of, (*targets(item), *scratches(item))):
                first.setdefault(target, number)
                last[target] = number
            for source in map(self.assignment.buffer_of, sources(item)):
                last[self.assignment.allocation_of(source)] = number
        temporaries = [t for t in first if t not in self.slots]
        planned = [t for t in temporaries if t not in self.callee_allocated]
        intervals = [Interval(first[t], last[t], array_of(t).num_bytes) for t in planned]
        offsets, total = plan_arena(intervals)
        if self.outermost:
            self._note_buffers(temporaries, first, last)
        places = dict(zip(planned, offsets, strict=True))
        self.slots.update((temporary, first_slot + number) for number, temporary in enumerate(temporaries))
        self.slots.update(
            (shared, self.slots[self.assignment.allocation_of(shared)]) for shared in self.assignment.shared
        )
        self.slots.update((alias, self.slots[self.assignment.buffer_of(alias)]) for alias in self.assignment.aliases)
        self._release([t for t in temporaries if t in self.callee_allocated], last)
        return total, [(places.get(t, _CALLEE_ALLOCATED), array_of(t).num_bytes) for t in temporaries]

    def _note_buffers(
        self, temporaries: Sequence[Instruction], first: Mapping[Instruction, int], last: Mapping[Instruction, int]
    ) -> None:
        position = [0, *accumulate(int(not is_empty(item)) for item in self.items)]
        self.buffers = tuple(
            BufferNote(t.name, array_of(t).num_bytes, position[first[t]], position[last[t]]) for t in temporaries
        )
        calls = [n for n, item in enumerate(self.items) if isinstance(item, Step) and item.kind == ItemKind.CALL]
        changes: Counter[int] = Counter()
        for t in temporaries:
            if t in self.callee_allocated:
                given_back = bisect.bisect(calls, last[t])  # as in _release
                changes[first[t]] += array_of(t).num_bytes
                changes[calls[given_back] if given_back < len(calls) else len(self.items)] -= array_of(t).num_bytes
        self.callee_allocated_bytes = max(accumulate(changes[time] for time in sorted(changes)), default=0)

    def _release(self, temporaries: Sequence[Instruction], last: Mapping[Instruction, int]) -> None:
        """Memory that calls allocated is given back at the first call after its last use: calls have the
        interpreter."""
        waiting = list(temporaries)
        for number, item in enumerate(self.items):
            if isinstance(item, Step) and item.kind == ItemKind.CALL:
                self.released[item] = [t for t in waiting if last[t] < number]
                waiting = [t for t in waiting if last[t] >= number]

    # ---- bytecode ----

    def _steps(self, program: Program) -> Iterator[list[int]]:
        """The bytecode of each step: an item, or several that are one function of machine code."""
        numbers = count()
        if not self.shared.machine_code or self.shared.excess_precision:
            yield from (self._write(next(numbers), item) for item in program.items if not is_empty(item))
            return
        for is_run, members in runs_of(program, repeated=self.repeated):
            run = self._compiled(program, members) if is_run else None
            if run is None:
                yield from (self._write(next(numbers), item) for item in members)
                continue
            number = next(numbers)
            for item in members:
                text = text_of(item).replace("(BLAS)", "(compiled)")
                lines = text.split("\n")
                lines[0] += ", compiled"
                self.lines += (self.indent + line.lstrip() if n == 0 else line for n, line in enumerate(lines))
                self.shared.operations += operations(item)
                self._note(number, item, text, compiled=True)
            yield [
                ItemKind.MACHINE_CODE,
                run.number,
                run.work,
                len(run.reads),
                *run.reads,
                len(run.writes),
                *run.writes,
                0,
            ]

    def _note(self, number: int, item: Item, text: str, *, compiled: bool) -> None:
        if self.written is not None:
            self.written()
        called = None
        if isinstance(item, Step) and item.kind == ItemKind.CALL:
            called = self.shared.calls[item.numbers[0]].instruction
        nested = self.nested_notes.get(id(item), ())
        self.notes.append(StepNote(number, item, label(text), compiled, called, nested))

    def _compiled(self, program: Program, items: Sequence[Item]) -> Run | None:
        """The function that ``items`` become, or None for what is not written as LLVM IR."""
        try:
            return write_run(self.shared.machine, program, items)
        except NotCompilableError as error:
            logger.debug("%s: not compiled: %s", self.name, error)
            return None

    def _write(self, number: int, item: Item) -> list[int]:
        text = text_of(item)
        self.lines += (self.indent + line.lstrip() if n == 0 else line for n, line in enumerate(text.split("\n")))
        self._note(number, item, text, compiled=False)
        self.shared.operations += operations(item)
        if isinstance(item, Region):
            (region,) = run_loop_pipeline(cpu_emission_pipeline(self.shared.excess_precision), item)
            if row_loop.reduces_rows(region, simplify(region)):
                return row_loop.write(region, self.slots)
            return point_loop.write(region, self.slots)
        if isinstance(item, MatrixProduct):
            self.shared.multiplies = True
            return self._write_product(item)
        self.shared.multiplies |= item.kind == ItemKind.LINEAR_ALGEBRA
        bytecode = [item.kind, *item.numbers]
        for group in (item.sources, item.targets, self.released.get(item, item.scratch)):
            bytecode += [len(group), *(self.slots[buffer] for buffer in group)]
        return [*bytecode, *item.nested]

    def _write_product(self, product: MatrixProduct) -> list[int]:
        sizes = (product.m, product.n, product.k)
        types = (product.element_type, *product.operand_types)
        bytecode = [ItemKind.PRODUCT, *map(int, types), len(product.batch), *product.batch, *sizes]
        for operand in (product.lhs, product.rhs, product.result):
            bytecode += [self.slots[operand.buffer], operand.offset, *operand.batch_strides]
            bytecode += [operand.leading, int(operand.transposed)]
        return bytecode
