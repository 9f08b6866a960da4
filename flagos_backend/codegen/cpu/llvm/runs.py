"""Small steps that follow each other, loops and branches of such steps among them, as one function of machine code.

Between emitter.py, which plans where everything stands, and compile/machine_code.py, which has LLVM compile the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.llvm import blocks, nests, windows
from flagos_backend.codegen.cpu.llvm.code import Function, Memory, NotCompilableError
from flagos_backend.codegen.cpu.lower.dot import MatrixProduct
from flagos_backend.codegen.cpu.steps import Item, Step, array_of, is_empty, operations, scratches, sources, targets
from flagos_backend.ir.attributes import ConstantAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Region

# Above these a step's own time is more than what calling its kernels takes, and tiles, threads and BLAS are faster.
_MAX_POINTS = 1 << 14
_MAX_OPERATIONS = 1 << 17
_MAX_MULTIPLICATIONS = 1 << 14
_MAX_BYTES = 1 << 16
# What a function keeps on its stack of the values that nobody else reads, each and all together.
_MAX_CELL_BYTES = 1 << 11
_MAX_STACK_BYTES = 1 << 15
# Constants whose content the compiler is told.
_MAX_KNOWN_BYTES = 1 << 12
# Of a loop that runs as long as a condition holds; and what no loop's body is said to take more of.
_MANY_ITERATIONS = 1 << 20
# A carried value that is written into memory of its own and then copied back, each iteration.
_MAX_CARRIED_BYTES = 1 << 14


# What steps are as LLVM IR, and the array of which they read or write each element once.
_WRITERS = {
    ItemKind.SLICE: blocks.write_block,
    ItemKind.UPDATE: blocks.write_block,
    ItemKind.GATHER: windows.write_gather,
    ItemKind.SCATTER: windows.write_scatter,
    ItemKind.ARG_MIN_MAX: windows.write_argminmax,
}
_MOVED: dict[int, Callable[[Step], Instruction]] = {
    ItemKind.SLICE: lambda step: step.targets[0],
    ItemKind.UPDATE: lambda step: step.sources[0],
    ItemKind.GATHER: lambda step: step.targets[0],
    ItemKind.SCATTER: lambda step: step.sources[-1],
    ItemKind.ARG_MIN_MAX: lambda step: step.sources[0],
}


@dataclass(frozen=True, slots=True)
class Program:
    """A computation as emitter.py planned it: parameters, results, constants and temporaries have slots in this order.

    ``slots``: of each buffer. ``offsets``: of each temporary in the program's scratch memory, or -1.
    ``loops`` and ``branches``: what steps of loops and conditionals run, by the identity of the step.
    """

    items: Sequence[Item]
    slots: Mapping[Instruction, int]
    num_parameters: int
    results: Sequence[Instruction]
    num_constants: int
    offsets: Sequence[int]
    loops: Mapping[int, Loop]
    branches: Mapping[int, Sequence[Branch]]

    @property
    def first_temporary(self) -> int:
        return self.num_parameters + len(self.results) + self.num_constants


@dataclass(frozen=True, slots=True)
class Loop:
    """``trip_count``: None as long as ``condition`` holds. ``buffered``, ``overwritten``: which of the carried values
    are written into another buffer, or where they stand; the others do not change. ``functions``: those that the two
    programs call, which nobody calls where the whole loop is a function."""

    condition: Program
    body: Program
    trip_count: int | None
    buffered: Sequence[bool]
    overwritten: Sequence[bool]
    functions: range


@dataclass(frozen=True, slots=True)
class Branch:
    """``taken``: the buffers that are its parameters; ``functions``: as of a loop."""

    program: Program
    taken: Sequence[Instruction]
    functions: range


@dataclass(frozen=True, slots=True)
class Run:
    """``number``: of the function in the module; the slots that it reads and writes; ``work``: as for loops."""

    number: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    work: int


@dataclass(slots=True)
class Module:
    """The functions of a program, by number; None: one that nobody calls."""

    functions: list[Function | None] = field(default_factory=list)
    constants: dict[bytes, str] = field(default_factory=dict)

    def constant(self, content: bytes) -> str:
        return self.constants.setdefault(content, f"@constant{len(self.constants)}")

    def text(self) -> str:
        """The module as LLVM IR."""
        lines = [
            f'{name} = private unnamed_addr constant [{len(content)} x i8] c"{_quoted(content)}", align 64'
            for content, name in self.constants.items()
        ]
        nodes: list[str] = []
        functions = [function for function in self.functions if function is not None]
        for function in functions:
            text, added = function.text(len(nodes))
            lines.append(text)
            nodes += added
        lines += sorted({declaration for f in functions for declaration in f.declarations})
        lines.append('attributes #0 = { nounwind "no-trapping-math"="true" }')
        lines.append("attributes #1 = { nounwind willreturn memory(none) }")
        return "\n".join((*lines, *nodes)) + "\n"


def _quoted(content: bytes) -> str:
    return "".join(f"\\{byte:02x}" for byte in content)


def runs_of(program: Program, *, repeated: bool) -> Iterator[tuple[bool, list[Item]]]:
    """The items of a program in groups: those that may become a function together, and those between them.

    ``repeated``: a loop runs the program; else only loops in it pay what compiling them takes.
    """
    live = [item for item in program.items if not is_empty(item)]
    for small, group in groupby(live, lambda item: _is_small(program, item)):
        members = list(group)
        pays = repeated and (len(members) > 1 or operations(members[0]) > 1)
        yield small and (pays or any(_is_loop(item) for item in members)), members


def _is_loop(item: Item) -> bool:
    return isinstance(item, Step) and item.kind == ItemKind.WHILE


def _is_small(program: Program, item: Item) -> bool:
    if isinstance(item, Region):
        points = prod(item.dims)
        return points <= _MAX_POINTS and points * operations(item) <= _MAX_OPERATIONS
    if isinstance(item, MatrixProduct):
        return prod((*item.batch, item.m, item.n, item.k)) <= _MAX_MULTIPLICATIONS
    if item.kind in _MOVED:
        return array_of(_MOVED[item.kind](item)).num_bytes <= _MAX_BYTES
    if item.kind == ItemKind.WHILE:
        loop = program.loops[id(item)]
        return all(_is_all_small(nested) for nested in (loop.condition, loop.body))
    if item.kind == ItemKind.CONDITIONAL:
        return all(_is_all_small(branch.program) for branch in program.branches[id(item)])
    return False


def _is_all_small(program: Program) -> bool:
    return all(is_empty(item) or _is_small(program, item) for item in program.items)


def write_run(module: Module, program: Program, items: Sequence[Item]) -> Run:
    """``items`` of ``program`` as a function of ``module``.

    Raises NotCompilableError, and then ``module`` is as it was.
    """
    function = Function(f"run{len(module.functions)}")
    known = dict(module.constants)
    try:
        _Writer(module, function, program, items).write()
    except NotCompilableError:
        module.constants = known
        raise
    for number in _replaced(program, items):
        module.functions[number] = None
    module.functions.append(function)
    reads = dict.fromkeys(program.slots[b] for item in items for b in sources(item))
    writes = dict.fromkeys(program.slots[b] for item in items for b in (*targets(item), *scratches(item)))
    return Run(len(module.functions) - 1, tuple(reads), tuple(writes), sum(_work(program, item) for item in items))


def _replaced(program: Program, items: Sequence[Item]) -> Iterator[int]:
    """The functions that the programs inside of ``items`` call."""
    for item in items:
        if isinstance(item, Step) and item.kind == ItemKind.WHILE:
            yield from program.loops[id(item)].functions
        elif isinstance(item, Step) and item.kind == ItemKind.CONDITIONAL:
            for branch in program.branches[id(item)]:
                yield from branch.functions


def _work(program: Program, item: Item) -> int:
    """As native/cpu/parse.cc counts it: what takes long is not run in the caller's thread."""
    if isinstance(item, Region):
        return prod(item.dims) * operations(item)
    if isinstance(item, MatrixProduct):
        return prod((*item.batch, item.m, item.n, item.k))
    if item.kind == ItemKind.WHILE:
        loop = program.loops[id(item)]
        iterations = _MANY_ITERATIONS if loop.trip_count is None else loop.trip_count
        return min(_work_of(loop.body), _MANY_ITERATIONS) * min(iterations, _MANY_ITERATIONS)
    if item.kind == ItemKind.CONDITIONAL:
        return sum(_work_of(branch.program) for branch in program.branches[id(item)])
    return sum(array_of(target).num_elements for target in item.targets)


def _work_of(program: Program) -> int:
    return min(sum(_work(program, item) for item in program.items), _MANY_ITERATIONS)


class _Writer:
    """Items of one program. ``given``: where its parameters, results and large temporaries are, of a nested program."""

    def __init__(
        self,
        module: Module,
        function: Function,
        program: Program,
        items: Sequence[Item],
        given: Callable[[int], str] | None = None,
    ) -> None:
        self.module = module
        self.function = function
        self.program = program
        self.items = items
        self.given = given
        self.pointers: dict[int, str] = {}
        members = set(map(id, items))
        self.elsewhere = {
            program.slots[buffer]
            for item in program.items
            if id(item) not in members
            for buffer in (*sources(item), *targets(item), *scratches(item))
            if buffer in program.slots
        }
        self.constants = {slot: buffer for buffer, slot in program.slots.items() if buffer.opcode is Opcode.CONSTANT}

    def write(self) -> None:
        for item in self.items:
            if is_empty(item):
                continue
            # Two slots may hold the same memory one after the other: each step has scopes of its own.
            scopes: dict[int, Memory] = {}

            def memory_of(buffer: Instruction, scopes: dict[int, Memory] = scopes) -> Memory:
                slot = self.program.slots[buffer]
                if slot not in scopes:
                    scopes[slot] = Memory(self._pointer(buffer), self.function.scope())
                return scopes[slot]

            if isinstance(item, Region):
                nests.write(self.function, item, memory_of)
            elif isinstance(item, MatrixProduct):
                blocks.write_product(self.function, item, memory_of)
            elif item.kind == ItemKind.WHILE:
                self._write_loop(item)
            elif item.kind == ItemKind.CONDITIONAL:
                self._write_conditional(item)
            else:
                _WRITERS[item.kind](self.function, item, memory_of)

    def _pointer(self, buffer: Instruction) -> str:
        """The address of a buffer, known from the beginning of the function on."""
        slot = self.program.slots[buffer]
        if slot not in self.pointers:
            self.pointers[slot] = self._found(slot, array_of(buffer).num_bytes)
        return self.pointers[slot]

    def _found(self, slot: int, size: int) -> str:
        constant = self.constants.get(slot)
        if constant is not None and (self.given is not None or size <= _MAX_KNOWN_BYTES):
            if not 0 < size <= _MAX_KNOWN_BYTES:
                raise NotCompilableError(f"a constant of {size} bytes in a nested program")
            return self.module.constant(constant.attributes_as(ConstantAttributes).data)
        is_local = slot >= self.program.first_temporary and slot not in self.elsewhere
        if is_local and 0 < size <= _MAX_CELL_BYTES and self.function.stack + size <= _MAX_STACK_BYTES:
            return self.function.cell(f"[{size} x i8]", size)
        return self.function.slot(slot) if self.given is None else self.given(slot)

    # ---- control flow ----

    def _nested(self, program: Program, memories: Sequence[str], scratch: Instruction) -> _Writer:
        """A program whose parameters and results are at ``memories``."""
        base = None

        def given(slot: int) -> str:
            nonlocal base
            if slot < len(memories):
                return memories[slot]
            base = base or self._pointer(scratch)
            return self.function.offset(base, program.offsets[slot - program.first_temporary])

        return _Writer(self.module, self.function, program, program.items, given)

    def _write_loop(self, step: Step) -> None:
        code, loop = self.function, self.program.loops[id(step)]
        *seconds, scratch = step.scratch
        rest, more = iter(step.targets), iter(seconds)
        now: list[str] = []
        following: list[str] = []
        carried: list[tuple[str, str, int]] = []  # what is copied back after each iteration
        left: list[tuple[str, str, int]] = []  # and after the last one
        for source, is_buffered, is_overwritten in zip(step.sources, loop.buffered, loop.overwritten, strict=True):
            place, size = self._pointer(source), array_of(source).num_bytes
            if not is_buffered and not is_overwritten:
                now.append(place)
                following.append(place)
                continue
            target = self._pointer(next(rest))
            second = next(more) if is_buffered else None
            held, written = target, target
            if 0 < size <= _MAX_CELL_BYTES and code.stack + 2 * size <= _MAX_STACK_BYTES:
                held = written = code.cell(f"[{size} x i8]", size)
                if is_buffered:
                    written = code.cell(f"[{size} x i8]", size)
                left.append((target, held, size))
            elif second is not None:
                if size > _MAX_CARRIED_BYTES:
                    raise NotCompilableError(f"a carried value of {size} bytes")
                written = self._pointer(second)
            if place != held:
                code.copy(held, place, size)
            if is_buffered:
                carried.append((held, written, size))
            now.append(held)
            following.append(written)
        body = self._nested(loop.body, (*now, *following), scratch)
        if loop.trip_count == 0:
            pass
        elif loop.trip_count is not None:
            with code.loop(loop.trip_count):
                self._iteration(body, carried)
        else:
            again = code.cell("i8", 1)
            condition = self._nested(loop.condition, (*now, again), scratch)
            with code.while_loop() as go_on:
                condition.write()
                go_on(code.value(f"trunc i8 {code.value(f'load i8, ptr {again}')} to i1"))
                self._iteration(body, carried)
        for target, held, size in left:
            code.copy(target, held, size)

    def _iteration(self, body: _Writer, carried: Sequence[tuple[str, str, int]]) -> None:
        body.write()
        for held, written, size in carried:
            self.function.copy(held, written, size)

    def _write_conditional(self, step: Step) -> None:
        """The last branch is the one for numbers out of range; of a predicate the first is the one where it holds."""
        code, branches = self.function, self.program.branches[id(step)]
        index = step.sources[0]
        element_type = array_of(index).element_type
        (scratch,) = step.scratch
        results = [self._pointer(target) for target in step.targets]
        scope = Memory(self._pointer(index), code.scope())
        if element_type is ElementType.PRED:
            is_first = code.load(scope, element_type, "0", ())
            number = code.value(f"select i1 {is_first}, i32 0, i32 1")
        else:
            number = code.load(scope, element_type, "0", ())
        taken = [[self._pointer(buffer) for buffer in branch.taken] for branch in branches]
        with code.switch(number, len(branches)) as case:
            for position, branch in enumerate(branches):
                with case(position):
                    self._nested(branch.program, (*taken[position], *results), scratch).write()
