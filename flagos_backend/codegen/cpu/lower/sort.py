"""Writes a sort by keys as the numbers of a native step: its rows, the bytes of its operands' elements, its keys.

Used by instruction.py; native/cpu/parse_sort.cc reads the numbers.
"""

from __future__ import annotations

from math import prod

from flagos_backend.codegen.cpu.encoding import is_arithmetic_type
from flagos_backend.ir.attributes import SortAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.sort_keys import SortKey, operand_key, sort_keys
from flagos_backend.ir.types import ArrayShape

_MAX_SIZE = (1 << 31) - 1  # positions are 32 bits
_MAX_ELEMENTS = 1 << 48
_ELEMENT_BYTES = frozenset({1, 2, 4, 8, 16})


def sort_numbers(item: Instruction) -> tuple[int, ...] | None:
    """The numbers of ``item``; None for what native code does not order: by a comparator that is none of keys, by keys
    that are computed, or by types that tiles do not compare."""
    shapes = [operand.shape for operand in item.operands if isinstance(operand.shape, ArrayShape)]
    found = sort_keys(item.called[0])
    if found is None or len(shapes) != len(item.operands):
        return None
    dims, dimension = shapes[0].dims, item.attributes_as(SortAttributes).dimension
    sizes = [shape.element_type.bytes for shape in shapes]
    if dims[dimension] > _MAX_SIZE or prod(dims) > _MAX_ELEMENTS or not _ELEMENT_BYTES.issuperset(sizes):
        return None
    keys: list[int] = []
    for key in found:
        numbers = _key_numbers(key)
        if numbers is None:
            return None
        keys += numbers
    rows = (prod(dims[:dimension]), dims[dimension], prod(dims[dimension + 1 :]))
    return (*rows, len(sizes), *sizes, len(found), *keys)


def _key_numbers(key: SortKey) -> tuple[int, ...] | None:
    """Operand, type, whether it descends, whether its zeros and NaNs are equal."""
    read = operand_key(key)
    if read is None or not is_arithmetic_type(key.element_type):
        return None
    return (read.operand, int(key.element_type), int(key.descending), int(read.merged))
