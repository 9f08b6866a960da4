"""From an instruction that is no part of a loop nest to the steps that compute it: native ones where there are, else a
library call. Loops and conditionals, which have programs of their own, are emitter.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.codegen.cpu.buffer_assignment import BufferAssignment
from flagos_backend.codegen.cpu.bytecode import COMPLEX_OPERATIONS, ItemKind
from flagos_backend.codegen.cpu.encoding import index_type, is_arithmetic_type
from flagos_backend.codegen.cpu.lower.argminmax import argminmax_numbers
from flagos_backend.codegen.cpu.lower.decompositions import decomposition_numbers
from flagos_backend.codegen.cpu.lower.dot import as_matrix_product
from flagos_backend.codegen.cpu.lower.dot_transposed import as_arranged_product
from flagos_backend.codegen.cpu.lower.dot_widened import as_widened_product
from flagos_backend.codegen.cpu.lower.fourier import fourier_numbers, fourier_scratch
from flagos_backend.codegen.cpu.lower.gather import gather_numbers
from flagos_backend.codegen.cpu.lower.linear_algebra import linear_algebra_numbers
from flagos_backend.codegen.cpu.lower.scatter import scatter_numbers
from flagos_backend.codegen.cpu.lower.sort import sort_numbers
from flagos_backend.codegen.cpu.lower.transposed_convolution import as_patch_products
from flagos_backend.codegen.cpu.steps import Item, Step, array_of, over, scratch_of
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.ir.attributes import TopKAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.library_calls import may_use_threads, runs_alone
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.indexing import View, dims_of, row_major

_MAX_TOP_K = 128  # kMaxTopK of native/cpu/native_program.h
# at::internal::GRAIN_SIZE: the elements that one thread of a loop of torch's has at least.
_TORCH_GRAIN = 1 << 15


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
    if runs_alone(call.instruction):
        return False
    large = any(shape.num_elements >= _TORCH_GRAIN for shape in (*call.operands, *call.results))
    return large or may_use_threads(call.instruction)


class InstructionLowering:
    """Of the instructions of one computation. Library calls are numbered in ``calls``, which all programs share."""

    def __init__(
        self, flat: FlatComputation, schedule: Schedule, assignment: BufferAssignment, calls: list[Call]
    ) -> None:
        self._flat = flat
        self._schedule = schedule
        self._assignment = assignment
        self._calls = calls

    def lower(self, item: Instruction) -> Sequence[Item]:
        """What computes ``item``, in the order in which it runs."""
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
            patches = as_patch_products(item, *self.buffers(item))
            if patches is not None:
                return patches
        lower = {
            Opcode.DYNAMIC_SLICE: self._dynamic_slice,
            Opcode.DYNAMIC_UPDATE_SLICE: self._dynamic_update_slice,
            Opcode.TOP_K: self._top_k,
            **dict.fromkeys(COMPLEX_OPERATIONS, self._complex),
            Opcode.FFT: self._fourier,
            Opcode.GATHER: self._gather,
            Opcode.REDUCE: self._reduce,
            Opcode.SCATTER: self._scatter,
            Opcode.SORT: self._sort,
            **dict.fromkeys((Opcode.CHOLESKY, Opcode.TRIANGULAR_SOLVE, Opcode.CUSTOM_CALL), self._linear_algebra),
        }.get(item.opcode, self.call)
        return [lower(item)]

    def buffers(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """In which the operands of a library call stand."""
        return tuple(view.buffer for view in self._views(instruction))

    def _views(self, instruction: Instruction) -> tuple[View, ...]:
        """Where the operands of a library call stand."""
        known = self._schedule.views
        return tuple(
            known.get((instruction, number)) or row_major(self._assignment.buffer_of(operand), array_of(operand).dims)
            for number, operand in enumerate(self._flat.operands(instruction))
        )

    def call(self, item: Instruction) -> Step:
        """``item`` as a library call, which every instruction can be."""
        targets = self._flat.leaves_of[item]
        operands = self._flat.operands(item)
        views = tuple(self._schedule.views.get((item, number)) for number in range(len(operands)))
        shapes = tuple(array_of(v.buffer if v else o) for o, v in zip(operands, views, strict=True))
        call = Call(item, shapes, tuple(array_of(t) for t in targets), views)
        self._calls.append(call)
        text = f"call {item.opcode} {item.name}"
        numbers = (len(self._calls) - 1, int(_may_share_out(call)))
        return Step(ItemKind.CALL, self.buffers(item), targets, text, numbers)

    def _dynamic_slice(self, item: Instruction) -> Step:
        array, *starts = self._flat.operands(item)
        return self._copy_block(item, (array, *starts), dims_of(array), dims_of(item), "native dynamic-slice")

    def _dynamic_update_slice(self, item: Instruction) -> Step:
        array, update, *starts = self._flat.operands(item)
        operands = (update, array, *starts)
        return self._copy_block(item, operands, dims_of(item), dims_of(update), "native dynamic-update-slice")

    def _top_k(self, item: Instruction) -> Step:
        (operand,) = self._flat.operands(item)
        attributes = item.attributes_as(TopKAttributes)
        element_type, dims = array_of(operand).element_type, dims_of(operand)
        values, indices = self._flat.leaves_of[item]
        if not is_arithmetic_type(element_type) or not 0 < attributes.k <= _MAX_TOP_K:
            return self.call(item)
        numbers = (int(element_type), prod(dims[:-1]), dims[-1], attributes.k, int(attributes.largest))
        text = f"native top {attributes.k} {item.name} of {array_of(operand)}"
        return Step(ItemKind.TOP_K, self.buffers(item), (values, indices), text, numbers)

    def _complex(self, item: Instruction) -> Step:
        """Others are multiplied and divided in loop nests, whose elements have no more than 8 bytes."""
        shape = array_of(item)
        if shape.element_type is not ElementType.C128:
            return self.call(item)
        known = self._schedule.views
        repeated = [int((item, number) in known) for number in range(2)]
        numbers = (COMPLEX_OPERATIONS.index(item.opcode), shape.num_elements, *repeated)
        return Step(ItemKind.COMPLEX, self.buffers(item), (item,), f"native {item.opcode} {item.name} {shape}", numbers)

    def _fourier(self, item: Instruction) -> Step:
        numbers = fourier_numbers(item)
        if numbers is None:
            return self.call(item)
        size = fourier_scratch(item)
        scratch = (scratch_of(item, size),) if size else ()
        text = f"native fft {item.name} {item.shape}"
        return Step(ItemKind.FOURIER, self.buffers(item), (item,), text, numbers, scratch=scratch)

    def _gather(self, item: Instruction) -> Step:
        numbers = gather_numbers(item)
        if numbers is None:
            return self.call(item)
        return Step(ItemKind.GATHER, self.buffers(item), (item,), f"native gather {item.name} {item.shape}", numbers)

    def _reduce(self, item: Instruction) -> Step:
        numbers = argminmax_numbers(item)
        if numbers is None:
            return self.call(item)
        text = f"native argminmax {item.name} of {array_of(self._flat.operands(item)[0])}"
        return Step(ItemKind.ARG_MIN_MAX, self.buffers(item), self._flat.leaves_of[item], text, numbers)

    def _scatter(self, item: Instruction) -> Step:
        numbers = scatter_numbers(item)
        if numbers is None:
            return self.call(item)
        buffers = self.buffers(item)
        changed = over(item, buffers[0], buffers)
        return Step(ItemKind.SCATTER, buffers, (item,), f"native scatter {item.name} {item.shape}", numbers, changed)

    def _sort(self, item: Instruction) -> Step:
        numbers = sort_numbers(item)
        if numbers is None:
            return self.call(item)
        text = f"native sort {item.name} {item.shape}"
        return Step(ItemKind.SORT, self.buffers(item), self._flat.leaves_of[item], text, numbers)

    def _linear_algebra(self, item: Instruction) -> Step:
        numbers = linear_algebra_numbers(item) or decomposition_numbers(item)
        if numbers is None:
            return self.call(item)
        text = f"native {item.opcode} {item.name} {item.shape}"
        return Step(ItemKind.LINEAR_ALGEBRA, self.buffers(item), self._flat.leaves_of[item], text, numbers)

    def _copy_block(
        self,
        item: Instruction,
        operands: tuple[Instruction, ...],
        dims: tuple[int, ...],
        block: tuple[int, ...],
        name: str,
    ) -> Step:
        """A block at run-time starts: sliced out of an array, or written into a copy of one."""
        kind = ItemKind.SLICE if item.opcode is Opcode.DYNAMIC_SLICE else ItemKind.UPDATE
        starts = operands[1:] if kind == ItemKind.SLICE else operands[2:]
        types = [int(index_type(array_of(start).element_type)) for start in starts]
        numbers = (array_of(item).element_type.bytes, len(dims), *dims, *block, *types)
        buffers = tuple(self._assignment.buffer_of(o) for o in operands)
        changed = over(item, buffers[1], buffers) if kind == ItemKind.UPDATE else ()
        return Step(kind, buffers, (item,), f"{name} {item.name} {item.shape}", numbers, changed)
