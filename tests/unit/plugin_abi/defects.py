"""One plugin for each defect that the loader must see: how to make it, and what the refusal must say."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from plugin_abi.errors import RefusalCode
from plugin_abi.frameworks import RunningFramework
from unit.plugin_abi.plugins import FIXTURES, GIT_REVISION, MINIMAL, Plugins

NAME = "40_defective"
#: A regular file that not even root can read: reading at its beginning is an input/output error.
UNREADABLE = Path("/proc/self/mem")


@dataclass(frozen=True)
class Defect:
    """`make` adds the plugin NAME; `parts` must appear in the refusal. `runs_in_child`: the trial is what finds it."""

    code: RefusalCode
    make: Callable[[Plugins], Path]
    parts: tuple[str, ...]
    runs_in_child: bool = False
    frameworks: tuple[RunningFramework, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


# ---- Manifests ----


def _text(content: bytes | str) -> Callable[[Plugins], Path]:
    def make(plugins: Plugins) -> Path:
        path = plugins.add(NAME)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def _fields(**changes: object) -> Callable[[Plugins], Path]:
    return lambda plugins: plugins.add(NAME, **changes)


def _duplicate_key(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    path.write_text(path.read_text().replace('"name":', '"name": "first", "name":', 1))
    return path


def _missing_field(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    fields = json.loads(path.read_text())
    del fields["built_with"]["glibc"]
    path.write_text(json.dumps(fields))
    return path


def _unreadable_manifest(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    path.unlink()
    path.symlink_to(UNREADABLE)
    return path


def _manifest_of_links(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    path.unlink()
    path.symlink_to(path.name)
    return path


# ---- Libraries ----


def _library(change: Callable[[bytes], bytes]) -> Callable[[Plugins], Path]:
    """A sound library whose bytes are changed afterwards."""
    return lambda plugins: plugins.add(NAME, change(plugins.toolchain.build().read_bytes()))


def _built(*flags: str, **defines: str | int) -> Callable[[Plugins], Path]:
    return lambda plugins: plugins.add(NAME, plugins.toolchain.build(flags=flags, **defines))


def _set_half_word(data: bytes, offset: int, value: int) -> bytes:
    return data[:offset] + struct.pack("<H", value) + data[offset + 2 :]


def _unreadable_library(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    library = path.parent / f"lib-{NAME}.so"
    library.unlink()
    library.symlink_to(UNREADABLE)
    return path


def _library_of_links(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    library = path.parent / f"lib-{NAME}.so"
    library.unlink()
    library.symlink_to(library.name)
    return path


def _missing_library(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    (path.parent / f"lib-{NAME}.so").unlink()
    return path


def _old_strings(plugins: Plugins) -> Path:
    """The library's strings are of the old ABI; its manifest and its info say C++11."""
    sources = (*MINIMAL, "cxx_strings.cc")
    library = plugins.toolchain.build(sources, ("-D_GLIBCXX_USE_CXX11_ABI=0",), cxx11_abi=1)
    return plugins.add(NAME, library, built_with__cxx11_abi=True)


def _missing_dependency(plugins: Plugins) -> Path:
    folder = plugins.toolchain.folder
    source, dependency = folder / "gone.c", folder / "libminimal_gone.so"
    if not source.exists():
        source.write_text("int minimal_gone(void) { return 1; }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(dependency)], check=True)
        plugins.toolchain.build(flags=(f"-L{folder}", "-Wl,--no-as-needed", "-lminimal_gone"))
        dependency.unlink()
    library = plugins.toolchain.build(flags=(f"-L{folder}", "-Wl,--no-as-needed", "-lminimal_gone"))
    return plugins.add(NAME, library)


def _beside(place: Callable[[Path], None]) -> Callable[[Plugins], Path]:
    """The missing dependency's run path leads to something of its name that is no library."""

    def make(plugins: Plugins) -> Path:
        folder = plugins.toolchain.folder
        _missing_dependency(plugins)
        source, dependency = folder / "gone.c", folder / "libminimal_gone.so"
        subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(dependency)], check=True)
        flags = (f"-L{folder}", "-Wl,--no-as-needed", "-lminimal_gone", "-Wl,-rpath,$ORIGIN")
        path = plugins.add(NAME, plugins.toolchain.build(flags=flags))
        dependency.unlink()
        place(path.parent / dependency.name)
        return path

    return make


def _library_pipe(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    library = path.parent / f"lib-{NAME}.so"
    library.unlink()
    os.mkfifo(library)
    return path


def _sparse_library(plugins: Plugins) -> Path:
    path = plugins.add(NAME)
    os.truncate(path.parent / f"lib-{NAME}.so", 4 << 30)
    return path


def _resources_through_a_link(plugins: Plugins) -> Path:
    path = plugins.add(NAME, resource_dir="./resources")
    (path.parent / "resources").symlink_to("/usr")
    return path


def elf_hash(name: bytes) -> int:
    """The System V hash that a needed version carries beside its name (gABI chapter 5)."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high & 0xFFFFFFFF
    return value


def future_version(data: bytes, old: bytes, new: bytes) -> bytes:
    """A library that wants another symbol version than it was linked with, by name and by hash."""
    assert len(old) == len(new)
    old_hash, new_hash = (struct.pack("<I", elf_hash(name)) for name in (old, new))
    assert data.count(b"\0" + old + b"\0") == 1
    # The hash opens an auxiliary entry of .gnu.version_r, 4-byte aligned, with flags of zero after it.
    places = [at for at in range(0, len(data) - 8, 4) if data[at : at + 6] == old_hash + b"\0\0"]
    assert len(places) == 1
    data = data[: places[0]] + new_hash + data[places[0] + 4 :]
    return data.replace(b"\0" + old + b"\0", b"\0" + new + b"\0")


def _future_glibc(plugins: Plugins) -> Path:
    data = plugins.toolchain.build().read_bytes()
    return plugins.add(NAME, future_version(data, b"GLIBC_2.2.5", b"GLIBC_2.9.9"))


def _future_libstdcxx(plugins: Plugins) -> Path:
    sources = (*MINIMAL, "cxx_strings.cc")
    data = plugins.toolchain.build(sources, cxx11_abi=1).read_bytes()
    data = future_version(data, b"GLIBCXX_3.4.21", b"GLIBCXX_3.9.99")
    return plugins.add(NAME, data, built_with__cxx11_abi=True)


def _executable(plugins: Plugins) -> Path:
    # ET_EXEC is 2 and stands where ET_DYN does, at e_type.
    return plugins.add(NAME, _set_half_word(plugins.toolchain.build().read_bytes(), 16, 2))


JAXLIB = RunningFramework("jaxlib", "0.10.2", "1" * 40, "clang 18.1.8", True, "a jaxlib of this test")

CRASH = "-DBEFORE_NEGOTIATION=*(volatile int*)8=1;"
HANG = "-DBEFORE_NEGOTIATION=for(;;)pause();"

DEFECTS: dict[str, Defect] = {
    # The manifest.
    "manifest unreadable": Defect(RefusalCode.MANIFEST_UNREADABLE, _unreadable_manifest, ("cannot be read",)),
    "manifest that is a link to itself": Defect(
        RefusalCode.MANIFEST_NOT_FOUND, _manifest_of_links, ("a link that leads to no file",)
    ),
    "manifest empty": Defect(RefusalCode.MANIFEST_EMPTY, _text(""), ("empty",)),
    "manifest of blanks": Defect(RefusalCode.MANIFEST_EMPTY, _text(" \n\t"), ("empty",)),
    "manifest huge": Defect(RefusalCode.MANIFEST_TOO_LARGE, _text(b" " * (64 << 20)), ("262144 bytes",)),
    "manifest not UTF-8": Defect(RefusalCode.MANIFEST_NOT_UTF8, _text(b'{"name": "\xff"}'), ("byte 10", "UTF-8")),
    "manifest not JSON": Defect(RefusalCode.MANIFEST_NOT_JSON, _text('{"name": }'), ("not JSON",)),
    "manifest with NaN": Defect(RefusalCode.MANIFEST_NOT_JSON, _text('{"priority": NaN}'), ("NaN",)),
    "manifest with an infinity": Defect(RefusalCode.MANIFEST_NOT_JSON, _text('{"priority": 1e999}'), ("1e999",)),
    "manifest deep": Defect(RefusalCode.MANIFEST_TOO_DEEP, _text("[" * 100_000), ("16 levels",)),
    "manifest with a key twice": Defect(RefusalCode.MANIFEST_DUPLICATE_KEY, _duplicate_key, ("'name'", "twice")),
    "manifest of another format": Defect(
        RefusalCode.MANIFEST_FORMAT_VERSION, _fields(file_format_version="2.0.0"), ("2.0.0", "1.0.x")
    ),
    "manifest without a field": Defect(RefusalCode.MANIFEST_MISSING_FIELD, _missing_field, ("built_with.glibc",)),
    "manifest with a wrong type": Defect(
        RefusalCode.MANIFEST_INVALID_FIELD, _fields(priority="high"), ("priority", "string", "integer")
    ),
    "manifest that is a list": Defect(RefusalCode.MANIFEST_INVALID_FIELD, _text("[]"), ("top level", "array")),
    # The library, read.
    "library missing": Defect(RefusalCode.LIBRARY_NOT_FOUND, _missing_library, (f"lib-{NAME}.so", "does not exist")),
    "library that is a link to itself": Defect(
        RefusalCode.LIBRARY_NOT_FOUND, _library_of_links, (f"lib-{NAME}.so", "a link that leads to no file")
    ),
    "library beside its manifest by a bare name": Defect(
        RefusalCode.LIBRARY_NOT_FOUND,
        _fields(library_path=f"lib-{NAME}.so"),
        ("the dynamic linker's folders", f"'./lib-{NAME}.so'"),
    ),
    "library unreadable": Defect(RefusalCode.LIBRARY_UNREADABLE, _unreadable_library, ("cannot be read",)),
    "library empty": Defect(RefusalCode.LIBRARY_NOT_ELF, _library(lambda data: b""), ("ELF magic",)),
    "library not ELF": Defect(RefusalCode.LIBRARY_NOT_ELF, _library(lambda data: b"MZ" + data[2:]), ("ELF magic",)),
    "library truncated": Defect(
        RefusalCode.LIBRARY_TRUNCATED, _library(lambda data: data[: len(data) // 2]), ("the file ends at",)
    ),
    "library truncated in its header": Defect(
        RefusalCode.LIBRARY_TRUNCATED, _library(lambda data: data[:40]), ("inside the ELF header",)
    ),
    "library malformed": Defect(
        RefusalCode.LIBRARY_MALFORMED, _library(lambda data: _set_half_word(data, 54, 1)), ("program headers",)
    ),
    "library an executable": Defect(RefusalCode.LIBRARY_NOT_SHARED, _executable, ("type 2",)),
    "library of another architecture": Defect(
        RefusalCode.WRONG_ARCHITECTURE, _library(lambda data: _set_half_word(data, 18, 22)), ("s390x", "x86_64")
    ),
    "library of 32 bits": Defect(
        RefusalCode.WRONG_ARCHITECTURE, _library(lambda data: data[:4] + b"\1" + data[5:]), ("32-bit",)
    ),
    "sha256 mismatch": Defect(RefusalCode.SHA256_MISMATCH, _fields(sha256="0" * 64), ("SHA-256", "0" * 64)),
    "entry missing": Defect(
        RefusalCode.ENTRY_MISSING, _built("-DMINIMAL_ENTRY=other_entry"), ("flagos_plugin_entry", "visibility")
    ),
    "extra export": Defect(
        RefusalCode.EXTRA_EXPORTS, _built("-DMINIMAL_EXTRA_EXPORT"), ("minimal_extra", "version script")
    ),
    "static initializer": Defect(
        RefusalCode.STATIC_INITIALIZER, _built("-DMINIMAL_CONSTRUCTOR"), ("at_load", "static_initializers")
    ),
    "static initializer, stripped": Defect(
        RefusalCode.STATIC_INITIALIZER, _built("-DMINIMAL_CONSTRUCTOR", "-Wl,-s"), ("1 static initializers",)
    ),
    "initializer as DT_INIT": Defect(
        RefusalCode.STATIC_INITIALIZER, _built("-Wl,-init=minimal_mark"), ("minimal_mark",)
    ),
    "declared initializer that the user forbids": Defect(
        RefusalCode.STATIC_INITIALIZER,
        lambda plugins: plugins.add(
            NAME, plugins.toolchain.build(flags=("-DMINIMAL_CONSTRUCTOR",)), static_initializers=1
        ),
        ("FLAGOS_STATIC_INITIALIZERS",),
        variables={"FLAGOS_STATIC_INITIALIZERS": "never"},
    ),
    "wrong compiler": Defect(
        RefusalCode.COMPILER_MISMATCH, _fields(built_with__compiler="clang 3.0.0"), ("gcc", "clang 3.0.0", ".comment")
    ),
    "wrong C++11 ABI": Defect(RefusalCode.CXX11_ABI_MISMATCH, _old_strings, ("_GLIBCXX_USE_CXX11_ABI=0",)),
    "dependency missing": Defect(RefusalCode.DEPENDENCY_MISSING, _missing_dependency, ("libminimal_gone.so",)),
    "glibc too new": Defect(RefusalCode.GLIBC_TOO_OLD, _future_glibc, ("GLIBC_2.9.9", "libc.so.6")),
    "libstdc++ too new": Defect(
        RefusalCode.SYMBOL_VERSION_MISSING, _future_libstdcxx, ("GLIBCXX_3.9.99", "libstdc++.so.6")
    ),
    "dependency that is no library": Defect(
        RefusalCode.DEPENDENCY_MISSING,
        _beside(lambda path: path.write_bytes(b"a text") and None),
        ("libminimal_gone.so is no library", "ELF magic"),
    ),
    "dependency that is a pipe": Defect(
        RefusalCode.DEPENDENCY_MISSING, _beside(os.mkfifo), ("libminimal_gone.so is not a regular file",)
    ),
    "dependency that is a folder": Defect(
        RefusalCode.DEPENDENCY_MISSING, _beside(Path.mkdir), ("libminimal_gone.so is not a regular file",)
    ),
    "library a pipe": Defect(RefusalCode.LIBRARY_UNREADABLE, _library_pipe, ("not a regular file",)),
    "library of four gigabytes of nothing": Defect(
        RefusalCode.LIBRARY_MALFORMED, _sparse_library, (f"{4 << 30} bytes", "strip it")
    ),
    "resources missing": Defect(
        RefusalCode.RESOURCE_DIR_UNUSABLE, _fields(resource_dir="../no-such-folder"), ("no folder", "no-such-folder")
    ),
    "resources a file": Defect(
        RefusalCode.RESOURCE_DIR_UNUSABLE, _fields(resource_dir=f"./lib-{NAME}.so"), ("no folder", f"lib-{NAME}.so")
    ),
    "resources elsewhere": Defect(RefusalCode.RESOURCE_DIR_UNUSABLE, _fields(resource_dir="/usr"), ("/usr, outside",)),
    "resources elsewhere through a link": Defect(
        RefusalCode.RESOURCE_DIR_UNUSABLE, _resources_through_a_link, ("leads to /usr, outside",)
    ),
    # The versions.
    "ABI too old": Defect(
        RefusalCode.ABI_TOO_OLD, _fields(abi_version={"min": "0.1", "max": "0.9"}), ("0.1 to 0.9", "1.0")
    ),
    "ABI too new": Defect(
        RefusalCode.ABI_TOO_NEW, _fields(abi_version={"min": "2.0", "max": "2.1"}), ("2.0 to 2.1", "1.0")
    ),
    # The running frameworks.
    "wrong git revision": Defect(
        RefusalCode.FRAMEWORK_REVISION,
        _fields(built_with__framework={"jaxlib": {"git_revision": "2" * 40}}),
        ("1" * 40, "2" * 40, "a jaxlib of this test"),
        frameworks=(JAXLIB,),
    ),
    "wrong framework version": Defect(
        RefusalCode.FRAMEWORK_REVISION,
        _fields(built_with__framework={"jaxlib": {"version": ">=0.11,<0.12"}}),
        ("0.10.2", ">=0.11,<0.12"),
        frameworks=(JAXLIB,),
    ),
    "wrong framework compiler": Defect(
        RefusalCode.FRAMEWORK_COMPILER,
        _fields(built_with__framework={"jaxlib": {"binding": "cxx"}}),
        ("clang 18.1.8", "gcc", "links against its C++"),
        frameworks=(JAXLIB,),
    ),
    "wrong framework C++11 ABI": Defect(
        RefusalCode.FRAMEWORK_CXX11_ABI,
        _fields(built_with__framework={"jaxlib": {"cxx11_abi": False}}),
        ("the C++11 ABI", "the old ABI"),
        frameworks=(JAXLIB,),
    ),
    "framework missing": Defect(
        RefusalCode.FRAMEWORK_MISSING,
        _fields(built_with__framework={"no_such_framework": {"required": True}}),
        ("no_such_framework", "not installed"),
    ),
    "wrong Python": Defect(
        RefusalCode.PYTHON_VERSION,
        _fields(built_with__python={"abi": "stable", "version": "<3"}),
        ("this is Python 3", "<3"),
    ),
    # The load.
    "entry that crashes": Defect(RefusalCode.ENTRY_CRASHED, _built(CRASH), ("SIGSEGV",), runs_in_child=True),
    "entry that aborts": Defect(
        RefusalCode.ENTRY_CRASHED,
        _built('-DBEFORE_NEGOTIATION=fputs("a last word",stderr);abort();'),
        ("SIGABRT", "a last word"),
        runs_in_child=True,
    ),
    "entry that exits": Defect(
        RefusalCode.ENTRY_CRASHED, _built("-DBEFORE_NEGOTIATION=_exit(0);"), ("exit status 0",), runs_in_child=True
    ),
    "entry that hangs": Defect(
        RefusalCode.ENTRY_HANGS,
        _built(HANG),
        ("did not end within 2 s", "FLAGOS_TRIAL_TIMEOUT"),
        runs_in_child=True,
        variables={"FLAGOS_TRIAL_TIMEOUT": "2"},
    ),
    "entry that fails": Defect(
        RefusalCode.ENTRY_FAILED,
        _built('-DBEFORE_RETURN=args->message="no such chip";return FLAGOS_ENTRY_FAILED;'),
        ("returned 2", "no such chip"),
        runs_in_child=True,
    ),
    "library that the linker refuses": Defect(
        RefusalCode.DLOPEN_FAILED,
        _built("-DSAMPLE_MIN_MINOR=minimal_nowhere()", "-Wno-error=implicit-function-declaration"),
        ("minimal_nowhere",),
    ),
    "entry that speaks an older ABI": Defect(
        RefusalCode.ABI_TOO_OLD,
        _built("-DBEFORE_RETURN=args->version=9;"),
        ("0.9", "did not offer"),
        runs_in_child=True,
    ),
    "entry that speaks a newer ABI": Defect(
        RefusalCode.ABI_TOO_NEW, _built(min_minor=3, max_minor=4), ("1.3 to 1.4",), runs_in_child=True
    ),
    "info that contradicts the manifest": Defect(
        RefusalCode.INFO_MISMATCH, _built(version="9.9.9"), ("version '9.9.9'", "'0.1.0'"), runs_in_child=True
    ),
    "info of another build": Defect(
        RefusalCode.INFO_MISMATCH,
        _built(git_revision="f" * 40),
        ("f" * 40, GIT_REVISION),
        runs_in_child=True,
    ),
    "no info": Defect(
        RefusalCode.INFO_MISMATCH, _built("-DBEFORE_RETURN=args->info=NULL;"), ("lacks name",), runs_in_child=True
    ),
    "no table": Defect(
        RefusalCode.TABLE_INVALID, _built("-DBEFORE_RETURN=args->api=NULL;"), ("no function table",), runs_in_child=True
    ),
    "table with an empty slot": Defect(
        RefusalCode.TABLE_INVALID,
        _built("-DBEFORE_RETURN=table.api.compile=NULL;"),
        ("no function in compile",),
        runs_in_child=True,
    ),
    "table too short": Defect(
        RefusalCode.TABLE_INVALID,
        _built("-DBEFORE_RETURN=table.api.struct_size=64;"),
        ("ends after 64 bytes",),
        runs_in_child=True,
    ),
}

__all__ = ["CRASH", "DEFECTS", "FIXTURES", "HANG", "JAXLIB", "NAME", "Defect", "elf_hash", "future_version"]
