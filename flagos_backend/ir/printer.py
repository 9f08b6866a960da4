"""A module as HLO-like text: for explain, error reports and debugging. One line an instruction, callees first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum, IntEnum
from typing import Any

from flagos_backend.ir.attributes import ConstantAttributes
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Computation, Instruction, Module

_SHOWN_ELEMENTS = 10
_SHOWN_BYTES = 64


def print_module(module: Module) -> str:
    """The whole program. Aliases and donors come first, the entry computation last."""
    header = [f"module {module.name}, replicas={module.num_replicas}, partitions={module.num_partitions}"]
    header += [
        f"  output {list(a.output_index)} takes over parameter {a.parameter_number} {list(a.parameter_index)}"
        for a in module.aliases
    ]
    header += [f"  any output may take over parameter {donor}" for donor in module.donors]
    return "\n\n".join(
        ["\n".join(header), *(print_computation(c, entry=c is module.entry) for c in module.computations())]
    )


def print_computation(computation: Computation, *, entry: bool = False) -> str:
    parameters = ", ".join(f"%{p.name}: {p.shape}" for p in computation.parameters)
    head = f"{'entry ' if entry else ''}{computation.name}({parameters}) -> {computation.root.shape} {{"
    lines = [
        f"  {'root ' if instruction is computation.root else ''}{print_instruction(instruction)}"
        for instruction in computation.instructions
    ]
    return "\n".join([head, *lines, "}"])


def print_instruction(instruction: Instruction) -> str:
    """``%sum.1 = f32[4] reduce(%x, %zero), dimensions={1}, calls={add}  # jit(f)/reduce_sum``."""
    operands = ", ".join(f"%{operand.name}" for operand in instruction.operands)
    if isinstance(instruction.attributes, ConstantAttributes):
        operands = _constant(instruction, instruction.attributes)
        attributes = ""
    else:
        attributes = "".join(f", {text}" for text in _attributes(instruction.attributes))
    calls = ", ".join(callee.name for callee in instruction.called)
    note = f"  # {instruction.metadata}" if instruction.metadata else ""
    return (
        f"%{instruction.name} = {instruction.shape} {instruction.opcode}({operands}){attributes}"
        f"{f', calls={{{calls}}}' if calls else ''}{note}"
    )


def _constant(instruction: Instruction, attributes: ConstantAttributes) -> str:
    array = constant_array(instruction)
    if array is None:
        hexadecimal = attributes.data[:_SHOWN_ELEMENTS].hex()
        return f"0x{hexadecimal}{'...' if len(attributes.data) > _SHOWN_ELEMENTS else ''}"
    if array.size > _SHOWN_ELEMENTS:
        return f"{{{', '.join(str(v) for v in array.reshape(-1)[:3].tolist())}, ...}}"
    return str(array.tolist()).replace("[", "{").replace("]", "}")


def _attributes(attributes: Any) -> Iterator[str]:
    """Every field that differs from its default."""
    for attribute in fields(attributes):
        value = getattr(attributes, attribute.name)
        if value != attribute.default:
            yield f"{attribute.name}={_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, Enum):
        return str(value.value)
    if is_dataclass(value):
        return f"({', '.join(_attributes(value))})"
    if isinstance(value, tuple):
        return "{" + ",".join(map(_value, value)) + "}"
    if isinstance(value, bytes):
        return repr(value[:_SHOWN_BYTES])[1:] + ("..." if len(value) > _SHOWN_BYTES else "")
    return str(value)
