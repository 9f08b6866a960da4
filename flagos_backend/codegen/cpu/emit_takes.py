"""Steps of loops that read an array at numbers which the loop computes: addresses that flatten_addresses.py made flat.

Shared by the writers of loops, emit_map_loop.py and emit_row_loop.py; native/cpu/parse_steps.cc reads the bytecode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeGuard

from flagos_backend.codegen.cpu.bytecode import StepKind
from flagos_backend.codegen.cpu.encoding import tile_type
from flagos_backend.codegen.cpu.steps import NotNativeError
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Apply, Expression, Load


def is_taken(expression: Expression) -> TypeGuard[Load]:
    """Whether it is an element of an array at a number that the loop computes."""
    return isinstance(expression, Load) and bool(expression.index.shifts)


def is_step(expression: Expression) -> TypeGuard[Apply | Load]:
    """Whether a loop computes it step by step: an operation, or what ``is_taken``."""
    return isinstance(expression, Apply) or is_taken(expression)


class Arrays:
    """The arrays that a loop reads at numbers which it computes, and their registers."""

    def __init__(self, slots: Mapping[Instruction, int]) -> None:
        self._slots = slots
        self._arrays: dict[tuple[int, ElementType], int] = {}
        self._lasts: dict[int, int] = {}  # numbers of last elements, in registers of their own

    def add(self, load: Load, register: Callable[[ElementType], int]) -> None:
        """``load``, which ``is_taken``, will be a step. ``register`` makes one for an element type.

        Raises:
            NotNativeError: its address is not flat.
        """
        first, *others = load.index.shifts
        is_flat = replace(load.index, shifts=()).is_constant and load.index.offset == 0 and first.factor == 1
        if others or not is_flat or load.guard is not None:
            raise NotNativeError(f"a load of {load.source.name} at an address of several parts")
        kind = tile_type(load.element_type)
        key = self._slots[load.source], kind
        if key not in self._arrays:
            self._arrays[key] = register(kind)
        if first.limit not in self._lasts:
            self._lasts[first.limit] = register(ElementType.S64)

    def take(self, load: Load, registers: Mapping[Expression, int]) -> list[int]:
        """The bytecode of one that was added."""
        (shift,) = load.index.shifts
        kind = tile_type(load.element_type)
        array = self._arrays[self._slots[load.source], kind]
        number = registers[shift.start]
        return [
            *(StepKind.TAKE, int(shift.start.element_type), int(kind)),
            *(registers[load], number, array, self._lasts[shift.limit]),
        ]

    def literals(self) -> list[list[int]]:
        """What stands among the loop's constants."""
        return [[register, last] for last, register in self._lasts.items()]

    def entries(self) -> list[list[int]]:
        """Slots and registers."""
        return [[slot, register] for (slot, _), register in self._arrays.items()]
