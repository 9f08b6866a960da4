"""What the running frameworks are: version, git revision, compiler and C++11 ABI, read without importing any of them.

Serves policy: the facts that a manifest's built_with.framework is compared with. Front ends may pass their own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plugin_abi.elf import ElfFile
from plugin_abi.libraries import open_elf

_VERSION: Final = r"([0-9]++(?:\.[0-9]++)++)"
#: A pattern tries one place after the other, or, in an atomic group, the first alone: never pairs of places, since what
#: stands in .comment is anybody's.
_COMPILERS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(rf"GCC: \(.*?\) {_VERSION}"), "gcc"),
    (re.compile(rf"GCC: \(.*\) {_VERSION}"), "gcc"),
    (re.compile(rf"Intel(?>.*? oneAPI )(?>.*?Compiler ){_VERSION}"), "icx"),
    (re.compile(rf"(?:.* )?clang version {_VERSION}"), "clang"),
    (re.compile(rf"rustc version {_VERSION}"), "rustc"),
)
_OLD_STRING: Final = re.compile(r"_ZNK?Ss|_Z.*RKSs")


@dataclass(frozen=True)
class RunningFramework:
    """Facts about a framework of this process. None: not known."""

    name: str
    version: str | None = None
    git_revision: str | None = None
    compiler: str | None = None
    cxx11_abi: bool | None = None
    #: Where the facts come from, for messages.
    place: str = ""


@dataclass(frozen=True)
class _Source:
    """Where an installed framework keeps its facts: inside its package, relative to the package's folder."""

    package: str
    version_file: str
    revision: re.Pattern[str]
    library: str | None


_GIT_HASH: Final = re.compile(r"^_git_hash\s*(?::[^=]*)?=\s*['\"]([0-9a-f]{7,64})['\"]", re.MULTILINE)
_SOURCES: Final[dict[str, _Source]] = {
    "jax": _Source("jax", "version.py", _GIT_HASH, None),
    "jaxlib": _Source("jaxlib", "version.py", _GIT_HASH, "libjax_common.so"),
    "torch": _Source(
        "torch",
        "version.py",
        re.compile(r"^git_version\s*(?::[^=]*)?=\s*['\"]([0-9a-f]{7,64})['\"]", re.MULTILINE),
        "lib/libc10.so",
    ),
}


def compilers_of(library: ElfFile) -> tuple[str, ...]:
    """The compilers that a library names in .comment, as manifests write them: "gcc 12.2.0", "clang 18.1.8"."""
    found: dict[str, None] = {}
    for comment in library.comments:
        for pattern, name in _COMPILERS:
            match = pattern.match(comment)
            if match is not None:
                found[f"{name} {match[1]}"] = None
                break
    return tuple(found)


def cxx11_abi_of(library: ElfFile) -> bool | None:
    """Which std::string its mangled names mean: True the C++11 one, False the old one, None: none is named.

    Only dynamic symbols count: a C++ runtime that is linked statically brings hidden names of both kinds.
    """
    names = [symbol.name for symbol in library.dynamic_symbols if symbol.name.startswith("_Z")]
    if any("__cxx11" in name or "B5cxx11" in name for name in names):
        return True
    return False if any(_OLD_STRING.match(name) for name in names) else None


def package_folder(name: str) -> Path | None:
    """The folder of a package, found without importing it or its parents; None where there is none."""
    top, *rest = name.split(".")
    module = sys.modules.get(top)
    locations = list(getattr(module, "__path__", ()))
    if not locations:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError, AttributeError):
            return None
        locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = (Path(location, *rest) for location in locations)
    return next((folder for folder in folders if folder.is_dir()), None)


def _library_facts(path: Path) -> tuple[str | None, bool | None]:
    try:
        library = open_elf(path)
        compilers = compilers_of(library)
        return (compilers[0] if compilers else None), cxx11_abi_of(library)
    except (OSError, ValueError):
        return None, None


def detect(name: str) -> RunningFramework | None:
    """The facts of an installed framework by its package's name; None where it is not installed. Imports nothing."""
    source = _SOURCES.get(name)
    folder = package_folder(source.package if source is not None else name)
    if folder is None:
        return None
    # What is imported is what runs, whatever the package's metadata says since.
    version = getattr(sys.modules.get(name), "__version__", None)
    if not isinstance(version, str):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
    if source is None:
        return RunningFramework(name, version, place=str(folder))
    try:
        match = source.revision.search((folder / source.version_file).read_text("utf-8", "replace"))
    except OSError:
        match = None
    compiler, cxx11_abi = (None, None) if source.library is None else _library_facts(folder / source.library)
    return RunningFramework(name, version, match[1] if match else None, compiler, cxx11_abi, str(folder))
