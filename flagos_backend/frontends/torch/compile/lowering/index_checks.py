"""Checks of indices, which on the host raise what eager raises for one that lies outside. Accelerators do not look."""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array
from flagos_backend.frontends.torch.compile.lowering.index_ranges import range_of
from flagos_backend.ir.custom_calls.index_check import INDEX, IndexCheck
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType, TupleShape

# They have the elements of their operand, in another order or several times.
_SAME_ELEMENTS = frozenset({Opcode.BROADCAST, Opcode.RESHAPE, Opcode.TRANSPOSE, Opcode.REVERSE, Opcode.COPY})


@dataclass(frozen=True, slots=True)
class Refusal:
    """What eager raises: a class of Python's, and a message that may name the ``{index}``."""

    message: str
    exception: str = "IndexError"


IN_SELF = Refusal("index out of range in self")


def of_dimension(dimension: int, size: int, prefix: str = "", exception: str = "IndexError") -> Refusal:
    return Refusal(f"{prefix}index {INDEX} is out of bounds for dimension {dimension} with size {size}", exception)


def check(emitter: Emitter, index: Instruction, low: int, high: int, refusal: Refusal) -> None:
    """``index``, of S32 or S64, lies in ``low`` ... ``high`` - 1, or a program of the host raises. Raises
    NoLoweringError where nothing lies there."""
    if not emitter.on_host or not array(index).num_elements:
        return
    if low >= high:
        raise NoLoweringError("ATen says that there is nothing to choose from")
    index = _few(index)
    found = range_of(index, emitter.ranges)
    if found is not None and low <= found[0] and found[1] < high:
        return
    wanted = IndexCheck(low, high, refusal.exception, refusal.message)
    if (index, wanted) in emitter.checked:
        return
    emitter.checked.add((index, wanted))
    emitter.builder.add(Opcode.CUSTOM_CALL, [index], wanted.attributes(), shape=TupleShape(()))


def _few(index: Instruction) -> Instruction:
    """An array with the same numbers, each as seldom as it is there."""
    while index.opcode in _SAME_ELEMENTS or _is_widened(index):
        index = index.operands[0]
    return index


def _is_widened(index: Instruction) -> bool:
    return index.opcode is Opcode.CONVERT and array(index.operands[0]).element_type is ElementType.S32
