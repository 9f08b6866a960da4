"""The header of numbers that Python and C++ share."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from flagos_backend.codegen.cpu import bytecode
from flagos_backend.ir.functions import ALL
from flagos_backend.loop_ir.intrinsics import OPERANDS
from tools import native_tables


def test_it_is_written_by_an_interpreter_without_packages(tmp_path: Path) -> None:
    output = tmp_path / "there" / "tables.h"
    subprocess.run([sys.executable, "-I", "-S", native_tables.__file__, "--output", output], check=True)
    assert output.read_text() == native_tables.header()


def test_numbers_are_those_of_the_emitters() -> None:
    enums = {
        name: {member: int(number) for member, number in re.findall(r"k(\w+) = (\d+),", body)}
        for name, body in re.findall(r"enum class (\w+) : int64_t \{\n(.*?)\};", native_tables.header(), re.DOTALL)
    }
    for position, name in enumerate(bytecode.OPERATIONS):
        assert enums["Op"][name] == position == bytecode.operation_number(name)
    assert enums["Op"]["Count"] == len(bytecode.OPERATIONS)
    assert enums["ItemKind"]["MachineCode"] == bytecode.ItemKind.MACHINE_CODE
    assert enums["Type"]["BF16"] == 16  # xla.PrimitiveType
    assert enums["Combine"]["Xor"] == bytecode.COMBINES.index("xor")


def test_functions_stand_where_the_parser_expects_their_number_of_operands() -> None:
    of_two, compared = bytecode.operation_number("Add"), bytecode.operation_number("Eq")
    for function in ALL:
        number = bytecode.operation_number(bytecode.cpp_name(function.opcode.name))
        assert number < of_two if function.operands == 1 else of_two < number < compared


def test_pairs_are_declared_once_and_are_known_to_loop_nests() -> None:
    header = native_tables.header()
    for name, pairs in (("FLOAT", bytecode.FLOAT_PAIRS), ("INTEGER", bytecode.INTEGER_PAIRS)):
        assert len(set(pairs)) == len(pairs)
        assert all(OPERANDS[pair.second, pair.detail] == 3 for pair in pairs)
        (entries,) = re.findall(rf"#define FLAGOS_CPU_{name}_PAIRS\(X\)((?: \\\n  X\(.*\))+)\n", header)
        assert re.findall(r"X\((\w+), (\w+)\)", entries) == [pair.cpp_names for pair in pairs]
