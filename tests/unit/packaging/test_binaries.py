"""The built libraries load on the systems that the wheel is for, and are hardened."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.constants import P_FLAGS
from elftools.elf.elffile import ELFFile

import flagos_backend
import plugin_abi

ROOT = Path(__file__).parents[3]
_BACKEND, _ADAPTER = Path(flagos_backend.__path__[0]), Path(plugin_abi.__path__[0])
LIBRARIES = (
    _BACKEND / "lib/libflagos_backend.so",
    _BACKEND / "frontends/torch/compile/_launcher.abi3.so",
    _BACKEND / "frontends/torch/device/_native.abi3.so",
    _BACKEND / "kernels/triton/_cuda.abi3.so",
    _ADAPTER / "lib/libflagos_isolation.so",
    _ADAPTER / "lib/libpjrt_flagos.so",
)
# manylinux_2_28: what AlmaLinux 8 has.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
SYSTEM = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"} | {
    "ld-linux-x86-64.so.2"
}


@pytest.fixture(params=LIBRARIES, ids=lambda path: path.name)
def elf(request):
    with request.param.open("rb") as file:
        yield ELFFile(file)


def _dynamic(elf: ELFFile, tag: str) -> list:
    return [entry for entry in elf.get_section_by_name(".dynamic").iter_tags() if entry.entry.d_tag == tag]


def test_no_symbol_is_newer_than_manylinux_2_28(elf):
    """A name here is a function to bind or to bring along: plugin_abi/glibc."""
    versions, table = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".gnu.version_r")
    names = {auxiliary.entry.vna_other: auxiliary.name for _, entries in table.iter_versions() for auxiliary in entries}
    newer = []
    for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        index = versions.get_symbol(number)["ndx"]
        if symbol["st_shndx"] != "SHN_UNDEF" or index not in names:
            continue
        kind, _, version = names[index].partition("_")
        if tuple(map(int, version.split("."))) > LIMITS[kind]:
            newer.append(f"{symbol.name}@{names[index]}")
    assert newer == []


def test_only_libraries_of_every_system_are_needed(elf):
    assert {tag.needed for tag in _dynamic(elf, "DT_NEEDED")} <= SYSTEM
    assert not _dynamic(elf, "DT_RPATH") and not _dynamic(elf, "DT_RUNPATH")


def test_position_independent_without_text_relocations(elf):
    assert elf.header["e_type"] == "ET_DYN"
    assert not _dynamic(elf, "DT_TEXTREL")


def test_stack_is_not_executable(elf):
    (stack,) = (s for s in elf.iter_segments() if s["p_type"] == "PT_GNU_STACK")
    assert not stack["p_flags"] & P_FLAGS.PF_X


def test_no_segment_is_writable_and_executable(elf):
    both = P_FLAGS.PF_W | P_FLAGS.PF_X
    assert not [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD" and s["p_flags"] & both == both]


def test_relocations_are_read_only_and_complete_at_load(elf):
    """Full RELRO."""
    assert [s for s in elf.iter_segments() if s["p_type"] == "PT_GNU_RELRO"]
    (flags,) = _dynamic(elf, "DT_FLAGS")
    assert flags["d_val"] & 0x8  # DF_BIND_NOW


def test_stack_is_protected(elf):
    assert "__stack_chk_fail" in {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()}


def test_calls_of_libc_are_fortified(elf):
    """Only the backend makes calls that the compiler cannot prove to be safe."""
    names = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()}
    checked = {"snprintf", "vsnprintf", "sprintf", "fprintf", "printf", "strcpy", "strcat"}
    assert not names & checked
    if elf.stream.name.endswith("libflagos_backend.so"):
        assert any(re.fullmatch(r"__\w+_chk", name) for name in names)


def test_no_path_of_the_machine_that_built_it(elf):
    """Two folders give one file."""
    elf.stream.seek(0)
    assert os.fsencode(ROOT) not in elf.stream.read()


def test_auditwheel_finds_manylinux_2_28():
    wheels = list((ROOT / ".flagos/dist").glob("flagos-*.whl"))
    if os.environ.get("FLAGOS_TEST_INSTALLED") != "1" or len(wheels) != 1:
        pytest.skip("the wheel under test is that of tools/test")
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheels[0])]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = re.fullmatch(r"manylinux_2_(\d+)_\w+", report["overall_tag"])
    assert found and int(found[1]) <= 28, report
