"""Which file the dynamic linker would take for a needed library, found without asking it (and so without loading).

Serves policy: dependencies that are missing, symbol versions that they do not provide, and which ones are the backend's
own. Source: ld.so(8).
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import Defect, ElfError
from plugin_abi.files import NotRegularError, OpenFile, real_path

_CACHE_FILE: Final = Path("/etc/ld.so.cache")
_CACHE_MAGIC: Final = b"glibc-ld.so.cache1.1"
_OLD_CACHE_MAGIC: Final = b"ld.so-1.7.0"
MAX_LIBRARIES: Final = 512


def open_elf(path: Path) -> ElfFile:
    """Open a library; of its file only what is asked for is read.

    Raises OSError or ValueError where the file cannot be opened and ElfError where it is no ELF64 file.
    """
    return ElfFile(OpenFile(path))


class UnusableLibrary(Exception):
    """A file that the dynamic linker would take and fail on, or wait for, rather than look further."""


@dataclass(frozen=True)
class Found:
    """The file for a needed name. `own`: the library that needs it says where it is, not the system or the user."""

    path: Path
    own: bool
    #: Open, unless the process has loaded it already.
    elf: ElfFile | None


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
    ) -> Found | None:
        """The file for a needed `name` of a library that lies in `origin`, or None. Raises UnusableLibrary."""
        if "/" in name:
            path = Path(_expand(name, origin))
            return self._found(path, machine, own=True)
        loaded = self.loaded.get(name)
        if loaded is not None and _answers_to(loaded, name):
            return Found(loaded, not self._is_system(loaded), None)
        for folders, own in ((rpath, True), (self.library_path, False), (runpath, True)):
            for folder in folders:
                found = self._found(Path(_expand(folder, origin)) / name, machine, own)
                if found is not None:
                    return found
        for path in (*self.cache.get(name, ()), *(folder / name for folder in self.default_folders)):
            found = self._found(path, machine, own=False)
            if found is not None:
                return found
        return None

    def _found(self, path: Path, machine: int, own: bool) -> Found | None:
        """The file at `path`, if the linker would take it: what it cannot open and what is for another architecture it
        passes over. Raises UnusableLibrary."""
        try:
            elf = open_elf(path)
        except ElfError as error:
            if error.defect is Defect.NOT_64_LITTLE:
                return None
            raise UnusableLibrary(f"{path} is no library: {error}") from error
        except NotRegularError as error:
            raise UnusableLibrary(f"{path} is not a regular file") from error
        except (OSError, ValueError):
            return None
        return Found(path, own and not self._is_system(path), elf) if elf.machine_number == machine else None

    def _is_system(self, path: Path) -> bool:
        """Whether a file is one that the system's own folders hold, whoever names it."""
        return path.parent in self._system_folders or Path(real_path(path.parent)) in self._system_folders

    @cached_property
    def _system_folders(self) -> frozenset[Path]:
        folders = {*self.default_folders, *(path.parent for paths in self.cache.values() for path in paths)}
        return frozenset(folders | {Path(real_path(folder)) for folder in folders})


def _expand(folder: str, origin: Path) -> str:
    for token in ("${ORIGIN}", "$ORIGIN"):
        folder = folder.replace(token, str(origin))
    for token in ("${LIB}", "$LIB"):
        folder = folder.replace(token, "lib64")
    return folder


#: Files that this process loaded by descriptor. The linker knows one that has no soname by no name but its path.
loaded_by_descriptor: set[Path] = set()


def _answers_to(loaded: Path, name: str) -> bool:
    """Whether the linker takes a loaded library for a needed name: by its soname, else by what it was loaded as."""
    soname = _soname(loaded)
    return loaded not in loaded_by_descriptor if soname is None else soname == name


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


@functools.lru_cache(maxsize=4096)
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
class Dependency:
    """A library that is to be loaded before those that need it, so that the linker looks for no file itself."""

    name: str
    path: Path
    #: Whether the backend's own folders lead to it, not the system's or the user's.
    own: bool
    #: Open; None: the process has it already.
    elf: ElfFile | None
    needed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolution:
    """The files that a library and its dependencies need: found ones, and who misses what."""

    found: Mapping[str, Path]
    missing: tuple[tuple[str, Path], ...]
    #: Why a missing one is missing, where there is a file of its name.
    reasons: Mapping[str, str] = field(default_factory=dict)
    #: The backend's own, and what it and they need of the system and is not loaded; each after those that it needs.
    first: tuple[Dependency, ...] = ()
    #: Those that need each other: no order serves them.
    circular: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[tuple[Dependency, ElfFile], ...]:
        """The backend's own that are not in the process yet."""
        return tuple((d, d.elf) for d in self.first if d.own and d.elf is not None)


def resolve(library: ElfFile, path: Path, linker: Linker) -> Resolution:
    """Walk the dependencies breadth first, as the dynamic linker does. At most MAX_LIBRARIES of them."""
    found: dict[str, Path] = {}
    first: list[Dependency] = []
    reasons: dict[str, str] = {}
    missing: list[tuple[str, Path]] = []
    queue: list[tuple[ElfFile, Path, tuple[str, ...], bool]] = [(library, path, (), True)]
    while queue:
        elf, place, inherited, is_own = queue.pop(0)
        # DT_RPATH also serves the dependencies of who names it; DT_RUNPATH serves its owner alone.
        origin = Path(real_path(place.parent))
        rpath = () if elf.runpath else (*(_expand(folder, origin) for folder in elf.rpath), *inherited)
        for name in elf.needed:
            if name in found or name in reasons:
                continue
            if len(found) == MAX_LIBRARIES:
                raise ElfError(Defect.MALFORMED, f"it needs more than {MAX_LIBRARIES} libraries")
            try:
                file = linker.find(name, elf.machine_number, origin, rpath, elf.runpath)
                needed = file.elf.needed if file is not None and file.elf is not None else ()
            except (OSError, UnusableLibrary, ElfError) as error:
                reasons[name], file, needed = str(error), None, ()
            if file is None:
                missing.append((name, place))
                continue
            found[name] = file.path
            if file.own or (is_own and file.elf is not None):
                first.append(Dependency(name, file.path, file.own, file.elf, needed))
            if file.elf is not None:
                queue.append((file.elf, file.path, rpath, file.own))
    return Resolution(found, tuple(missing), reasons, *_in_order(first))


def _in_order(dependencies: list[Dependency]) -> tuple[tuple[Dependency, ...], tuple[str, ...]]:
    """Dependencies so that each comes after those that it needs, and the names of those for which none is first."""
    ordered: list[Dependency] = []
    waiting = {dependency.name: dependency for dependency in dependencies}
    while ready := [d for d in waiting.values() if not any(n in waiting and n != d.name for n in d.needed)]:
        ordered += ready
        for dependency in ready:
            del waiting[dependency.name]
    return tuple(ordered), tuple(waiting)
