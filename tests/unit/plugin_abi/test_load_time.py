"""Code that would run at load, and files that would be loaded unchecked: each way there is has its refusal."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys

import pytest

from plugin_abi import loader
from plugin_abi.elf import ElfFile
from plugin_abi.errors import RefusalCode
from plugin_abi.initializers import foreign_initializers
from plugin_abi.libraries import open_elf
from unit.plugin_abi.load_time import LEAVES, REFUSED, RUNS, SOURCES, own_library, with_own
from unit.plugin_abi.plugins import Plugins, Toolchain


@pytest.mark.parametrize("name", REFUSED)
def test_each_way_is_refused_with_nothing_of_it_run(name: str, plugins: Plugins) -> None:
    make, code, parts = REFUSED[name]
    manifest = make(plugins, "40_bad")
    plugins.add("50_sound")
    result = loader.load(environment=plugins.environment(FLAGOS_TRIAL_LOAD="0"))
    assert result.accepted is not None and result.accepted.place.endswith("lib-50_sound.so")
    (refusal,) = result.refusals
    assert refusal.code is code, refusal
    assert all(part in refusal.fact + refusal.cure for part in parts), refusal
    assert str(manifest.parent) in refusal.place


@pytest.mark.parametrize("name", RUNS)
def test_the_dynamic_linker_would_run_it(name: str, plugins: Plugins) -> None:
    """An independent judge, in a child: these are no false alarms."""
    manifest = REFUSED[name][0](plugins, "40_bad")
    library = str(manifest.parent / json.loads(manifest.read_text())["library_path"])
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, library], capture_output=True)
    assert done.returncode == LEAVES, done.stderr


def test_a_dependency_without_code_of_its_own_is_accepted(plugins: Plugins) -> None:
    manifest = with_own(plugins, "50_own", own_library(plugins, "quiet"))
    assert loader.check(manifest, environment=plugins.environment()) is None


def test_what_ordinary_toolchains_make_can_be_declared(plugins: Plugins) -> None:
    """The number counts the library's functions and those of the dependencies that it brings along."""
    dependency = own_library(plugins, "declared", "-Wl,-init=at_load_value")
    manifest = with_own(plugins, "50_own", dependency, "-DMINIMAL_CONSTRUCTOR", static_initializers=1)
    refusal = loader.check(manifest, environment=plugins.environment())
    assert refusal is not None and refusal.code is RefusalCode.STATIC_INITIALIZER
    assert "2 static initializers (at_load, at_load_value of lib-declared.so)" in refusal.fact
    manifest = with_own(plugins, "50_own", dependency, "-DMINIMAL_CONSTRUCTOR", static_initializers=2)
    assert loader.check(manifest, environment=plugins.environment()) is None
    environment = plugins.environment(FLAGOS_STATIC_INITIALIZERS="never")
    refusal = loader.check(manifest, environment=environment)
    assert refusal is not None and refusal.code is RefusalCode.STATIC_INITIALIZER


def test_a_shown_resolver_counts_once(toolchain: Toolchain) -> None:
    elf = open_elf(toolchain.build(SOURCES, ("-DAT_LOAD_SHOWN_RESOLVER",)))
    assert foreign_initializers(elf) == ("at_load_indirect",)


def test_no_section_header_decides(toolchain: Toolchain) -> None:
    """Without any, the same is found; only names are missing."""
    for flags in ((), ("-DAT_LOAD_RESOLVER",), ("-DAT_LOAD_INIT_SECTION",), ("-DMINIMAL_CONSTRUCTOR",)):
        data = bytearray(toolchain.build(SOURCES, flags).read_bytes())
        whole = foreign_initializers(ElfFile(bytes(data)))
        struct.pack_into("<Q", data, 40, 0)  # e_shoff
        assert len(foreign_initializers(ElfFile(bytes(data)))) == len(whole) == (1 if flags else 0)


def test_the_systems_own_libraries_are_not_the_backends() -> None:
    """Whoever names their folder: they are checked by nobody, as for every other program."""
    linker = loader.current_linker()
    found = linker.find("libm.so.6", 62, linker.default_folders[0], ("/usr/lib/x86_64-linux-gnu",), ())
    assert found is not None and not found.own
    assert os.uname().machine == "x86_64"


# ---- The compiler's own on aarch64, by its words ----

_PAGE = 0x1000


def _aarch64(words: dict[int, int], tags: dict[int, int] | None = None) -> ElfFile:
    """A library of one segment that is mapped at 0, with code words at addresses."""
    size = 0x3000
    data = bytearray(size)
    data[:20] = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HH", 3, 183)
    struct.pack_into("<Q", data, 32, 64)
    struct.pack_into("<HH", data, 54, 56, 2)
    struct.pack_into("<IIQQQQQQ", data, 64, 1, 5, 0, 0, 0, size, size, _PAGE)
    entries = {5: 0x2800, 10: 16, 6: 0x2900, 4: 0x2A00, **(tags or {})}
    struct.pack_into("<IIQQQQQQ", data, 120, 2, 4, 0x2000, 0x2000, 0, 16 * len(entries) + 16, 16 * len(entries) + 16, 8)
    for index, entry in enumerate(entries.items()):
        struct.pack_into("<QQ", data, 0x2000 + 16 * index, *entry)
    struct.pack_into("<II", data, 0x2A00, 1, 1)  # DT_HASH of no symbol but the first
    for address, word in words.items():
        struct.pack_into("<I", data, address, word)
    return ElfFile(bytes(data))


_FRAME_DUMMY = {0x1000: 0xD503245F, 0x1004: 0x1400001F}  # bti c; b 0x1080
_CLONES = [0xB0000000, 0x91000000, 0xB0000001, 0x91000021, 0xCB000021, 0xD37FFC22, 0x8B810C41, 0x9341FC21, 0xB4000041]
_REGISTER = {0x1080 + 4 * index: word for index, word in enumerate(_CLONES)} | {0x10A8: 0xD65F03C0}


@pytest.mark.parametrize(
    ("change", "foreign"),
    [
        ({}, 0),
        ({0x1080 + 12: 0x91000421}, 1),  # another second address
        ({0x1080 + 16: 0xD4000001}, 1),  # a system call
        ({0x10A8: 0xD503201F}, 1),  # no ret
        ({0x1004: 0xD65F03C0}, 1),  # no jump
    ],
    ids=["the compiler's", "other address", "system call", "no return", "no jump"],
)
def test_frame_dummy_of_aarch64(change: dict[int, int], foreign: int) -> None:
    elf = _aarch64({**_FRAME_DUMMY, **_REGISTER, **change, 0x2F00: 0x1000}, {25: 0x2F00, 27: 8})
    assert len(foreign_initializers(elf)) == foreign


_INIT = [0xD503233F, 0xA9BF7BFD, 0x910003FD, 0x9400000D, 0xA8C17BFD, 0xD50323BF, 0xD65F03C0]
_WEAK = [0xB0000000, 0xF947F800, 0xB4000040, 0x14000007, 0xD65F03C0]
_STUB = [0xB0000010, 0xF947FA11]
_CRT = {
    **{0x1000 + 4 * index: word for index, word in enumerate(_INIT)},
    **{0x1040 + 4 * index: word for index, word in enumerate(_WEAK)},
    **{0x1068 + 4 * index: word for index, word in enumerate(_STUB)},
}


@pytest.mark.parametrize(
    ("change", "foreign"),
    [({}, 0), ({0x1010: 0x94000010}, 1), ({0x1014: 0xD503201F}, 1), ({0x1048: 0xD503201F}, 1), ({0x2FF0: 1}, 1)],
    ids=["crti's", "a call", "no autiasp", "no comparison", "a hook"],
)
def test_init_of_aarch64(change: dict[int, int], foreign: int) -> None:
    assert len(foreign_initializers(_aarch64({**_CRT, **change}, {12: 0x1000}))) == foreign
