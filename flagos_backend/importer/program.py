"""flagos.Program, the envelope in which a host hands over a graph, to a typed value. First step of a compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagos_backend.errors import MalformedProgram, UnsupportedSchemaVersion
from flagos_backend.importer import schema
from flagos_backend.importer.graph import import_module, parse
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import TupleShape

SCHEMA_VERSION = 1
MAX_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The host's process groups: ``rank`` is this process of ``size``; ``names`` by channel id."""

    rank: int
    size: int
    names: Mapping[int, str]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The fields of flagos.Program (proto/flagos.proto), checked. ``device_assignment``: [replica][partition].

    The per-argument lists are either empty or have one entry for each entry parameter; the per-output ones, for each
    element of a tuple result, or one for a result that is an array.
    """

    module: Module
    producer: str
    compile_options: bytes
    num_replicas: int
    num_partitions: int
    device_assignment: tuple[tuple[int, ...], ...]
    argument_shardings: tuple[bytes, ...]
    output_shardings: tuple[bytes, ...]
    argument_memory_kinds: tuple[str, ...]
    output_memory_kinds: tuple[str, ...]
    options: Mapping[str, str]
    process_groups: ProcessGroups | None


def import_program(data: bytes) -> Program:
    """Parses and checks the envelope and imports its module. Raises what ``import_module`` does, and
    UnsupportedSchemaVersion."""
    proto = parse(schema.Program, bytes(data), "flagos.Program")
    place = f"the envelope written by {proto.producer or 'an unnamed producer'}"
    if proto.schema_version > SCHEMA_VERSION:
        raise UnsupportedSchemaVersion(version=proto.schema_version, supported=SCHEMA_VERSION, place=place)
    if proto.schema_version < 1:
        raise MalformedProgram(fact=f"schema_version is {proto.schema_version}", place=place)
    if not proto.HasField("module"):
        raise MalformedProgram(fact="it carries no module", place=place)
    replicas, partitions = (
        _count(proto.num_replicas, "replicas", place),
        _count(proto.num_partitions, "partitions", place),
    )
    module = import_module(proto.module, num_replicas=replicas, num_partitions=partitions)
    arguments = len(module.entry.parameters)
    result = module.entry.root.shape
    outputs = len(result.elements) if isinstance(result, TupleShape) else 1
    return Program(
        module,
        proto.producer,
        proto.compile_options,
        replicas,
        partitions,
        _device_assignment(proto.device_assignment, replicas, partitions, place),
        _shardings(_per_value(proto.argument_shardings, arguments, "argument_shardings", place), place),
        _shardings(_per_value(proto.output_shardings, outputs, "output_shardings", place), place),
        _per_value(proto.argument_memory_kinds, arguments, "argument_memory_kinds", place),
        _per_value(proto.output_memory_kinds, outputs, "output_memory_kinds", place),
        dict(proto.options),
        _process_groups(proto, replicas * partitions, place),
    )


def _process_groups(proto: Any, devices: int, place: str) -> ProcessGroups | None:
    if not proto.HasField("process_groups"):
        return None
    rank, size = proto.process_groups.rank, proto.process_groups.size
    if devices != 1 or not 0 <= rank < size <= MAX_DEVICES:
        fact = f"it is for {devices} devices, and process {rank} of {size}, with process groups"
        raise MalformedProgram(fact=fact, place=place)
    return ProcessGroups(rank, size, dict(proto.process_groups.names))


def _count(value: int, what: str, place: str) -> int:
    if not 0 <= value <= MAX_DEVICES:
        raise MalformedProgram(fact=f"it is for {value} {what}", place=place)
    return value or 1


def _per_value(values: Sequence[Any], count: int, field: str, place: str) -> tuple[Any, ...]:
    if values and len(values) != count:
        raise MalformedProgram(fact=f"{field} has {len(values)} entries for {count} values", place=place)
    return tuple(values)


def _shardings(values: tuple[bytes, ...], place: str) -> tuple[bytes, ...]:
    for index, value in enumerate(values):
        parse(schema.OpSharding, value, f"sharding {index} of {place}")
    return values


def _device_assignment(ids: Sequence[int], replicas: int, partitions: int, place: str) -> tuple[tuple[int, ...], ...]:
    if not ids:
        return tuple(tuple(range(r * partitions, (r + 1) * partitions)) for r in range(replicas))
    if len(ids) != replicas * partitions or len(set(ids)) != len(ids) or min(ids) < 0:
        fact = f"device_assignment {list(ids)[:16]} does not name {replicas} x {partitions} different devices"
        raise MalformedProgram(fact=fact, place=place)
    return tuple(tuple(ids[r * partitions : (r + 1) * partitions]) for r in range(replicas))
