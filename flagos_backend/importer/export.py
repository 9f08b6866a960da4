"""The IR back to HloModuleProto bytes, which stock XLA parses and runs: optimized programs, serialization, oracle."""

from __future__ import annotations

import re
from typing import Any

from flagos_backend.importer.attribute_writer import write_attributes
from flagos_backend.importer.schema import HloModuleProto
from flagos_backend.importer.shapes import write_shape
from flagos_backend.ir.functions import TARGET_OF_FUNCTION
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode

_MAY_ALIAS, _MUST_ALIAS = 1, 2
_NOT_IN_NAMES = re.compile(r"[^\w.-]")
# What graph.py makes of metadata with a line of the user's program.
_SOURCED = re.compile(r"(?P<name>.*) \((?P<file>[^()]+):(?P<line>[0-9]{1,9})\)", re.DOTALL)


def export_module(module: Module) -> bytes:
    """Serialized HloModuleProto of a verified module. Layouts are row major; names are made unique and valid."""
    return export_message(module).SerializeToString()  # type: ignore[no-any-return]


def export_message(module: Module) -> Any:
    """The same as a message of ``importer.schema``."""
    proto = HloModuleProto(name=_valid(module.name or "module"))
    exporter = _Exporter(proto)
    for computation in module.computations():
        exporter.add(computation)
    entry = exporter.computation_ids[id(module.entry)]
    proto.entry_computation_id = proto.id = entry
    proto.entry_computation_name = proto.computations[-1].name
    proto.host_program_shape.CopyFrom(proto.computations[-1].program_shape)
    proto.input_output_alias.SetInParent()
    for alias in module.aliases:
        entry_proto = proto.input_output_alias.entries.add(
            parameter_number=alias.parameter_number, kind=_MUST_ALIAS if alias.must_alias else _MAY_ALIAS
        )
        entry_proto.output_shape_index.extend(alias.output_index)
        entry_proto.parameter_shape_index.extend(alias.parameter_index)
    for donor in module.donors:
        proto.buffer_donor.entries.add(parameter_number=donor)
    return proto


def _valid(name: str) -> str:
    name = _NOT_IN_NAMES.sub("_", name)
    return name if name[:1].isalpha() or name[:1] == "_" else f"_{name}"


class _Names:
    """Names given so far in one module; a taken one gets a number behind it."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next_suffix: dict[str, int] = {}

    def unique(self, name: str) -> str:
        name = _valid(name)
        if name in self._taken:
            suffix = self._next_suffix.get(name, 1)
            while f"{name}.{suffix}" in self._taken:
                suffix += 1
            self._next_suffix[name] = suffix + 1
            name = f"{name}.{suffix}"
        self._taken.add(name)
        return name


class _Exporter:
    def __init__(self, proto: Any) -> None:
        self._proto = proto
        self.computation_ids: dict[int, int] = {}
        self._computation_names = _Names()
        self._instruction_names = _Names()
        self._next_id = 1

    def add(self, computation: Computation) -> None:
        """Callees must have been added before."""
        number = len(self._proto.computations) + 1
        self.computation_ids[id(computation)] = number
        proto = self._proto.computations.add(
            name=self._computation_names.unique(computation.name or "computation"), id=number
        )
        ids: dict[int, int] = {}
        names: dict[int, str] = {}
        for instruction in computation.instructions:
            ids[id(instruction)] = self._next_id
            names[id(instruction)] = self._instruction(instruction, proto.instructions.add(id=self._next_id), ids)
            self._next_id += 1
        proto.root_id = ids[id(computation.root)]
        for parameter in computation.parameters:
            write_shape(parameter.shape, proto.program_shape.parameters.add())
            proto.program_shape.parameter_names.append(names[id(parameter)])
        write_shape(computation.root.shape, proto.program_shape.result)

    def _instruction(self, instruction: Instruction, proto: Any, ids: dict[int, int]) -> str:
        name = self._instruction_names.unique(instruction.name or instruction.opcode.value)
        proto.name, proto.opcode = name, instruction.opcode.value
        write_shape(instruction.shape, proto.shape)
        if found := _SOURCED.fullmatch(instruction.metadata):
            proto.metadata.op_name, proto.metadata.source_file = found["name"], found["file"]
            proto.metadata.source_line = int(found["line"])
        elif instruction.metadata:
            proto.metadata.op_name = instruction.metadata
        proto.operand_ids.extend([ids[id(operand)] for operand in instruction.operands])
        called = instruction.called[::-1] if instruction.opcode is Opcode.WHILE else instruction.called
        proto.called_computation_ids.extend([self.computation_ids[id(callee)] for callee in called])
        target = TARGET_OF_FUNCTION.get(instruction.opcode)
        if target is not None:
            proto.opcode, proto.custom_call_target = Opcode.CUSTOM_CALL.value, target
        write_attributes(instruction, proto)
        return name
