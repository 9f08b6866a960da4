"""The header compiles alone as C99 and C++17, and its layout is what the golden file froze."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plugin_abi import cabi, layout
from plugin_abi.errors import StatusCode
from plugin_abi.host import Artifact, ElementType, HostBufferSemantics
from plugin_abi.negotiation import LAST_SLOT, slots
from plugin_abi.policy import ENTRY_SYMBOL, HOST_ABI
from unit.plugin_abi.plugins import INCLUDE

HEADER = cabi.HEADER.read_text("utf-8")
GOLDEN = Path(__file__).with_name("golden") / "plugin_abi_layout_1.0.txt"
DIALECTS = [("gcc", "c99"), ("gcc", "c11"), ("gcc", "c17"), ("g++", "c++17"), ("g++", "c++20")]


def _compile(compiler: str, dialect: str, source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    options = [f"-std={dialect}", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}"]
    return subprocess.run([compiler, *options, str(source), *flags], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["plugin_abi.h", "plugin_abi_layout.h"])
@pytest.mark.parametrize(("compiler", "dialect"), DIALECTS)
def test_the_headers_compile_alone(name: str, compiler: str, dialect: str, tmp_path: Path) -> None:
    source = tmp_path / ("alone.cc" if compiler == "g++" else "alone.c")
    source.write_text(f'#include "flagos/{name}"\nint used;\n')
    done = _compile(compiler, dialect, source, "-fsyntax-only")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("compiler", "dialect"), DIALECTS)
def test_a_moved_field_does_not_compile(compiler: str, dialect: str, tmp_path: Path) -> None:
    moved = tmp_path / "flagos"
    moved.mkdir()
    changed = HEADER.replace("  int64_t launch_id;", "  int64_t early, launch_id;")
    assert changed != HEADER
    (moved / "plugin_abi.h").write_text(changed)
    source = tmp_path / ("moved.cc" if compiler == "g++" else "moved.c")
    source.write_text(f'#include "flagos/plugin_abi.h"\n#include "{layout.ASSERTS}"\n')
    done = subprocess.run([compiler, f"-std={dialect}", f"-I{tmp_path}", "-fsyntax-only", str(source)])
    assert done.returncode != 0


def test_the_golden_file_is_the_layout_that_cffi_sees() -> None:
    ffi = cabi.ffi_from_header(HEADER)
    assert GOLDEN.read_text("utf-8") == layout.golden(ffi, HEADER)
    assert layout.ASSERTS.read_text("utf-8") == layout.asserts(ffi, HEADER)


def test_the_types_that_are_shipped_are_the_headers() -> None:
    """Judged by what they mean: versions of cffi may write the file differently."""
    shipped, parsed = ([layout.golden(ffi, HEADER), *_types(ffi)] for ffi in (cabi.ffi(), cabi.ffi_from_header(HEADER)))
    # Of a struct that is named before it is defined cffi says its tag or its typedef, which are one name.
    assert [text.replace("struct ", "") for text in shipped] == [text.replace("struct ", "") for text in parsed]


def _types(ffi: cabi.Ffi) -> list[str]:
    """Every name of a type with what it stands for: of functions the arguments and the result."""
    typedefs, structs, unions = ffi.list_types()
    names = [*typedefs, *(f"struct {name}" for name in structs), *(f"union {name}" for name in unions)]
    return [f"{name}: {ffi.typeof(name).cname}" for name in names]


def test_a_process_that_loads_a_backend_parses_no_c() -> None:
    program = "import sys, plugin_abi.loader, plugin_abi.host; print({'cffi', 'pycparser'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_golden_file_is_the_layout_that_the_compiler_sees(tmp_path: Path) -> None:
    """An independent judge: a C program prints what offsetof and sizeof give."""
    lines = []
    for struct in cabi.layouts(cabi.ffi(), HEADER):
        lines.append(f'printf("{struct.name} size %zu\\n", sizeof({struct.name}));')
        for field in struct.fields:
            size = f"sizeof((({struct.name}*)0)->{field.name})"
            offset = f"offsetof({struct.name}, {field.name})"
            lines.append(f'printf("{struct.name}.{field.name} offset %zu size %zu\\n", {offset}, {size});')
    source, program = tmp_path / "print.c", tmp_path / "print"
    body = "\n".join(lines)
    source.write_text(f'#include <stdio.h>\n#include "flagos/plugin_abi.h"\nint main(void) {{\n{body}\nreturn 0;\n}}\n')
    done = _compile("gcc", "c99", source, "-o", str(program))
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    frozen = GOLDEN.read_text("utf-8").splitlines()
    frozen = [line for line in frozen if " = " not in line]
    assert len(printed) == len(frozen) > 200
    assert all(line.startswith(start) for line, start in zip(frozen, printed, strict=True))


def test_every_struct_begins_with_its_size() -> None:
    """But for FlagosBytes, which is a plain pair that never grows."""
    for struct in cabi.layouts(cabi.ffi(), HEADER):
        first = struct.fields[0]
        assert (first.name, first.offset, first.size) == ("struct_size", 0, 8) or struct.name == "FlagosBytes"


def test_the_header_includes_only_stdint_and_stddef() -> None:
    included = [line.split()[1] for line in HEADER.splitlines() if line.startswith("#include")]
    assert sorted(included) == ["<stddef.h>", "<stdint.h>"]


def test_the_python_enumerations_are_the_headers() -> None:
    constants = cabi.constants(cabi.ffi(), HEADER)
    kinds = {"": StatusCode, "TYPE_": ElementType, "HOST_": HostBufferSemantics, "ARTIFACT_": Artifact}
    for prefix, kind in kinds.items():
        for member in kind:
            assert constants[f"FLAGOS_{prefix}{member.name}"] == member
    types = {name for name in constants if name.startswith("FLAGOS_TYPE_")}
    assert types == {f"FLAGOS_TYPE_{member.name}" for member in ElementType}


def test_the_hosts_version_and_last_slot_are_the_headers() -> None:
    assert f"#define FLAGOS_ABI_MAJOR {HOST_ABI.max.major}\n#define FLAGOS_ABI_MINOR {HOST_ABI.max.minor}\n" in HEADER
    assert f'#define FLAGOS_ENTRY_SYMBOL "{ENTRY_SYMBOL}"' in HEADER
    assert LAST_SLOT[HOST_ABI.max.minor] == list(slots(cabi.ffi()))[-1]


def test_all_slots_of_the_table_are_functions() -> None:
    table = cabi.struct_layout(cabi.ffi(), "FlagosApi")
    assert [field.name for field in table.fields[:3]] == ["struct_size", "version", "reserved"]
    assert list(slots(cabi.ffi())) == [field.name for field in table.fields[3:]]
