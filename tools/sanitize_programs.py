"""Writes the two programs that the C hosts of tests/cpu/native run: see the head of each host for what it expects."""

from __future__ import annotations

import sys
from pathlib import Path

from flagos_backend.importer import schema
from flagos_backend.importer.export import export_message
from flagos_backend.importer.program import SCHEMA_VERSION
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Alias, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType


def add_one(dims: tuple[int, ...], donated: bool) -> bytes:
    """A serialized flagos.Program: x + 1 on f32[dims]."""
    builder = Builder("main")
    x = builder.parameter(ArrayShape(ElementType.F32, dims))
    one = builder.broadcast(builder.scalar(1, ElementType.F32), dims)
    entry = builder.build(builder.add(Opcode.ADD, (x, one)))
    module = Module("add_one", entry, aliases=(Alias((), 0),) if donated else ())
    program = schema.Program(schema_version=SCHEMA_VERSION, producer="tools/sanitize", num_replicas=1, num_partitions=1)
    program.device_assignment.append(0)
    program.module.CopyFrom(export_message(module))
    serialized: bytes = program.SerializeToString()
    return serialized


def main() -> int:
    """Usage: sanitize_programs.py FOLDER ELEMENTS."""
    folder, elements = Path(sys.argv[1]), int(sys.argv[2])
    (folder / "host.program").write_bytes(add_one((2, 3), donated=False))
    (folder / "stress.program").write_bytes(add_one((elements,), donated=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
