"""Writes the program that the C host tests/cpu/native/host.c compiles and runs: x + 1 on f32[2,3]."""

from __future__ import annotations

import sys
from pathlib import Path

from flagos_backend.importer import schema
from flagos_backend.importer.export import export_message
from flagos_backend.importer.program import SCHEMA_VERSION
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType


def main() -> int:
    """Usage: sanitize_program.py FILE."""
    dims = (2, 3)
    builder = Builder("main")
    x = builder.parameter(ArrayShape(ElementType.F32, dims))
    one = builder.broadcast(builder.scalar(1, ElementType.F32), dims)
    module = Module("add_one", builder.build(builder.add(Opcode.ADD, (x, one))))
    program = schema.Program(schema_version=SCHEMA_VERSION, producer="tools/sanitize", num_replicas=1, num_partitions=1)
    program.device_assignment.append(0)
    program.module.CopyFrom(export_message(module))
    Path(sys.argv[1]).write_bytes(program.SerializeToString())
    return 0


if __name__ == "__main__":
    sys.exit(main())
