"""Scatters as one launch of our Triton kernel on a copy of the array, or on the array itself (scatter_kernels.py): ATen
takes some ten to find which windows lie where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import ScatterAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.computations import plain_combiner, returned_parameter
from flagos_backend.kernels.reference.index_arithmetic import WindowOffsets, row_major_strides
from flagos_backend.kernels.reference.registry import InPlaceKernel, Run
from flagos_backend.kernels.reference.scatter import ScatterPlan, plan_scatter
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

E = ElementType
_INTEGERS = frozenset({E.S32, E.S64, E.U32, E.U64})
_FLOATS = frozenset({E.F32, E.F64})
# Chips combine these in memory.
_COMBINED = {
    Opcode.ADD: _INTEGERS | _FLOATS,
    Opcode.AND: _INTEGERS,
    Opcode.OR: _INTEGERS,
    Opcode.XOR: _INTEGERS,
    Opcode.MAXIMUM: _INTEGERS | _FLOATS,
    Opcode.MINIMUM: _INTEGERS | _FLOATS,
}
_ORDERED = frozenset({Opcode.MAXIMUM, Opcode.MINIMUM})
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {4: torch.uint32, 8: torch.uint64}
# The kernel takes that many indices of a window, one by one.
_MAX_COMPONENTS = 4
# Of two windows at one place the last is written: so many look at all others, more go by a table of all places, which
# has no more than so many places for each of them.
_MAX_COMPARED, _TABLE_RATIO = 1024, 16
_TILE, _WARPS = 512, 4
# CUDA's second dimension of a grid.
_MAX_BLOCKS = 65_535


@dataclass(frozen=True, slots=True)
class _Scatter:
    """``opcode``: what combines, None for what is written over."""

    plan: ScatterPlan
    element_type: ElementType
    opcode: Opcode | None
    unique: bool

    @classmethod
    def of(cls, instruction: Instruction) -> _Scatter:
        target, indices, updates = (operand.shape for operand in instruction.operands)
        assert isinstance(target, ArrayShape) and isinstance(indices, ArrayShape) and isinstance(updates, ArrayShape)
        attributes, computation = instruction.attributes_as(ScatterAttributes), instruction.called[0]
        opcode = None if returned_parameter(computation) == 1 else plain_combiner(computation)
        plan = plan_scatter(attributes, target, indices, updates)
        return cls(plan, target.element_type, opcode, attributes.unique_indices or plan.num_windows == 1)

    @property
    def elements(self) -> int:
        """Of a window."""
        return prod(self.plan.sizes)

    @property
    def places(self) -> int | None:
        """How many places there are for windows, which are whole rows of the target: the indices choose in its leading
        dimensions alone. None where windows may overlap without being at one place."""
        plan = self.plan
        whole = all(size == (1 if d in plan.indexed else plan.operand_dims[d]) for d, size in enumerate(plan.sizes))
        leading = sorted(plan.indexed) == list(range(len(plan.indexed)))
        return prod(plan.operand_dims[: len(plan.indexed)]) if whole and leading else None

    @property
    def compares_floats(self) -> bool:
        return self.opcode in _ORDERED and self.element_type.is_float

    @property
    def chooses_last(self) -> bool:
        return self.opcode is None and not self.unique


def unsupported(instruction: Instruction, target: Target) -> str:
    """Why not, or "". Cheap: no device is asked."""
    if len(instruction.operands) != 3:
        return "it scatters into one array"
    scatter = _Scatter.of(instruction)
    plan, element_type = scatter.plan, scatter.element_type
    if scatter.opcode is None and returned_parameter(instruction.called[0]) != 1:
        return "chips have no instruction for its combination"
    if scatter.opcode is not None and element_type not in _COMBINED.get(scatter.opcode, ()):
        return f"chips have no instruction for {scatter.opcode} of {element_type.name.lower()}"
    if element_type.bytes not in _BITS:
        return f"it moves no {element_type.name.lower()}"
    if plan.batch_sources or len(plan.indexed) > _MAX_COMPONENTS:
        return f"it takes up to {_MAX_COMPONENTS} indices of a window, and no batches"
    if not prod(plan.operand_dims) or not scatter.elements * plan.num_windows:
        return "there is nothing to scatter"
    if scatter.elements > _TILE * _MAX_BLOCKS:
        return "windows are too large"
    if scatter.chooses_last:
        places = scatter.places
        if places is None:
            return "windows that overlap are written in their order"
        if plan.num_windows > _MAX_COMPARED and places > _TABLE_RATIO * plan.num_windows:
            return "there are too many places for a table of the last window at each"
    return ""


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    """target, indices and updates to the updated target, as HLO's scatter has it."""
    scatter = _Scatter.of(instruction)
    plan, size = scatter.plan, scatter.element_type.bytes
    launcher = _Launcher(scatter)
    in_rows = launcher.in_rows

    def copied(array: Tensor, out: Tensor | None) -> Tensor:
        made = torch.empty(plan.operand_dims, dtype=array.dtype, device=array.device) if out is None else out
        if not scatter.compares_floats:
            return made.copy_(array)
        launcher.copy_with_nan_of_extremum(array.contiguous().view(_BITS[size]), made.view(_BITS[size]))
        return made

    def into(run: Run, outputs: Sequence[Tensor | None], array: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        made = copied(array, outputs[0])
        launcher(made, indices, in_rows(updates))
        return made

    def kernel(run: Run, array: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        return into(run, (None,), array, indices, updates)

    def over(run: Run, array: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        made = array.contiguous()
        launcher(made, indices, in_rows(updates))
        return array if made is array else array.copy_(made)

    # What is there must have NaN that compare as such.
    in_place = None if scatter.compares_floats else InPlaceKernel(over, (0,))
    return (Variant("", kernel, into, in_place=in_place),)


class _Launcher:
    """``launcher(target, indices, updates)`` updates a row-major target."""

    def __init__(self, scatter: _Scatter) -> None:
        from flagos_backend.kernels.triton import scatter_kernels as kernels

        self._kernels, self._scatter = kernels, scatter
        plan, element_type = scatter.plan, scatter.element_type
        strides = row_major_strides(plan.operand_dims)
        filler = (0,) * (_MAX_COMPONENTS - len(plan.indexed))
        steps = tuple(strides[d] for d in plan.indexed)
        self._numbers = (*plan.limits, *filler, *steps, *filler)
        self._offsets = WindowOffsets(plan.sizes, strides)
        in_a_row = _is_in_a_row(plan)
        index_bits = plan.index_type.bits if plan.index_type.is_unsigned and plan.index_type.bits in (16, 32) else 0
        self._index_flags = {"COMPONENTS": len(plan.indexed), "BITS": index_bits}
        bits = 8 * element_type.bytes
        self._float_flags = {
            "INFINITE": 0x7F800000 if bits == 32 else 0x7FF << 52,
            "GREATEST": (1 << (bits - 1)) - 1,
        }
        width = min(_TILE, 1 << max(scatter.elements - 1, 0).bit_length())
        self._written = kernels.ANY
        if scatter.chooses_last:
            self._written = kernels.LAST if plan.num_windows <= _MAX_COMPARED else kernels.OF_TABLE
        # Comparing takes a square of windows.
        self._windows = min(32, _TILE // width) if self._written is kernels.LAST else _TILE // width
        self._flags: dict[str, Any] = {
            **self._index_flags,
            **self._float_flags,
            "IN_A_ROW": in_a_row,
            "COMBINE": self._combine().value,
            "WRITTEN": self._written.value,
            "BLOCK_W": self._windows,
            "BLOCK_E": width,
            "num_warps": _WARPS,
        }
        self._grid = (-(-plan.num_windows // self._windows), -(-scatter.elements // width))

    def _combine(self) -> Any:
        kernels, opcode = self._kernels, self._scatter.opcode
        if opcode is None:
            return kernels.SET
        if self._scatter.compares_floats:
            return kernels.FLOAT_MAXIMUM if opcode is Opcode.MAXIMUM else kernels.FLOAT_MINIMUM
        return getattr(kernels, opcode.name)

    def in_rows(self, updates: Tensor) -> Tensor:
        """[windows..., window...], row-major."""
        return updates.permute(self._scatter.plan.to_rows).contiguous()

    def copy_with_nan_of_extremum(self, source: Tensor, copy: Tensor) -> None:
        """Of the bits of floats, row-major."""
        greatest = self._float_flags["GREATEST"]
        nan = greatest if self._scatter.opcode is Opcode.MAXIMUM else -1
        grid = (-(-source.numel() // _TILE),)
        flags = {**self._float_flags, "NAN": nan, "BLOCK": _TILE, "num_warps": _WARPS}
        launch(self._kernels.with_nan_of_extremum, grid, source, copy, source.numel(), **flags)

    def __call__(self, target: Tensor, indices: Tensor, updates: Tensor) -> None:
        scatter, plan = self._scatter, self._scatter.plan
        signed, unsigned = self._views(target)
        rows = self._rows(indices) if plan.indexed else signed  # of which nothing is read
        offsets = rows if self._flags["IN_A_ROW"] else self._table_of_offsets(target)
        table = self._last(rows) if self._written is self._kernels.OF_TABLE else rows
        arrays = (signed, unsigned, rows, self._views(updates)[0], offsets, table)
        launch(
            self._kernels.scatter,
            self._grid,
            *arrays,
            plan.num_windows,
            scatter.elements,
            *self._numbers,
            **self._flags,
        )

    def _rows(self, indices: Tensor) -> Tensor:
        """[windows, components], row-major."""
        dimension = self._scatter.plan.index_vector_dim
        return (indices if dimension == indices.dim() else indices.movedim(dimension, -1)).contiguous()

    def _views(self, array: Tensor) -> tuple[Tensor, Tensor]:
        """As the kernel combines it: floats that are added as they are, all others as their bits."""
        element_type, size = self._scatter.element_type, self._scatter.element_type.bytes
        if self._scatter.opcode is Opcode.ADD:
            return array, array
        if element_type.is_unsigned and self._scatter.opcode in _ORDERED:
            bits = array.view(_UNSIGNED[size])
            return bits, bits
        bits = array.view(_BITS[size])
        return bits, array.view(_UNSIGNED[size]) if self._scatter.compares_floats else bits

    def _table_of_offsets(self, target: Tensor) -> Tensor:
        if target.is_meta:
            return torch.empty(self._scatter.elements, dtype=torch.int64, device="meta")
        return self._offsets.on(target.device)

    def _last(self, indices: Tensor) -> Tensor:
        """The last window at each place, -1 where there is none."""
        plan, places = self._scatter.plan, self._scatter.places
        assert places is not None
        table = torch.full((places,), -1, dtype=torch.int32, device=indices.device)
        grid = (-(-plan.num_windows // _TILE),)
        sizes = (plan.num_windows, self._scatter.elements, *self._numbers)
        flags = {**self._index_flags, "BLOCK": _TILE, "num_warps": _WARPS}
        launch(self._kernels.last_windows, grid, table, indices, *sizes, **flags)
        return table


def _is_in_a_row(plan: ScatterPlan) -> bool:
    """Whether a window's elements lie side by side: from some dimension on it is whole, and before that one thick."""
    for d, size in enumerate(plan.sizes):
        if size != 1:
            return plan.sizes[d + 1 :] == plan.operand_dims[d + 1 :]
    return True
