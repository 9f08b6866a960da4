"""Plugins whose load would run code that no constructor of theirs shows, or would have unchecked files loaded.

`RUNS`: those of which the dynamic linker itself shows that code runs (fixtures/at_load.c ends the process with 42).
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import SegmentType, Tag
from plugin_abi.errors import RefusalCode
from unit.plugin_abi.elf_edit import add_tags, address_of, header_place, replace_tag, set_word
from unit.plugin_abi.plugins import FIXTURES, MINIMAL, Plugins

SOURCES = (*MINIMAL, "at_load.c")
LEAVES = 42

Make = Callable[[Plugins, str], Path]


def _built(*flags: str) -> Make:
    return lambda plugins, name: plugins.add(name, plugins.toolchain.build(SOURCES, flags))


def _edited(change: Callable[[bytes, Path], bytes], *flags: str) -> Make:
    def make(plugins: Plugins, name: str) -> Path:
        library = plugins.toolchain.build(SOURCES, flags)
        return plugins.add(name, change(library.read_bytes(), library))

    return make


def own_library(plugins: Plugins, name: str, *flags: str, soname: bool = False) -> Path:
    """A library lib-NAME.so that a plugin can bring along."""
    library = plugins.toolchain.folder / f"lib-{name}.so"
    if not library.exists():
        options = [f"-Wl,-soname,{library.name}"] if soname else []
        files = ["-DAT_LOAD_SHOWN", str(FIXTURES / "at_load.c"), "-o", str(library)]
        subprocess.run(["gcc", "-shared", "-fPIC", "-fvisibility=hidden", *options, *files, *flags], check=True)
    return library


def with_own(
    plugins: Plugins, name: str, dependency: Path, *flags: str, run_path: str = "$ORIGIN", **changes: object
) -> Path:
    """A plugin that needs a library which lies beside it."""
    link = (f"-L{dependency.parent}", "-Wl,--no-as-needed", f"-Wl,-rpath,{run_path}", f"-l:{dependency.name}")
    manifest = plugins.add(name, plugins.toolchain.build(SOURCES, (*link, *flags)), **changes)
    shutil.copy(dependency, manifest.parent / dependency.name)
    return manifest


def _constructor_below(depth: int) -> Make:
    def make(plugins: Plugins, name: str) -> Path:
        dependency = own_library(plugins, "runs", "-DAT_LOAD_CONSTRUCTOR")
        folder = plugins.folder / "backend.d"
        folder.mkdir(parents=True, exist_ok=True)
        for level in range(depth - 1):
            shutil.copy(dependency, folder / dependency.name)
            link = (f"-L{dependency.parent}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-l:{dependency.name}")
            dependency = own_library(plugins, f"above{level}", *link)
        return with_own(plugins, name, dependency, "-Wl,--allow-shlib-undefined")

    return make


def _hook(plugins: Plugins, name: str) -> Path:
    return with_own(plugins, name, own_library(plugins, "hook", "-DAT_LOAD_HOOK"))


def _decoy(data: bytes, library: Path) -> bytes:
    """PT_DYNAMIC's file offset leads to a harmless section, its address to another one."""
    at = header_place(data, SegmentType.DYNAMIC)
    (offset, _) = struct.unpack_from("<QQ", data, at + 8)
    size = 16 * (len(ElfFile(data).dynamic) + 1)
    harmless = data[offset : offset + size]
    changed = replace_tag(data, Tag.INIT, Tag.INIT, address_of(library, "at_load_leave"))
    changed += bytes(-len(changed) % 16)
    return set_word(changed + harmless, at + 8, len(changed))


def _second_dynamic(data: bytes, library: Path) -> bytes:
    """PT_NOTE becomes a PT_DYNAMIC in front of the true one."""
    changed = replace_tag(data, Tag.INIT, Tag.INIT, address_of(library, "at_load_leave"))
    return set_word(changed, header_place(changed, 4), SegmentType.DYNAMIC, "<I")


def _lying_sections(data: bytes, library: Path) -> bytes:
    """DT_INIT is code of the library's own, and a section header says that .init is there."""
    address = address_of(library, "at_load_leave")
    changed = replace_tag(data, Tag.INIT, Tag.INIT, address)
    (start, count) = *struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)[0]
    index = [section.name for section in ElfFile(data).sections].index(".init")
    assert index < count
    return set_word(changed, start + 64 * index + 16, address)


def _relocated_init(data: bytes, library: Path) -> bytes:
    """A relocation writes another address over DT_INIT's own entry while the library is loaded."""
    elf = ElfFile(data)
    segment = next(segment for segment in elf.segments if segment.kind == SegmentType.DYNAMIC)
    place = segment.address + 16 * [key for key, _ in elf.dynamic].index(Tag.INIT) + 8
    table = elf.file_offset(elf.tags[Tag.RELA], "DT_RELA")
    # The last one serves a weak symbol, which nobody defines. R_X86_64_DTPOFF64 adds no load address.
    last = table + elf.tags[Tag.RELASZ] - 24
    return data[:last] + struct.pack("<QQq", place, 17, address_of(library, "at_load_leave")) + data[last + 24 :]


#: Name: what is made, the code of its refusal, what the refusal says.
REFUSED: dict[str, tuple[Make, RefusalCode, tuple[str, ...]]] = {
    "resolver": (_built("-DAT_LOAD_RESOLVER"), RefusalCode.STATIC_INITIALIZER, ("at_load_indirect", "1 static")),
    "resolver, stripped": (_built("-DAT_LOAD_RESOLVER", "-Wl,-s"), RefusalCode.STATIC_INITIALIZER, ("1 static",)),
    "code in .init": (_built("-DAT_LOAD_INIT_SECTION"), RefusalCode.STATIC_INITIALIZER, ("_init",)),
    "code in .init, stripped": (
        _built("-DAT_LOAD_INIT_SECTION", "-Wl,-s"),
        RefusalCode.STATIC_INITIALIZER,
        ("1 static",),
    ),
    "constructor of the compiler's name": (
        _built("-DAT_LOAD_PRETENDER"),
        RefusalCode.STATIC_INITIALIZER,
        ("frame_dummy",),
    ),
    "constructor of a dependency": (
        _constructor_below(1),
        RefusalCode.STATIC_INITIALIZER,
        ("run of lib-runs.so",),
    ),
    "constructor of a dependency's dependency": (
        _constructor_below(3),
        RefusalCode.STATIC_INITIALIZER,
        ("run of lib-runs.so",),
    ),
    "the profiler's hook in a dependency": (_hook, RefusalCode.STATIC_INITIALIZER, ("__gmon_start__ of lib-hook.so",)),
    "initializers before the others": (
        _edited(
            lambda data, library: replace_tag(
                replace_tag(data, Tag.INIT_ARRAY, Tag.PREINIT_ARRAY, ElfFile(data).tags[Tag.INIT_ARRAY]),
                Tag.INIT_ARRAYSZ,
                Tag.PREINIT_ARRAYSZ,
                16,
            ),
            "-DAT_LOAD_CONSTRUCTOR",
        ),
        RefusalCode.STATIC_INITIALIZER,
        ("run",),
    ),
    "DT_INIT twice": (
        _edited(lambda data, library: add_tags(data, (Tag.INIT, address_of(library, "at_load_leave")))),
        RefusalCode.LIBRARY_MALFORMED,
        ("DT_INIT", "more than once"),
    ),
    "a dynamic section elsewhere in memory": (_edited(_decoy), RefusalCode.LIBRARY_MALFORMED, ("mapped from",)),
    "two dynamic sections": (_edited(_second_dynamic), RefusalCode.LIBRARY_MALFORMED, ("2 dynamic segments",)),
    "a section header that lies": (
        _edited(_lying_sections),
        RefusalCode.STATIC_INITIALIZER,
        ("at_load_leave",),
    ),
    "a relocation of the dynamic section": (
        _edited(_relocated_init),
        RefusalCode.LIBRARY_MALFORMED,
        ("relocations change its dynamic section",),
    ),
    "executable stack": (_built("-Wl,-z,execstack"), RefusalCode.EXECUTABLE_STACK, ("noexecstack",)),
    "no word on the stack": (
        _edited(lambda data, _: set_word(data, header_place(data, SegmentType.GNU_STACK), 0, "<I")),
        RefusalCode.EXECUTABLE_STACK,
        ("no PT_GNU_STACK",),
    ),
    "executable stack of a dependency": (
        lambda plugins, name: with_own(plugins, name, own_library(plugins, "stack", "-Wl,-z,execstack")),
        RefusalCode.EXECUTABLE_STACK,
        ("lib-stack.so",),
    ),
    "text relocations": (
        _built("-DAT_LOAD_TEXT_RELOCATION", "-Wl,-z,notext"),
        RefusalCode.WRITABLE_CODE,
        ("DT_TEXTREL",),
    ),
    "writable code": (_built("-DAT_LOAD_WRITABLE_CODE"), RefusalCode.WRITABLE_CODE, ("writable and executable",)),
    "filter": (_built("-Wl,-F,libm.so.6"), RefusalCode.UNCHECKED_LOAD, ("DT_FILTER",)),
    "auxiliary filter": (_built("-Wl,-f,libm.so.6"), RefusalCode.UNCHECKED_LOAD, ("DT_AUXILIARY",)),
    "auditor": (_built("-Wl,--audit,libaudit.so"), RefusalCode.UNCHECKED_LOAD, ("DT_AUDIT",)),
    "auditor of dependencies": (_built("-Wl,--depaudit,libaudit.so"), RefusalCode.UNCHECKED_LOAD, ("DT_DEPAUDIT",)),
    "run path below the current folder": (
        _built("-Wl,-rpath,$ORIGIN:lib"),
        RefusalCode.UNCHECKED_LOAD,
        ("'lib'", "$ORIGIN"),
    ),
    "run path with an empty entry": (_built("-Wl,-rpath,$ORIGIN::/usr/lib"), RefusalCode.UNCHECKED_LOAD, ("'.'",)),
    "old run path below the current folder": (
        _built("-Wl,--disable-new-dtags,-rpath,lib"),
        RefusalCode.UNCHECKED_LOAD,
        ("'lib'",),
    ),
    "segments on one page": (
        _edited(
            lambda data, _: set_word(
                data,
                header_place(data, SegmentType.LOAD) + 56 + 16,
                struct.unpack_from("<Q", data, header_place(data, SegmentType.LOAD) + 56 + 16)[0] - 4096,
            )
        ),
        RefusalCode.LIBRARY_MALFORMED,
        ("",),
    ),
}

#: Of these the dynamic linker shows that code runs.
RUNS = tuple(
    name
    for name, (_, code, _) in REFUSED.items()
    if code is RefusalCode.STATIC_INITIALIZER
    or name in ("DT_INIT twice", "a dynamic section elsewhere in memory", "a relocation of the dynamic section")
)
