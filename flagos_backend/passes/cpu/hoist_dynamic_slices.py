"""A window whose start is known at run time goes before the elementwise operations that make its array, where that is
much larger: an iteration of a loop that reads a row of it computes that row.

On the host, whose loops find windows of what is in memory. On accelerators a kernel computes what it reads of an array
wherever it reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    ConstantAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    DynamicSliceAttributes,
)
from flagos_backend.ir.constants import scalar_bytes
from flagos_backend.ir.elementwise import is_elementwise
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import (
    Emitter,
    Replacement,
    array_shape,
    replace_each,
    rewrite_computations,
    users_of,
)

# How many elements an array has for each that its windows show.
_LEAST_SHARE = 8
# Values that are made of each window, and how many arrays it is read from instead of one.
_MOST_OPERATIONS = 32
_MOST_ARRAYS = 8
_COUNTS = frozenset({ElementType.S32, ElementType.S64, ElementType.U32, ElementType.U64})


def hoist_dynamic_slices(module: Module) -> Module:
    return rewrite_computations(module, _transform)


def _transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
    users: dict[int, list[Instruction]] | None = None

    def find(instruction: Instruction) -> Replacement | None:
        nonlocal users
        if instruction.opcode is not Opcode.DYNAMIC_SLICE or not _is_computed(instruction.operands[0]):
            return None
        users = users_of(computation) if users is None else users
        source = instruction.operands[0]
        if source is computation.root or not _shows_little(source, users[id(source)]):
            return None
        return _Sunk(instruction).replacement()

    return replace_each(computation, replaced, find)


def _is_computed(value: Instruction) -> bool:
    """Point by point."""
    return is_elementwise(value) or value.opcode is Opcode.BROADCAST or _is_count(value)


def _is_count(value: Instruction) -> bool:
    return value.opcode is Opcode.IOTA and array_shape(value).element_type in _COUNTS


def _shows_little(source: Instruction, users: list[Instruction]) -> bool:
    """Whether small windows are all that is wanted of ``source``."""
    if any(user.opcode is not Opcode.DYNAMIC_SLICE for user in users):
        return False
    shown = sum(max(array_shape(user).num_elements, 1) for user in users)
    return array_shape(source).num_elements >= _LEAST_SHARE * shown


@dataclass(frozen=True, slots=True)
class _Window:
    """``starts``: scalars, clamped so that it lies inside."""

    starts: tuple[Instruction, ...]
    sizes: tuple[int, ...]

    def along(self, dims: tuple[int, ...]) -> _Window:
        return _Window(tuple(self.starts[d] for d in dims), tuple(self.sizes[d] for d in dims))


class _Sunk:
    """What replaces a dynamic-slice."""

    def __init__(self, window: Instruction) -> None:
        self._window = window
        self._emitter = Emitter()
        self._known: dict[tuple[int, _Window], Instruction] = {}
        self._operations = self._arrays = 0

    def replacement(self) -> Replacement | None:
        """None where too much would be computed for each window, or read."""
        source, *starts = self._window.operands
        sizes = self._window.attributes_as(DynamicSliceAttributes).sizes
        value = self._part(source, _Window(tuple(starts), sizes))
        fits = self._operations <= _MOST_OPERATIONS and self._arrays <= _MOST_ARRAYS
        return (value, self._emitter.instructions) if fits else None

    def _part(self, value: Instruction, window: _Window) -> Instruction:
        key = id(value), window
        if key not in self._known:
            self._known[key] = self._make(value, window)
        return self._known[key]

    def _make(self, value: Instruction, window: _Window) -> Instruction:
        if window.sizes == array_shape(value).dims:  # starts are clamped
            return value
        self._operations += 1
        if value.opcode is Opcode.BROADCAST:
            dims = value.attributes_as(DimensionsAttributes).dimensions
            return self._emit(value, window, [self._part(value.operands[0], window.along(dims))])
        if _is_count(value):
            return self._counted(value, window)
        if not is_elementwise(value) or self._operations > _MOST_OPERATIONS:
            self._arrays += 1
            attributes = DynamicSliceAttributes(window.sizes)
            return self._emit(value, window, [value, *window.starts], Opcode.DYNAMIC_SLICE, attributes)
        parts = [self._part(operand, window) if array_shape(operand).dims else operand for operand in value.operands]
        return self._emit(value, window, parts)

    def _counted(self, value: Instruction, window: _Window) -> Instruction:
        """Positions from the window's start on."""
        d = value.attributes_as(DimensionAttributes).dimension
        positions = self._emit(value, window, [])
        first, last = window.starts[d], array_shape(value).dims[d] - window.sizes[d]
        if not last:
            return positions
        scalar = _Window((), ())
        kind = array_shape(first).element_type
        greatest = (1 << kind.bits - kind.is_signed) - 1
        bounds = [self._constant(number, first) for number in (0, min(last, greatest))]
        start = self._emit(first, scalar, [bounds[0], first, bounds[1]], Opcode.CLAMP, NONE)
        if first.shape != ArrayShape(array_shape(value).element_type):
            start = self._emit(value, scalar, [start], Opcode.CONVERT, NONE)
        starts = self._emit(value, window, [start], Opcode.BROADCAST, DimensionsAttributes(()))
        return self._emit(value, window, [positions, starts], Opcode.ADD, NONE)

    def _constant(self, number: int, like: Instruction) -> Instruction:
        data = ConstantAttributes(scalar_bytes(number, array_shape(like).element_type))
        return self._emit(like, _Window((), ()), [], Opcode.CONSTANT, data)

    def _emit(
        self,
        like: Instruction,
        window: _Window,
        operands: list[Instruction],
        opcode: Opcode | None = None,
        attributes: Attributes | None = None,
    ) -> Instruction:
        """That of ``like`` with other ``operands``, unless it says otherwise, of the window's size."""
        shape = ArrayShape(array_shape(like).element_type, window.sizes)
        attributes = like.attributes if attributes is None else attributes
        return self._emitter.emit(opcode or like.opcode, shape, operands, attributes, like=self._window)
