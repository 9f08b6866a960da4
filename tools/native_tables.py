"""Writes the C++ header of what Python and C++ number alike: bytecode, operations, elementwise functions.

CMake runs it; it uses only the standard library, because a build has nothing else.
"""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flagos_backend.codegen.cpu import bytecode
from flagos_backend.ir.functions import TABLE, TABLE_OF_TWO, WRITTEN, Function
from flagos_backend.ir.types import ElementType

_ENUMS = (bytecode.ItemKind, bytecode.StepKind, bytecode.Split)


def _enum(name: str, members: Iterable[tuple[str, int]]) -> str:
    lines = (f"  k{member} = {number}," for member, number in members)
    return "\n".join((f"enum class {name} : int64_t {{", *lines, "};"))


def _counted(name: str, members: Sequence[str]) -> str:
    """With the number of members as a last one."""
    return _enum(name, zip((*members, "Count"), range(len(members) + 1), strict=True))


def _of_enum(python: type[enum.IntEnum]) -> str:
    return _enum(python.__name__, ((bytecode.cpp_name(member.name), member.value) for member in python))


def _types() -> str:
    types = sorted((*bytecode.ARITHMETIC, ElementType.C64))
    return _enum("Type", [("Pred" if t is ElementType.PRED else t.name, t.value) for t in types])


def _macro(name: str, entries: Iterable[str]) -> str:
    """Of all ``entries``, each as X(entry)."""
    return " \\\n".join((f"#define {name}(X)", *(f"  X({entry})" for entry in entries)))


def _functions(table: Iterable[Function]) -> Iterable[str]:
    return (
        f"{bytecode.cpp_name(function.opcode.name)}, {single}, {double}"
        for function in table
        for single, double in [function.on_host]
        if WRITTEN not in (single, double)
    )


def header() -> str:
    """The header's text."""
    counted: dict[str, Iterable[enum.Enum]] = {
        "Combine": bytecode.COMBINES,
        "PartOp": bytecode.PARTS,
        "ComplexOp": bytecode.COMPLEX_OPERATIONS,
        "LinearAlgebraKind": bytecode.LinearAlgebraKind,
        "LapackRoutine": bytecode.LapackRoutine,
    }
    parts = [
        "// Written by tools/native_tables.py, of flagos_backend's codegen/cpu/bytecode.py and ir/functions.py.",
        "#pragma once",
        "#include <cstdint>",
        "// X(name) of each operation of a tile, by its number.",
        _macro("FLAGOS_CPU_OPS", bytecode.OPERATIONS),
        "// X(name, of a float x, of a double x) of each function of one float without a structure of its own.",
        _macro("FLAGOS_CPU_FUNCTIONS", _functions(TABLE)),
        "// The same of two floats or doubles x and y.",
        _macro("FLAGOS_CPU_FUNCTIONS_OF_TWO", _functions(TABLE_OF_TWO)),
        "// X(first, second) of each pair, by its number: second(first(a, b), c); SubtractFrom: c - first(a, b).",
        _macro("FLAGOS_CPU_FLOAT_PAIRS", (", ".join(pair.cpp_names) for pair in bytecode.FLOAT_PAIRS)),
        _macro("FLAGOS_CPU_INTEGER_PAIRS", (", ".join(pair.cpp_names) for pair in bytecode.INTEGER_PAIRS)),
        "namespace flagos::cpu {",
        f"inline constexpr int64_t kMagic = {bytecode.MAGIC:#x};",
        _counted("Op", bytecode.OPERATIONS),
        *(_counted(name, [bytecode.cpp_name(o.name) for o in values]) for name, values in counted.items()),
        _types(),
        *map(_of_enum, _ENUMS),
        "}  // namespace flagos::cpu",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(header(), encoding="utf-8")


if __name__ == "__main__":
    main()
