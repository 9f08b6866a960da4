"""Which file the dynamic linker would take for a needed library, found without asking it (and so without loading).

Serves policy: dependencies that are missing, and symbol versions that they do not provide. Source: ld.so(8).
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plugin_abi.elf import ElfError, ElfFile

_CACHE_FILE: Final = Path("/etc/ld.so.cache")
_CACHE_MAGIC: Final = b"glibc-ld.so.cache1.1"
_OLD_CACHE_MAGIC: Final = b"ld.so-1.7.0"
MAX_LIBRARIES: Final = 512


def open_elf(path: Path) -> ElfFile:
    """Read a library through a map of its file, so that only the pages that are looked at are read.

    Raises OSError where the file cannot be read and ElfError where it is no ELF64 file.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return ElfFile(b"")
        return ElfFile(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


@dataclass(frozen=True)
class Linker:
    """What the dynamic linker of this process looks at: its environment, its cache and its default folders."""

    library_path: tuple[str, ...]
    default_folders: tuple[Path, ...]
    cache: Mapping[str, tuple[Path, ...]]
    #: Libraries in the process by file name; a needed name that is already loaded is not searched for.
    loaded: Mapping[str, Path]

    def find(
        self, name: str, machine: int, origin: Path, rpath: tuple[str, ...], runpath: tuple[str, ...]
    ) -> Path | None:
        """The file for a needed `name` of a library that lies in `origin`, or None."""
        if "/" in name:
            path = Path(_expand(name, origin))
            return path if _matches(path, machine) else None
        if name in self.loaded:
            return self.loaded[name]
        folders = [*(_expand(f, origin) for f in rpath), *self.library_path, *(_expand(f, origin) for f in runpath)]
        candidates: Iterator[Path] = (Path(folder) / name for folder in folders)
        for path in (*candidates, *self.cache.get(name, ()), *(folder / name for folder in self.default_folders)):
            if _matches(path, machine):
                return path
        return None


def _expand(folder: str, origin: Path) -> str:
    for token in ("${ORIGIN}", "$ORIGIN"):
        folder = folder.replace(token, str(origin))
    for token in ("${LIB}", "$LIB"):
        folder = folder.replace(token, "lib64")
    return folder


def _matches(path: Path, machine: int) -> bool:
    """Whether the linker would take this file; it passes over libraries of another architecture."""
    try:
        with path.open("rb") as file:
            return ElfFile(file.read(64)).machine_number == machine
    except (OSError, ElfError, ValueError):
        return False


def _read_cache(path: Path) -> dict[str, tuple[Path, ...]]:
    """ld.so.cache as name to files; {} where it is absent or of a format that is not known."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    start = 0
    if data.startswith(_OLD_CACHE_MAGIC) and len(data) >= 16:
        # The old format stands in front: a header of 16 bytes, entries of 12, then the new one, aligned to 8.
        start = (16 + 12 * struct.unpack_from("<I", data, 12)[0] + 7) // 8 * 8
    if data[start : start + 20] != _CACHE_MAGIC or len(data) < start + 48:
        return {}
    (count,) = struct.unpack_from("<I", data, start + 20)
    found: dict[str, list[Path]] = {}
    for index in range(count):
        place = start + 48 + index * 24
        if place + 24 > len(data):
            break
        _, key, value = struct.unpack_from("<iII", data, place)
        name, file = _cache_string(data, start + key), _cache_string(data, start + value)
        if name and file:
            found.setdefault(name, []).append(Path(file))
    return {name: tuple(files) for name, files in found.items()}


def _cache_string(data: bytes, start: int) -> str:
    end = data.find(b"\0", start)
    return os.fsdecode(data[start:end]) if 0 <= start < end else ""


def _start_environment(name: str) -> str:
    """A variable as it was when the process started: that is the one the dynamic linker keeps looking at."""
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return os.environ.get(name, "")
    prefix = name.encode() + b"="
    return next((os.fsdecode(v[len(prefix) :]) for v in block.split(b"\0") if v.startswith(prefix)), "")


def _loaded_libraries() -> dict[str, Path]:
    """The shared libraries of this process, each under its file name and under its soname where the two differ."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return {}
    columns = (line.split(maxsplit=5) for line in lines)
    paths = dict.fromkeys(Path(c[5]) for c in columns if len(c) == 6 and c[5].startswith("/") and ".so" in c[5])
    loaded: dict[str, Path] = {}
    for path in paths:
        loaded.setdefault(path.name, path)
        soname = _soname(path) if not path.name.endswith(".so") else None
        if soname is not None:
            loaded.setdefault(soname, path)
    return loaded


@functools.cache
def _soname(path: Path) -> str | None:
    try:
        return open_elf(path).soname
    except (OSError, ElfError, ValueError):
        return None


@functools.cache
def _default_cache() -> dict[str, tuple[Path, ...]]:
    return _read_cache(_CACHE_FILE)


def current_linker() -> Linker:
    """The dynamic linker's view of this process, now."""
    text = _start_environment("LD_LIBRARY_PATH")
    machine = os.uname().machine
    names = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", f"/lib/{machine}-linux-gnu", f"/usr/lib/{machine}-linux-gnu")
    return Linker(
        library_path=tuple(folder or "." for folder in text.replace(";", ":").split(":")) if text else (),
        default_folders=tuple(Path(name) for name in names),
        cache=_default_cache(),
        loaded=_loaded_libraries(),
    )


@dataclass(frozen=True)
class Resolution:
    """The files that a library and its dependencies need: found ones, and who misses what."""

    found: Mapping[str, Path]
    missing: tuple[tuple[str, Path], ...]


def resolve(library: ElfFile, path: Path, linker: Linker) -> Resolution:
    """Walk the dependencies breadth first, as the dynamic linker does. At most MAX_LIBRARIES of them."""
    found: dict[str, Path] = {}
    missing: list[tuple[str, Path]] = []
    queue: list[tuple[ElfFile, Path, tuple[str, ...]]] = [(library, path, ())]
    while queue and len(found) < MAX_LIBRARIES:
        elf, place, inherited = queue.pop(0)
        # DT_RPATH also serves the dependencies of who names it; DT_RUNPATH serves its owner alone.
        origin = place.parent.resolve()
        rpath = () if elf.runpath else (*(_expand(folder, origin) for folder in elf.rpath), *inherited)
        for name in elf.needed:
            if name in found:
                continue
            file = linker.find(name, elf.machine_number, origin, rpath, elf.runpath)
            if file is None:
                missing.append((name, place))
                continue
            found[name] = file
            if name not in linker.loaded:
                try:
                    queue.append((open_elf(file), file, rpath))
                except (OSError, ElfError, ValueError):
                    missing.append((name, place))
    return Resolution(found, tuple(missing))
