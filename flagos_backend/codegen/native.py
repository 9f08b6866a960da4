"""Writes a computation as a native program: the words that native/cpu/native_program.cc parses and runs without Python.

Everything the program touches is planned here: loop nests, registers, and where each temporary stands in the arena.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from flagos_backend.codegen import point_loop, row_loop
from flagos_backend.codegen.arena import Interval, plan_arena
from flagos_backend.codegen.arranged_products import as_arranged_product
from flagos_backend.codegen.convolution_phases import as_patch_products
from flagos_backend.codegen.extremes import extreme_numbers, with_extremes
from flagos_backend.codegen.floors import with_floors
from flagos_backend.codegen.gathers import gather_numbers
from flagos_backend.codegen.host_schedule import schedule
from flagos_backend.codegen.items import (
    ARG_EXTREME,
    CALL,
    COMPLEX,
    CONDITIONAL,
    GATHER,
    LINEAR_ALGEBRA,
    PRODUCT,
    SCATTER,
    SLICE,
    TOP_K,
    UPDATE,
    WHILE,
    Item,
    NotNativeError,
    Step,
    array_of,
    is_empty,
    movable,
    operations,
    overwritable,
    scratch_of,
    scratches,
    sources,
    targets,
    text_of,
    writes_over,
)
from flagos_backend.codegen.linear_algebra import linear_algebra_numbers
from flagos_backend.codegen.logarithms import with_base_two
from flagos_backend.codegen.logistics import with_logistics
from flagos_backend.codegen.long_folds import in_parts
from flagos_backend.codegen.loops import simplify
from flagos_backend.codegen.narrow_products import with_narrow_products
from flagos_backend.codegen.pairs import with_pairs, with_rotations
from flagos_backend.codegen.products import MatrixProduct, as_matrix_product
from flagos_backend.codegen.scatters import scatter_numbers
from flagos_backend.codegen.short_folds import as_columns
from flagos_backend.codegen.short_rows import lengthened
from flagos_backend.codegen.split_folds import split
from flagos_backend.codegen.tiles import is_arithmetic_type
from flagos_backend.codegen.widened_products import as_widened_product
from flagos_backend.codegen.wrapped_indices import with_wrapped_indices
from flagos_backend.fusion.flat import FlatComputation, flatten
from flagos_backend.fusion.fuse import Schedule
from flagos_backend.fusion.indexing import View, dims_of, row_major
from flagos_backend.fusion.region import Load, Region, Store, axis
from flagos_backend.ir.attributes import ConstantAttributes, CustomCallAttributes, TopKAttributes, WhileAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.effects import COLLECTIVES, HOST_CALLBACK

_MAGIC = 0x31504F4F4C534F46
_MAX_TOP_K = 128  # kMaxTopK of native/cpu/native_program.h
# ComplexOp of native/cpu/kernels.h.
_COMPLEX_OPS = {Opcode.MULTIPLY: 0, Opcode.DIVIDE: 1}
# Instead of a place: the library call that makes the array brings the memory that it is in.
_BROUGHT = -1
_RESULT_BROUGHT = -2  # beside the argument that a result is written over, and -1 for none
# at::internal::GRAIN_SIZE: the elements that one thread of a loop of torch's has at least.
_TORCH_GRAIN = 1 << 15
_LIBRARIES_WITH_THREADS = frozenset({Opcode.CONVOLUTION, Opcode.DOT, Opcode.FFT})
# How a loop carries a value: in two buffers that take turns, unchanged, or overwritten in place.
_BUFFERED, _INVARIANT, _OVERWRITTEN = range(3)


@dataclass(frozen=True, slots=True)
class NativeCode:
    """``words``: little-endian int64; ``constants``: the data they point into; ``steps``: a line each, for explain.

    ``calls``: the instructions that the program hands back to its host, by number, with their flat operands.
    ``operations``: how many operations of arrays the other steps replace.
    """

    words: bytes = field(repr=False)
    constants: bytes = field(repr=False)
    calls: tuple[Call, ...]
    steps: tuple[str, ...]
    operations: int


@dataclass(frozen=True, slots=True)
class Call:
    """A library call: reads the buffers of ``operands`` and makes one for each of ``results``, or fills one where the
    program has a place for it. ``views``: where in a buffer an operand is, for those that are not the whole of it."""

    instruction: Instruction
    operands: tuple[ArrayShape, ...]
    results: tuple[ArrayShape, ...]
    views: tuple[View | None, ...]


def _may_share_out(call: Call) -> bool:
    """Whether torch may use more threads than the one that makes the call. Its own loops do so from a size on, and the
    libraries that it calls as they like."""
    instruction = call.instruction
    attributes = instruction.attributes
    if any(shape.num_elements >= _TORCH_GRAIN for shape in (*call.operands, *call.results)):
        return True
    if isinstance(attributes, CustomCallAttributes):
        return attributes.target != HOST_CALLBACK
    if instruction.called and instruction.opcode not in COLLECTIVES:
        return True
    return instruction.opcode in _LIBRARIES_WITH_THREADS


def emit(module: Module, argument_aliases: Sequence[int] = ()) -> NativeCode:
    """The entry computation as a native program.

    ``argument_aliases``: for each flat argument, the flat output that may be written over it, or -1.

    Raises:
        NotNativeError: a value has no place in memory (elements wider than 8 bytes where tiles move them).
    """
    shared = _Shared()
    emitter = _Emitter(with_wrapped_indices(with_narrow_products(module)).entry, shared, "", outermost=True)
    words, _ = emitter.emit(aliases={output: n for n, output in enumerate(argument_aliases) if output >= 0})
    return NativeCode(
        struct.pack(f"<{len(words)}q", *words),
        bytes(shared.data),
        tuple(shared.calls),
        tuple(emitter.lines),
        shared.operations,
    )


class _Shared:
    """What a program and the programs nested in it have in common."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.calls: list[Call] = []
        self.operations = 0

    def place(self, content: bytes) -> int:
        """The offset at which ``content`` now stands."""
        self.data.extend(b"\0" * (-len(self.data) % 64))
        offset = len(self.data)
        self.data.extend(content)
        return offset


class _Emitter:
    """One computation. ``indent`` sets the lines of nested programs apart in the explanation. ``outermost``: its steps
    run once, so that memory which library calls bring lives as long as it is needed."""

    def __init__(self, computation: Computation, shared: _Shared, indent: str, *, outermost: bool = False) -> None:
        self.shared = shared
        self.outermost = outermost
        self.indent = indent
        self.flat: FlatComputation = with_extremes(flatten(computation))
        for instruction in (*self.flat.parameters, *self.flat.outputs):
            array_of(instruction)
        self.schedule: Schedule = schedule(self.flat)
        self.items: list[Item] = []
        self.slots: dict[Instruction, int] = {}
        self.lines: list[str] = []
        self.in_place: dict[Instruction, Instruction] = {}  # result -> parameter whose buffer it overwrites
        self.aliases: dict[Instruction, Instruction] = {}  # loop result -> the operand that the loop leaves unchanged
        self.shared_places: dict[Instruction, Instruction] = {}  # temporary -> what a step makes of it where it stands
        self.brought: set[Instruction] = set()  # results of library calls that bring their memory
        self.released: dict[Step, list[Instruction]] = {}  # library call -> what nobody reads from then on

    def emit(self, *, carried: bool = False, aliases: Mapping[int, int] | None = None) -> tuple[list[int], int]:
        """The program's words and the bytes of scratch memory it needs.

        ``carried``: result k may be written over parameter k, as in the body of a loop. ``aliases``: the same for any
        pairs (result, parameter).
        """
        self.items = [lowered for item in self.schedule.items for lowered in self._lower(item)]
        self._find_shared_places()
        if carried:
            self._find_in_place({number: number for number in range(len(self.flat.outputs))})
        results = self._assign_results(carried)
        if aliases:
            self._find_in_place(aliases)
        self.slots.update((parameter, number) for number, parameter in enumerate(self.flat.parameters))
        for number, result in enumerate(results):
            parameter = self.in_place.get(result)
            if parameter is not None:
                self.slots[result] = self.slots[parameter]
            elif result not in self.slots:
                self.slots[result] = len(self.flat.parameters) + number
        self._find_brought()
        constants = self._place_constants(len(self.flat.parameters) + len(results))
        arena_bytes, temporaries = self._place_temporaries(len(self.flat.parameters) + len(results) + len(constants))
        words = [_MAGIC, len(self.flat.parameters), len(results), len(constants), len(temporaries), arena_bytes]
        words += [array_of(p).num_bytes for p in self.flat.parameters]
        words += [array_of(r).num_bytes for r in results]
        words += [self._written_over(result) for result in results]
        for offset, size in (*constants, *temporaries):
            words += [offset, size]
        live = [item for item in self.items if not is_empty(item)]
        words.append(len(live))
        for item in live:
            words += self._write(item)
        return words, arena_bytes

    def buffer_of(self, value: Instruction) -> Instruction:
        """Where ``value`` stands in memory."""
        buffer = self.schedule.buffers.get(value, value)
        while buffer in self.aliases:
            buffer = self.aliases[buffer]
        return buffer

    def _place_of(self, buffer: Instruction) -> Instruction:
        """The value whose place ``buffer`` has."""
        while buffer in self.shared_places:
            buffer = self.shared_places[buffer]
        return buffer

    # ---- library calls ----

    def _lower(self, item: Region | Instruction) -> Sequence[Item]:
        if isinstance(item, Region):
            regions = [part for whole in in_parts(item) for region in split(whole) for part in as_columns(region)]
            return [part for region in regions for part in lengthened(region)]
        if item.opcode is Opcode.DOT:
            product = as_matrix_product(item, *self._views(item))
            if product is not None:
                return [product]
            widened = as_widened_product(item, *self._views(item))
            if widened is not None:
                return widened
            arranged = as_arranged_product(item, *self._views(item))
            if arranged is not None:
                return arranged
        if item.opcode is Opcode.CONVOLUTION:
            patches = as_patch_products(item, *self._buffers(item))
            if patches is not None:
                return patches
        lower = {
            Opcode.DYNAMIC_SLICE: self._lower_dynamic_slice,
            Opcode.DYNAMIC_UPDATE_SLICE: self._lower_dynamic_update_slice,
            Opcode.WHILE: self._lower_while,
            Opcode.CONDITIONAL: self._lower_conditional,
            Opcode.TOP_K: self._lower_top_k,
            **dict.fromkeys(_COMPLEX_OPS, self._lower_complex),
            Opcode.GATHER: self._lower_gather,
            Opcode.REDUCE: self._lower_reduce,
            Opcode.SCATTER: self._lower_scatter,
            **dict.fromkeys((Opcode.CHOLESKY, Opcode.TRIANGULAR_SOLVE, Opcode.CUSTOM_CALL), self._lower_linear_algebra),
        }.get(item.opcode, self._lower_call)
        return [lower(item)]

    def _buffers(self, instruction: Instruction) -> tuple[Instruction, ...]:
        return tuple(view.buffer for view in self._views(instruction))

    def _views(self, instruction: Instruction) -> tuple[View, ...]:
        """Where the operands of a library call stand."""
        known = self.schedule.views
        return tuple(
            known.get((instruction, number)) or row_major(self.buffer_of(operand), array_of(operand).dims)
            for number, operand in enumerate(self.flat.operands(instruction))
        )

    def _lower_call(self, item: Instruction) -> Step:
        targets = self.flat.leaves_of[item]
        operands = self.flat.operands(item)
        views = tuple(self.schedule.views.get((item, number)) for number in range(len(operands)))
        shapes = tuple(array_of(v.buffer if v else o) for o, v in zip(operands, views, strict=True))
        call = Call(item, shapes, tuple(array_of(t) for t in targets), views)
        self.shared.calls.append(call)
        text = f"call {item.opcode} {item.name}"
        numbers = (len(self.shared.calls) - 1, int(_may_share_out(call)))
        return Step(CALL, self._buffers(item), targets, text, numbers)

    def _lower_dynamic_slice(self, item: Instruction) -> Step:
        array, *starts = self.flat.operands(item)
        return self._copy_block(item, (array, *starts), dims_of(array), dims_of(item), "native dynamic-slice")

    def _lower_dynamic_update_slice(self, item: Instruction) -> Step:
        array, update, *starts = self.flat.operands(item)
        operands = (update, array, *starts)
        return self._copy_block(item, operands, dims_of(item), dims_of(update), "native dynamic-update-slice")

    def _lower_top_k(self, item: Instruction) -> Step:
        (operand,) = self.flat.operands(item)
        attributes = item.attributes_as(TopKAttributes)
        element_type, dims = array_of(operand).element_type, dims_of(operand)
        values, indices = self.flat.leaves_of[item]
        if not is_arithmetic_type(element_type) or not 0 < attributes.k <= _MAX_TOP_K:
            return self._lower_call(item)
        numbers = (int(element_type), prod(dims[:-1]), dims[-1], attributes.k, int(attributes.largest))
        text = f"native top {attributes.k} {item.name} of {array_of(operand)}"
        return Step(TOP_K, self._buffers(item), (values, indices), text, numbers)

    def _lower_complex(self, item: Instruction) -> Step:
        """Others are multiplied and divided in loop nests, whose elements have no more than 8 bytes."""
        shape = array_of(item)
        if shape.element_type is not ElementType.C128:
            return self._lower_call(item)
        known = self.schedule.views
        repeated = [int((item, number) in known) for number in range(2)]
        numbers = (_COMPLEX_OPS[item.opcode], shape.num_elements, *repeated)
        return Step(COMPLEX, self._buffers(item), (item,), f"native {item.opcode} {item.name} {shape}", numbers)

    def _lower_gather(self, item: Instruction) -> Step:
        numbers = gather_numbers(item)
        if numbers is None:
            return self._lower_call(item)
        return Step(GATHER, self._buffers(item), (item,), f"native gather {item.name} {item.shape}", numbers)

    def _lower_reduce(self, item: Instruction) -> Step:
        numbers = extreme_numbers(item)
        if numbers is None:
            return self._lower_call(item)
        text = f"native extremes {item.name} of {array_of(self.flat.operands(item)[0])}"
        return Step(ARG_EXTREME, self._buffers(item), self.flat.leaves_of[item], text, numbers)

    def _lower_scatter(self, item: Instruction) -> Step:
        numbers = scatter_numbers(item)
        if numbers is None:
            return self._lower_call(item)
        return Step(SCATTER, self._buffers(item), (item,), f"native scatter {item.name} {item.shape}", numbers)

    def _lower_linear_algebra(self, item: Instruction) -> Step:
        numbers = linear_algebra_numbers(item)
        if numbers is None:
            return self._lower_call(item)
        text = f"native {item.opcode} {item.name} {item.shape}"
        return Step(LINEAR_ALGEBRA, self._buffers(item), self.flat.leaves_of[item], text, numbers)

    def _copy_block(
        self,
        item: Instruction,
        operands: tuple[Instruction, ...],
        dims: tuple[int, ...],
        block: tuple[int, ...],
        name: str,
    ) -> Step:
        """A block at run-time starts: sliced out of an array, or written into a copy of one."""
        kind = SLICE if item.opcode is Opcode.DYNAMIC_SLICE else UPDATE
        starts = operands[1:] if kind == SLICE else operands[2:]
        types = [int(array_of(start).element_type) for start in starts]
        numbers = (array_of(item).element_type.bytes, len(dims), *dims, *block, *types)
        buffers = tuple(self.buffer_of(o) for o in operands)
        return Step(kind, buffers, (item,), f"{name} {item.name} {item.shape}", numbers)

    def _nested(self, computation: Computation, *, carried: bool = False) -> tuple[_Emitter, list[int], int]:
        emitter = _Emitter(computation, self.shared, self.indent + "  ")
        words, scratch = emitter.emit(carried=carried)
        return emitter, words, scratch

    def _lower_while(self, item: Instruction) -> Step:
        try:
            condition, condition_words, condition_scratch = self._nested(item.called[0])
            body, body_words, body_scratch = self._nested(item.called[1], carried=True)
        except NotNativeError:
            return self._lower_call(item)
        leaves = self.flat.leaves_of[item]
        modes = [
            _OVERWRITTEN if output in body.in_place else _INVARIANT if output is parameter else _BUFFERED
            for output, parameter in zip(map(body.buffer_of, body.flat.outputs), body.flat.parameters, strict=True)
        ]
        carried = tuple(zip(leaves, modes, self._buffers(item), strict=True))
        self.aliases.update((leaf, source) for leaf, mode, source in carried if mode == _INVARIANT)
        targets = tuple(leaf for leaf, mode, _ in carried if mode != _INVARIANT)
        second = tuple(
            Instruction(Opcode.COPY, t.shape, (t,), name=f"{t.name}.next")
            for t, mode, _ in carried
            if mode == _BUFFERED
        )
        scratch = scratch_of(item, max(condition_scratch, body_scratch))
        trip_count = item.attributes_as(WhileAttributes).trip_count
        numbers = (-1 if trip_count is None else trip_count, len(modes), *modes)
        nested = (len(condition_words), *condition_words, len(body_words), *body_words)
        times = "while" if trip_count is None else f"{trip_count} times"
        text = "\n".join((f"native loop {item.name} {times}", *condition.lines, *body.lines))
        return Step(WHILE, self._buffers(item), targets, text, numbers, (*second, scratch), nested)

    def _lower_conditional(self, item: Instruction) -> Step:
        index, *operands = (self.flat.leaves_of[operand] for operand in item.operands)
        nested: list[int] = []
        lines: list[str] = []
        scratch_bytes = 0
        try:
            for computation in item.called:
                emitter, words, scratch = self._nested(computation)
                nested += [len(words), *words]
                lines += [f"{self.indent}  branch {computation.name}", *emitter.lines]
                scratch_bytes = max(scratch_bytes, scratch)
        except NotNativeError:
            return self._lower_call(item)
        is_pred = array_of(index[0]).element_type is ElementType.PRED
        targets = self.flat.leaves_of[item]
        numbers = (int(is_pred), len(item.called), *(len(leaves) for leaves in operands), len(targets))
        text = "\n".join((f"native conditional {item.name}", *lines))
        memory = scratch_of(item, scratch_bytes)
        return Step(CONDITIONAL, self._buffers(item), targets, text, numbers, (memory,), tuple(nested))

    # ---- places ----

    def _find_brought(self) -> None:
        """Arrays that are where the library that makes them puts them: nobody copies them to a place of ours."""
        for item in self.items if self.outermost else ():
            if isinstance(item, Step) and item.kind == CALL:
                self.brought.update(t for t in item.targets if t not in self.in_place and array_of(t).num_bytes)

    def _written_over(self, result: Instruction) -> int:
        """The number of the parameter that a result is written over, or what stands for none."""
        if self.slots[result] < len(self.flat.parameters):
            return self.slots[result]
        return _RESULT_BROUGHT if result in self.brought else -1

    def _find_shared_places(self) -> None:
        """Temporaries that a step changes instead of a copy of them, because nobody reads them from then on."""
        kept = set(map(self.buffer_of, self.flat.outputs))
        writer = {target: item for item in self.items for target in targets(item)}
        last = {self.buffer_of(s): number for number, item in enumerate(self.items) for s in sources(item)}
        for number, item in enumerate(self.items):
            array = overwritable(item)
            if array is None or array in kept or last[array] != number:
                continue
            made_by = writer.get(array)
            if made_by is not None and not (isinstance(made_by, Step) and made_by.kind == CALL):
                (self.shared_places[array],) = targets(item)

    def _find_in_place(self, aliases: Mapping[int, int]) -> None:
        """Results that may be written over a parameter, because nobody reads it from then on."""
        buffers = [self.buffer_of(output) for output in self.flat.outputs]
        for result, number in aliases.items():
            output, parameter = buffers[result], self.flat.parameters[number]
            writers = [n for n, item in enumerate(self.items) if output in map(self._place_of, targets(item))]
            readers = [n for n, item in enumerate(self.items) if parameter in map(self.buffer_of, sources(item))]
            once = buffers.count(output) == 1 and parameter not in buffers
            if not writers or not once or array_of(output).num_bytes != array_of(parameter).num_bytes:
                continue
            last = max(readers, default=-1)
            if last < writers[0] or (writers == [last] and writes_over(self.items[last], output, parameter)):
                self.in_place[output] = parameter

    def _assign_results(self, carried: bool) -> list[Instruction]:
        """One buffer for each output; outputs that are parameters, constants or repeated are copied.

        ``carried``: parameter k as output k stays where it is.
        """
        taken: set[Instruction] = set()
        results = []
        written = {target for item in self.items for target in targets(item)}
        for number, output in enumerate(self.flat.outputs):
            buffer = self.buffer_of(output)
            unchanged = carried and buffer is self.flat.parameters[number]
            if not unchanged and (buffer in taken or buffer not in written):
                dims = (array_of(buffer).num_elements,)
                copy = Instruction(Opcode.COPY, output.shape, (buffer,), name=f"{output.name}.copy")
                value = Load(movable(array_of(buffer)).element_type, buffer, axis(0, 1))
                self.items.append(Region(dims, stores=(Store(copy, value, axis(0, 1)),)))
                buffer = copy
            taken.add(buffer)
            results.append(buffer)
        return results

    def _place_constants(self, first_slot: int) -> list[tuple[int, int]]:
        places: list[tuple[int, int]] = []
        for source in dict.fromkeys(self.buffer_of(s) for item in self.items for s in sources(item)):
            if source.opcode is Opcode.CONSTANT:
                content = source.attributes_as(ConstantAttributes).data
                self.slots[source] = first_slot + len(places)
                places.append((self.shared.place(content), len(content)))
        return places

    def _place_temporaries(self, first_slot: int) -> tuple[int, list[tuple[int, int]]]:
        first: dict[Instruction, int] = {}
        last: dict[Instruction, int] = {}
        for number, item in enumerate(self.items):
            for target in map(self._place_of, (*targets(item), *scratches(item))):
                first.setdefault(target, number)
                last[target] = number
            for source in map(self.buffer_of, sources(item)):
                last[self._place_of(source)] = number
        temporaries = [t for t in first if t not in self.slots]
        planned = [t for t in temporaries if t not in self.brought]
        intervals = [Interval(first[t], last[t], array_of(t).num_bytes) for t in planned]
        offsets, total = plan_arena(intervals)
        places = dict(zip(planned, offsets, strict=True))
        self.slots.update((temporary, first_slot + number) for number, temporary in enumerate(temporaries))
        self.slots.update((shared, self.slots[self._place_of(shared)]) for shared in self.shared_places)
        self.slots.update((alias, self.slots[self.buffer_of(alias)]) for alias in self.aliases)
        self._release([t for t in temporaries if t in self.brought], last)
        return total, [(places.get(t, _BROUGHT), array_of(t).num_bytes) for t in temporaries]

    def _release(self, temporaries: Sequence[Instruction], last: Mapping[Instruction, int]) -> None:
        """Memory that calls brought is given back at the first call after its last use: calls have the interpreter."""
        waiting = list(temporaries)
        for number, item in enumerate(self.items):
            if isinstance(item, Step) and item.kind == CALL:
                self.released[item] = [t for t in waiting if last[t] < number]
                waiting = [t for t in waiting if last[t] >= number]

    # ---- words ----

    def _write(self, item: Item) -> list[int]:
        self.lines += (
            self.indent + line.lstrip() if n == 0 else line for n, line in enumerate(text_of(item).split("\n"))
        )
        self.shared.operations += operations(item)
        if isinstance(item, Region):
            region = with_rotations(with_floors(with_logistics(with_base_two(item))))
            if row_loop.folds_rows(region, simplify(region)):
                return row_loop.write(with_pairs(region, row_loop.Phases(region).varies), self.slots)
            return point_loop.write(with_pairs(region, {}), self.slots)
        if isinstance(item, MatrixProduct):
            return self._write_product(item)
        words = [item.kind, *item.numbers]
        for group in (item.sources, item.targets, self.released.get(item, item.scratch)):
            words += [len(group), *(self.slots[buffer] for buffer in group)]
        return [*words, *item.nested]

    def _write_product(self, product: MatrixProduct) -> list[int]:
        sizes = (product.m, product.n, product.k)
        types = (product.element_type, *product.operand_types)
        words = [PRODUCT, *map(int, types), len(product.batch), *product.batch, *sizes]
        for operand in (product.lhs, product.rhs, product.result):
            words += [self.slots[operand.buffer], operand.offset, *operand.batch_strides]
            words += [operand.leading, int(operand.transposed)]
        return words
