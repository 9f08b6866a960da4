"""Writes the C++ declarations of the PJRT ABI, pjrt_abi.h, from the facts in abi/*.csv; the adapter's build runs it.

Offsets and sizes in the tables become static asserts, so a compiler that lays a struct out otherwise stops the build.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ABI_DIRECTORY = Path(__file__).resolve().parent / "abi"
# The version whose structs the tables hold, and the oldest one whose callers are served (jaxlib 0.10.0). A field that
# is younger than OLDEST_MINOR names its version in the `since` column.
MAJOR, MINOR, OLDEST_MINOR = 0, 114, 104
# The function tables, and the macro that lists each one's slots.
FUNCTION_LISTS = {
    "PJRT_Api": "PJRT_API_FUNCTIONS",
    "PJRT_Shardings_Extension": "PJRT_SHARDINGS_FUNCTIONS",
    "PJRT_MemoryDescriptions_Extension": "PJRT_MEMORY_DESCRIPTIONS_FUNCTIONS",
    "PLUGIN_Profiler_Api": "PLUGIN_PROFILER_FUNCTIONS",
}


@dataclass(frozen=True)
class Field:
    """One member of a struct; several at one offset form a union."""

    name: str
    type: str
    offset: int
    size: int
    since: int

    @property
    def end(self) -> int:
        return self.offset + self.size

    def declaration(self) -> str:
        if "(*)" in self.type:
            return self.type.replace("(*)", f"(*{self.name})", 1) + ";"
        return f"{self.type} {self.name};"


@dataclass(frozen=True)
class Struct:
    name: str
    fields: tuple[Field, ...]
    size: int

    @property
    def unpadded_size(self) -> int:
        """What PJRT callers write into struct_size: the end of the last field."""
        return max(field.end for field in self.fields)

    @property
    def minimum_size(self) -> int:
        """The struct_size of the oldest callers that are served."""
        return max((field.end for field in self.fields if field.since <= OLDEST_MINOR), default=0)


@dataclass(frozen=True)
class Function:
    table: str
    name: str
    result: str
    arguments: str
    handle: str  # the member of the arguments that must not be NULL, or ""

    def pointer_type(self) -> str:
        return f"{self.result} (*)({self.arguments}* args)"


@dataclass(frozen=True)
class Abi:
    """Everything the tables say."""

    enums: dict[str, dict[str, int]]
    callbacks: dict[str, str]
    structs: dict[str, Struct]
    functions: tuple[Function, ...]

    def api_functions(self) -> list[Function]:
        return [function for function in self.functions if function.table == "PJRT_Api"]


def _rows(name: str) -> list[dict[str, str]]:
    with (ABI_DIRECTORY / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def load() -> Abi:
    """Reads the tables.

    Raises:
        ValueError: the tables contradict each other.
    """
    enums: dict[str, dict[str, int]] = {}
    for row in _rows("enums.csv"):
        enums.setdefault(row["enum"], {})[row["name"]] = int(row["value"])
    functions = tuple(
        Function(row["table"], row["function"], row["result"], row["arguments"], row["handle"])
        for row in _rows("functions.csv")
    )
    by_pointer = {function.name + "*": function for function in functions}
    structs: dict[str, Struct] = {}
    for name, group in itertools.groupby(_rows("structs.csv"), key=lambda row: row["struct"]):
        rows = list(group)
        fields = []
        for row in rows:
            # A member of a function table carries its function's name as type: spelled out, it needs no typedef.
            function = by_pointer.get(row["type"])
            type_ = function.pointer_type() if function else row["type"]
            since = int(row["since"] or OLDEST_MINOR)
            fields.append(Field(row["field"], type_, int(row["offset"]), int(row["size"]), since))
        structs[name] = Struct(name, tuple(fields), int(rows[0]["struct_size"]))
    callbacks = {row["callback"]: row["declaration"] for row in _rows("callbacks.csv")}
    abi = Abi(enums, callbacks, structs, functions)
    slots = [field.name for field in structs["PJRT_Api"].fields[3:]]
    if slots != [function.name for function in abi.api_functions()]:
        raise ValueError("abi/functions.csv and the PJRT_Api struct in abi/structs.csv list different slots")
    return abi


def _identifiers(texts: Iterable[str]) -> set[str]:
    return set(itertools.chain.from_iterable(re.findall(r"\b(?:PJRT|PLUGIN)_\w+", text) for text in texts))


def _ordered(structs: dict[str, Struct]) -> Iterator[Struct]:
    """Structs such that one held by value comes before its holder."""
    done: set[str] = set()

    def visit(struct: Struct) -> Iterator[Struct]:
        if struct.name in done:
            return
        done.add(struct.name)
        for field in struct.fields:
            if field.type in structs:
                yield from visit(structs[field.type])
        yield struct

    for struct in structs.values():
        yield from visit(struct)


def _struct_lines(struct: Struct) -> Iterator[str]:
    yield f"struct {struct.name} {{"
    for _, group in itertools.groupby(struct.fields, key=lambda field: field.offset):
        members = list(group)
        if len(members) == 1:
            yield f"  {members[0].declaration()}"
        else:
            yield "  union {"
            yield from (f"    {member.declaration()}" for member in members)
            yield "  };"
    yield "};"


def declarations(abi: Abi, enum_base: str = "") -> Iterator[str]:
    """Plain C declarations without any preprocessor line, as a C compiler and cffi both read them."""
    for enum, values in abi.enums.items():
        yield f"typedef enum {enum}{enum_base} {{"
        yield from (f"  {name} = {value}," for name, value in values.items())
        yield f"}} {enum};"
    texts = [field.type for struct in abi.structs.values() for field in struct.fields] + list(abi.callbacks.values())
    known = set(abi.enums) | set(abi.callbacks)
    for name in sorted((_identifiers(texts) | set(abi.structs)) - known):
        yield f"typedef struct {name} {name};"
    for name, declaration in abi.callbacks.items():
        yield f"typedef {declaration.replace('(*)', f'(*{name})', 1)};"
    for struct in _ordered(abi.structs):
        yield from _struct_lines(struct)


def _slot(abi: Abi, function: Function) -> str:
    handle = next((f.offset for f in abi.structs[function.arguments].fields if f.name == function.handle), 0)
    return f"X({function.result}, {function.name}, {function.arguments}, {handle})"


def header(abi: Abi) -> str:
    """The text of pjrt_abi.h."""
    lines = [
        "// Generated by generate.py from abi/*.csv; do not edit.",
        "#ifndef FLAGOS_PJRT_ABI_H_",
        "#define FLAGOS_PJRT_ABI_H_",
        "#include <stdbool.h>",
        "#include <stddef.h>",
        "#include <stdint.h>",
        'extern "C" {',
        f"#define PJRT_API_MAJOR {MAJOR}",
        f"#define PJRT_API_MINOR {MINOR}",
        # With a base, a number that a caller made up is a value like any other and can be looked at.
        *declarations(abi, enum_base=" : int"),
    ]
    for struct in abi.structs.values():
        lines.append(f"enum {{ {struct.name}_STRUCT_SIZE = {struct.unpadded_size}, ")
        lines.append(f"       {struct.name}_MINIMUM_SIZE = {struct.minimum_size} }};")
        lines.append(f'static_assert(sizeof({struct.name}) == {struct.size}, "{struct.name}");')
        for field in struct.fields:
            name = f"{struct.name}.{field.name}"
            lines.append(
                f"static_assert(offsetof({struct.name}, {field.name}) == {field.offset} && "
                f'sizeof((({struct.name}*)0)->{field.name}) == {field.size}, "{name}");'
            )
    lines.append(
        "// X(result, function, arguments, handle) for each slot, in order; handle is the offset in the arguments of a"
    )
    lines.append("// one that must not be NULL, or 0.")
    for table, macro in FUNCTION_LISTS.items():
        slots = [_slot(abi, function) for function in abi.functions if function.table == table]
        lines.append(f"#define {macro}(X) \\\n  " + " \\\n  ".join(slots))
    lines += ['}  // extern "C"', "#endif  // FLAGOS_PJRT_ABI_H_", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="the header to write")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(header(load()), encoding="utf-8")


if __name__ == "__main__":
    main()
