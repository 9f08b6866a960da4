"""Which file serves a needed library: the dynamic linker itself is the judge."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plugin_abi import libraries
from plugin_abi.libraries import current_linker, open_elf, resolve
from unit.plugin_abi.plugins import MINIMAL, Toolchain


def _linkers_view(library: Path, **environment: str) -> dict[str, str]:
    """What ld.so would load, by its own trace."""
    variables = {**os.environ, **environment, "LD_TRACE_LOADED_OBJECTS": "1"}
    loader = next(Path("/lib64").glob("ld-linux-x86-64.so.2"))
    done = subprocess.run([str(loader), str(library)], env=variables, capture_output=True, text=True)
    return dict(re.findall(r"^\s+(\S+) => (\S.*?)(?: \(0x[0-9a-f]+\))?$", done.stdout, re.MULTILINE))


def _ours(library: Path) -> dict[str, str]:
    linker = replace(current_linker(), loaded={})
    resolution = resolve(open_elf(library), library, linker)
    return {name: str(path) for name, path in resolution.found.items()} | {
        name: "not found" for name, _ in resolution.missing
    }


def _agree(library: Path) -> None:
    theirs, ours = _linkers_view(library), _ours(library)
    for name, path in theirs.items():
        assert name in ours
        assert ours[name] == path == "not found" or Path(ours[name]).samefile(path)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """A source file in a folder of its own for each of three libraries: a, b and c_."""
    for name in ("a", "b", "c_"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"{name}.c").write_text(f"int {name}(void) {{ return 1; }}\n")
    return tmp_path


def _link(folders: Path, name: str, *flags: str) -> Path:
    library = folders / name / f"lib{name}.so"
    source = str(folders / name / f"{name}.c")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", str(library), "-Wl,--no-as-needed", *flags], check=True)
    return library


def test_the_systems_libraries(toolchain: Toolchain) -> None:
    sources = (*MINIMAL, "cxx_strings.cc")
    _agree(toolchain.build(sources, cxx11_abi=1))


@pytest.mark.parametrize("tags", ["--enable-new-dtags", "--disable-new-dtags"], ids=["RUNPATH", "RPATH"])
def test_runpath_serves_its_owner_and_rpath_all_below(tags: str, folders: Path) -> None:
    _link(folders, "c_")
    _link(folders, "b", f"-L{folders}/c_", "-lc_")
    both = f"-Wl,{tags},-rpath,$ORIGIN/../b:$ORIGIN/../c_"
    top = _link(folders, "a", f"-L{folders}/b", "-lb", f"-Wl,-rpath-link,{folders}/c_", both)
    _agree(top)
    assert _ours(top)["libb.so"] != "not found"
    assert (_ours(top)["libc_.so"] == "not found") == (tags == "--enable-new-dtags")


def test_a_dependency_of_another_architecture_is_passed_over(folders: Path) -> None:
    _link(folders, "c_")
    foreign = bytearray((folders / "c_" / "libc_.so").read_bytes())
    struct.pack_into("<H", foreign, 18, 183)
    (folders / "b" / "libc_.so").write_bytes(foreign)
    rpath = f"-Wl,-rpath,{folders}/b:{folders}/c_"
    top = _link(folders, "a", f"-L{folders}/c_", "-lc_", rpath)
    _agree(top)
    assert _ours(top)["libc_.so"] == str(folders / "c_" / "libc_.so")


def test_the_library_path_counts_as_it_was_at_the_start(folders: Path) -> None:
    _link(folders, "c_")
    top = _link(folders, "a", f"-L{folders}/c_", "-lc_")
    assert _ours(top)["libc_.so"] == "not found"
    program = (
        "import os, sys; from pathlib import Path; os.environ['LD_LIBRARY_PATH'] = '/nowhere'\n"
        "from plugin_abi.libraries import *; path = Path(sys.argv[1])\n"
        "print(resolve(open_elf(path), path, current_linker()).found['libc_.so'])"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": f"/nowhere:{folders}/c_"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(top)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(folders / "c_" / "libc_.so")


def test_what_the_process_has_loaded_serves_first() -> None:
    linker = current_linker()
    assert linker.loaded["libc.so.6"].samefile(next(iter(linker.cache["libc.so.6"])))


LDCONFIG = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")


@pytest.mark.skipif(LDCONFIG is None, reason="ldconfig, the independent judge, is not installed")
def test_the_cache_is_what_ldconfig_prints() -> None:
    assert LDCONFIG is not None
    printed = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True, check=True).stdout
    expected = re.findall(r"^\t(\S+) \(.*\) => (\S+)$", printed, re.MULTILINE)
    found = [(name, str(path)) for name, paths in current_linker().cache.items() for path in paths]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(
    "damage", [b"", b"x" * 100, b"ld.so-1.7.0\0" + b"\xff" * 40, b"glibc-ld.so.cache1.1" + b"\xff" * 60]
)
def test_a_damaged_cache_is_an_empty_one(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(damage)
    assert libraries._read_cache(tmp_path / "cache") == {}
    assert libraries._read_cache(tmp_path / "absent") == {}


def test_a_cache_behind_one_of_the_old_format_is_read(tmp_path: Path) -> None:
    """Older systems put both into one file: a header of 16 bytes, entries of 12, then the new format."""
    new = Path("/etc/ld.so.cache").read_bytes()
    assert new.startswith(b"glibc-ld.so.cache1.1")
    old = b"ld.so-1.7.0\0" + struct.pack("<I", 3) + bytes(36)
    (tmp_path / "cache").write_bytes(old + bytes(-len(old) % 8) + new)
    assert libraries._read_cache(tmp_path / "cache") == libraries._read_cache(Path("/etc/ld.so.cache"))
