"""HloModuleProto to the IR. What the IR has no word for is refused here by name, with its place and the reason."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from flagos_backend.errors import (
    MalformedProgram,
    ProgramTooDeep,
    UnsupportedAttribute,
    UnsupportedOpcode,
)
from flagos_backend.importer.attributes import read_attributes
from flagos_backend.importer.literals import read_literal
from flagos_backend.importer.scan import expand_scan
from flagos_backend.importer.schema import HloModuleProto
from flagos_backend.importer.shapes import ShapeReader, require_row_major
from flagos_backend.importer.unknown_fields import unknown_fields
from flagos_backend.ir.attributes import NONE, ConstantAttributes
from flagos_backend.ir.functions import FUNCTION_OF_TARGET, TARGET_OF_FUNCTION
from flagos_backend.ir.hlo import Alias, Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, Shape, TupleShape
from flagos_backend.ir.verifier import verify

# Computations calling computations: bounded, so that later stages may recurse over the nest.
MAX_DEPTH = 128

_ASYNCHRONOUS = "asynchronous operations belong to scheduled programs; hand the program over before it is scheduled"
_DYNAMIC = "it makes dimensions dynamic"
_HOST_TRANSFER = "the host is reached through callbacks only"
_REFUSED: dict[str, str] = {
    **{
        f"{name}-{part}": _ASYNCHRONOUS
        for name in ("all-gather", "all-reduce", "collective-permute", "copy", "async")
        for part in ("start", "update", "done")
    },
    **dict.fromkeys(("infeed", "outfeed", "send", "send-done", "recv", "recv-done"), _HOST_TRANSFER),
    **dict.fromkeys(("set-dimension-size", "dynamic-reshape"), _DYNAMIC),
    "domain": "it only guides XLA's sharding propagation; partition the program first",
    "rng-get-and-update-state": "random state must be a value; use rng-bit-generator",
}
_OPCODES = {opcode.value: opcode for opcode in Opcode if opcode not in TARGET_OF_FUNCTION}


class _Place:
    """Where an error is; put into words only when there is one."""

    __slots__ = ("_module", "operands", "proto")

    def __init__(self, module: Any, proto: Any, operands: tuple[Instruction, ...] = ()) -> None:
        self._module, self.proto, self.operands = module, proto, operands

    def __str__(self) -> str:
        shapes = ", ".join(str(operand.shape) for operand in self.operands)
        source = describe_metadata(self._module, self.proto)
        name = self.proto.name or f"id {self.proto.id}"
        return f"%{name} = {self.proto.opcode}({shapes}){f', from {source}' if source else ''}"


def describe_metadata(module: Any, proto: Any) -> str:
    """``op_name (file:line)``: the framework's own name for an instruction and where the user wrote it."""
    metadata = proto.metadata
    file, line = metadata.source_file, metadata.source_line
    if not file and metadata.stack_frame_id > 0:
        file, line = _stack_frame(module.stack_frame_index, metadata.stack_frame_id)
    name = metadata.op_name or metadata.op_type
    return f"{name} ({file}:{line})" if file else str(name)


def _stack_frame(index: Any, frame_id: int) -> tuple[str, int]:
    """File and line of a frame; ids count from 1. Nothing is known of a frame whose ids lead nowhere."""
    frames, locations, files = index.stack_frames, index.file_locations, index.file_names
    if frame_id > len(frames) or not 0 < frames[frame_id - 1].file_location_id <= len(locations):
        return "", 0
    location = locations[frames[frame_id - 1].file_location_id - 1]
    return (files[location.file_name_id - 1] if 0 < location.file_name_id <= len(files) else ""), location.line


class _Importer:
    def __init__(self, proto: Any) -> None:
        self._proto = proto
        self._shapes = ShapeReader()
        self._computations: dict[int, Computation] = {}
        self._depth: dict[int, int] = {}
        self._sources: dict[bytes, str] = {}
        # By the position of an instruction in the module, which ``_position`` counts.
        self._unknown = unknown_fields(one for computation in proto.computations for one in computation.instructions)
        self._position = -1

    def module(self, num_replicas: int, num_partitions: int) -> Module:
        place = f"module {self._proto.name!r}"
        for proto in self._proto.computations:
            if proto.id in self._computations:
                raise MalformedProgram(fact=f"two computations have the id {proto.id}", place=f"{place}, {proto.name}")
            self._computations[proto.id] = self._computation(proto)
        entry = self._computations.get(self._proto.entry_computation_id)
        if entry is None:
            fact = f"there is no entry computation with the id {self._proto.entry_computation_id}"
            raise MalformedProgram(fact=fact, place=place)
        self._check_signature(entry)
        donors = sorted({donor.parameter_number for donor in self._proto.buffer_donor.entries})
        return Module(self._proto.name, entry, self._aliases(), tuple(donors), num_replicas, num_partitions)

    def _check_signature(self, entry: Computation) -> None:
        """Arguments and results cross the boundary in the shapes that the module states.

        Arguments must be row major. XLA's converter leaves in the result whatever layout a last transpose suggested,
        which no user asked for, so there it says nothing: a host that asks for a layout does so in its own options.
        """
        if not self._proto.HasField("host_program_shape"):
            return
        signature = self._proto.host_program_shape
        parameters = entry.parameters
        place = f"the signature of entry computation {entry.name!r}"
        if len(signature.parameters) != len(parameters):
            fact = f"it states {len(signature.parameters)} parameters, the computation has {len(parameters)}"
            raise MalformedProgram(fact=fact, place=place)
        stated = [*signature.parameters, signature.result]
        actual = [parameter.shape for parameter in parameters] + [entry.root.shape]
        names = [f"parameter {number}" for number in range(len(parameters))] + ["the result"]
        for name, proto, shape in zip(names, stated, actual, strict=True):
            where = f"{name} of {place}"
            if self._shapes.read(proto, where) != shape:
                raise MalformedProgram(fact=f"the computation has {shape} there", place=where)
            if name != "the result":
                require_row_major(proto, where)

    def _aliases(self) -> tuple[Alias, ...]:
        return tuple(
            Alias(
                tuple(entry.output_shape_index),
                entry.parameter_number,
                tuple(entry.parameter_shape_index),
                must_alias=entry.kind == 2,
            )
            for entry in self._proto.input_output_alias.entries
        )

    def _computation(self, proto: Any) -> Computation:
        place = f"computation {proto.name!r}"
        values: dict[int, Instruction] = {}
        instructions: list[Instruction] = []
        depth = 0
        for instruction_proto in proto.instructions:
            identity = instruction_proto.id
            if identity in values:
                raise MalformedProgram(fact=f"two instructions have the id {identity}", place=place)
            instruction = self._instruction(instruction_proto, values, instructions)
            values[identity] = instruction
            if instruction.called:
                depth = max(depth, *(self._depth[id(callee)] for callee in instruction.called))
        root = values.get(proto.root_id)
        if root is None:
            raise MalformedProgram(fact=f"there is no root with the id {proto.root_id}", place=place)
        if depth >= MAX_DEPTH:
            raise ProgramTooDeep(depth=depth + 1, limit=MAX_DEPTH, place=place)
        computation = Computation(proto.name, tuple(instructions), root)
        self._depth[id(computation)] = depth + 1
        return computation

    def _instruction(self, proto: Any, values: dict[int, Instruction], instructions: list[Instruction]) -> Instruction:
        """Imports one, appends it (and what it expands to) and returns the value that its users see."""
        self._position += 1
        try:
            operands = tuple([values[identity] for identity in proto.operand_ids])
        except KeyError as error:
            fact = f"its operand with the id {error} is not an instruction before it in the same computation"
            raise MalformedProgram(fact=fact, place=_Place(self._proto, proto)) from None
        place = _Place(self._proto, proto, operands)
        shape = self._shapes.read(proto.shape, place)
        opcode = _OPCODES.get(proto.opcode)
        if opcode is None:
            opcode = self._foreign_opcode(proto, shape, place)
        elif opcode is Opcode.CUSTOM_CALL:
            opcode = FUNCTION_OF_TARGET.get(proto.custom_call_target, opcode)
        self._check_fields(proto, place)
        name = proto.name or f"{proto.opcode}.{proto.id}"
        metadata = self._metadata(proto)
        if opcode is Opcode.CONSTANT:
            return self._constant(proto.literal, shape, name, metadata, instructions, place)
        called = self._called(opcode, proto, place)
        if proto.opcode == "scan":
            if len(called) != 1:
                raise MalformedProgram(fact=f"it calls {len(called)} computations, not one", place=place)
            expanded = expand_scan(proto, operands, called[0], shape, place)
            self._depth[id(expanded)] = self._depth[id(called[0])] + 2  # the loop's step calls the body
            called = (expanded,)
        attributes = read_attributes(opcode, proto, place)
        instruction = Instruction(opcode, shape, operands, attributes, called, name, metadata)
        instructions.append(instruction)
        return instruction

    def _metadata(self, proto: Any) -> str:
        if not proto.HasField("metadata"):
            return ""
        key = proto.metadata.SerializeToString()
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = describe_metadata(self._proto, proto)
        return source

    def _check_fields(self, proto: Any, place: _Place) -> None:
        """A field that this schema does not know may change what the instruction means."""
        if proto.HasField("backend_config_payload") and proto.backend_config_payload.id:
            value = proto.backend_config_payload.id
            raise UnsupportedAttribute(attribute="backend_config_payload.id", value=value, place=place)
        if self._position in self._unknown:
            number = f"HloInstructionProto field {self._unknown[self._position]}"
            raise UnsupportedAttribute(attribute=number, value="(unknown to this backend)", place=place)

    @staticmethod
    def _foreign_opcode(proto: Any, shape: Shape, place: _Place) -> Opcode:
        """The IR's opcode for an opcode that it lacks but can express; UnsupportedOpcode otherwise."""
        if proto.opcode in ("fusion", "scan"):
            return Opcode.CALL
        if proto.opcode == "bitcast" and len(place.operands) == 1:
            require_row_major(proto.shape, place)
            operand = place.operands[0].shape
            if isinstance(operand, ArrayShape) and isinstance(shape, ArrayShape):
                if operand.element_type is shape.element_type:
                    return Opcode.RESHAPE
                if operand.dims == shape.dims:
                    return Opcode.BITCAST_CONVERT
            raise UnsupportedOpcode(opcode="bitcast", reason="it changes type and dimensions at once", place=place)
        reason = _REFUSED.get(proto.opcode, "this backend does not know it")
        raise UnsupportedOpcode(opcode=repr(proto.opcode), reason=reason, place=place)

    def _called(self, opcode: Opcode, proto: Any, place: _Place) -> tuple[Computation, ...]:
        if not proto.called_computation_ids:
            return ()
        try:
            called = tuple(self._computations[identity] for identity in proto.called_computation_ids)
        except KeyError as error:
            fact = f"it calls the computation with the id {error}, which is not defined before its caller"
            raise MalformedProgram(fact=fact, place=place) from None
        if opcode is Opcode.WHILE:  # the message has the body first
            return called[::-1]
        return called

    def _constant(
        self,
        literal: Any,
        shape: Shape,
        name: str,
        metadata: str,
        instructions: list[Instruction],
        place: _Place,
    ) -> Instruction:
        """One instruction, or one for each leaf of a tuple literal and the tuples that gather them."""
        if literal.shape.element_type and self._shapes.read(literal.shape, place) != shape:
            raise MalformedProgram(fact=f"its literal has another shape than {shape}", place=place)
        if isinstance(shape, TupleShape):
            if len(literal.tuple_literals) != len(shape.elements):
                fact = f"its literal has {len(literal.tuple_literals)} elements, its shape {len(shape.elements)}"
                raise MalformedProgram(fact=fact, place=place)
            operands = tuple(
                self._constant(element, element_shape, f"{name}.{index}", metadata, instructions, place)
                for index, (element, element_shape) in enumerate(
                    zip(literal.tuple_literals, shape.elements, strict=True)
                )
            )
            instruction = Instruction(Opcode.TUPLE, shape, operands, NONE, (), name, metadata)
        else:
            attributes = ConstantAttributes(read_literal(literal, shape, place))
            instruction = Instruction(Opcode.CONSTANT, shape, (), attributes, (), name, metadata)
        instructions.append(instruction)
        return instruction


def parse(message_class: Any, data: bytes, what: str) -> Any:
    """The message in ``data``. Raises MalformedProgram."""
    try:
        return message_class.FromString(data)
    except DecodeError as error:
        raise MalformedProgram(fact=f"{what} does not parse ({error})", place=f"{len(data)} bytes") from None


def import_module(program: bytes | Any, *, num_replicas: int = 1, num_partitions: int = 1) -> Module:
    """The verified IR of an HloModuleProto, given as bytes or as a message of ``importer.schema``.

    Raises the 1xx errors and VerificationFailed of errors.py, and no others, whatever the bytes.
    """
    proto = parse(HloModuleProto, bytes(program), "HloModuleProto") if _is_bytes(program) else program
    module = _Importer(proto).module(num_replicas, num_partitions)
    verify(module)
    return module


def _is_bytes(program: object) -> bool:
    return isinstance(program, bytes | bytearray | memoryview)
