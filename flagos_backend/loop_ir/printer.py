"""A loop nest as text, which parser.py reads back as an equal nest. SPEC.md has the grammar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.region import Affine, Expression, Index, Literal, Load, Reduce, Region

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_NUMPY_FLOATS = {ElementType.F16: np.float16, ElementType.F32: np.float32, ElementType.F64: np.float64}


def print_nests(nests: Iterable[Region]) -> str:
    return "\n\n".join(map(print_nest, nests))


def print_nest(nest: Region, names: Mapping[Instruction, str] | None = None) -> str:
    """One line for each distinct expression, operands first, then one for each store. ``names``: of all arrays, if they
    are not to have their own."""
    buffers = _buffer_names(nest) if names is None else {array: f"@{name}" for array, name in names.items()}
    values = {expression: f"%{number}" for number, expression in enumerate(nest.expressions())}
    arguments = ", ".join(f"{name}: {buffer.shape}" for buffer, name in buffers.items())
    lines = [f"  {name} = {_expression(e, values, buffers)}" for e, name in values.items()]
    lines += [
        f"  store {values[store.value]}, {buffers[store.target]}[{_affine(store.index, values)}]"
        for store in nest.stores
    ]
    return "\n".join([f"nest [{', '.join(map(str, nest.dims))}] ({arguments}) {{", *lines, "}"])


def print_literal(literal: Literal) -> str:
    """A number that reads back as the same bytes, or else the bytes, least significant digit last."""
    element_type, data = literal.element_type, literal.data
    if element_type is ElementType.PRED and data in (b"\0", b"\1"):
        return "true" if data[0] else "false"
    if len(data) == element_type.bytes and has_numbers(element_type):
        number = number_of(literal)
        numpy_type = _NUMPY_FLOATS.get(element_type)
        text = repr(number) if numpy_type is None else str(numpy_type(number))
        if literal_of(int(text) if element_type.is_integer else float(text), element_type) == literal:
            return text
    return f"0x{data[::-1].hex()}"


def has_numbers(element_type: ElementType) -> bool:
    """Whether literals of the type are written as numbers; else as bytes, but for predicates."""
    if element_type.is_integer:
        return element_type.bits >= 8
    return element_type in _NUMPY_FLOATS or element_type is ElementType.BF16


def _buffer_names(nest: Region) -> dict[Instruction, str]:
    """Loaded buffers first. Of two instructions with one name, the later gets a number."""
    found: dict[Instruction, str] = {}
    taken: set[str] = set()
    loaded = [e.source for e in nest.expressions() if isinstance(e, Load)]
    for buffer in (*loaded, *(store.target for store in nest.stores)):
        if buffer in found:
            continue
        if not isinstance(buffer.shape, ArrayShape):
            raise TypeError(f"{buffer.name} is a tuple, not an array")
        name, number = buffer.name, 1
        while name in taken:
            name, number = f"{buffer.name}.{number}", number + 1
        taken.add(name)
        found[buffer] = f"@{name}" if _PLAIN_NAME.fullmatch(name) else f'@"{_escaped(name)}"'
    return found


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode().replace('"', r"\x22")


def _expression(expression: Expression, values: dict[Expression, str], buffers: dict[Instruction, str]) -> str:
    kind = expression.element_type.name.lower()
    if isinstance(expression, Literal):
        return f"{kind} constant({print_literal(expression)})"
    if isinstance(expression, Index):
        return f"{kind} index[{_affine(expression.value, values)}]"
    if isinstance(expression, Load):
        guard = "" if expression.guard is None else f", if {values[expression.guard]}"
        return f"{kind} load {buffers[expression.source]}[{_affine(expression.index, values)}]{guard}"
    operands = ", ".join(values[operand] for operand in expression.operands)
    if isinstance(expression, Reduce):
        dims = ",".join(map(str, expression.dims))
        return f"{kind} reduce({operands}), dimensions={{{dims}}}, combine={expression.combine}"
    attributes = ""
    if expression.detail:
        is_comparison = expression.opcode is Opcode.COMPARE
        attributes += f", direction={expression.detail}" if is_comparison else f', form="{_escaped(expression.detail)}"'
    if expression.order is not ComparisonOrder.PARTIAL:
        attributes += f", order={expression.order}"
    return f"{kind} {expression.opcode}({operands}){attributes}"


def _affine(index: Affine, values: dict[Expression, str]) -> str:
    """``4*d0 - d1 + 4*start(%3, 7) + 2``."""
    terms = [(c, f"d{d}") for d, c in enumerate(index.coefficients) if c]
    terms += [(shift.factor, f"start({values[shift.start]}, {shift.limit})") for shift in index.shifts]
    if index.offset or not terms:
        terms.append((index.offset, ""))
    text = ""
    for number, (factor, unit) in enumerate(terms):
        sign = ("-" if factor < 0 else "") if number == 0 else (" - " if factor < 0 else " + ")
        times = "" if abs(factor) == 1 and unit else f"{abs(factor)}*" if unit else str(abs(factor))
        text += f"{sign}{times}{unit}"
    return text
