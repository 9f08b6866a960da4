"""Targets of the host side: what reads manifests, libraries, a trial's answer, and verdicts that are kept."""

from __future__ import annotations

import functools
import json
import os
import random
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from plugin_abi import trial
from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import ElfError
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.frameworks import compilers_of, cxx11_abi_of
from plugin_abi.initializers import foreign_initializers
from plugin_abi.libraries import current_linker
from plugin_abi.linkage import faults
from plugin_abi.loader import unknown_fields_message
from plugin_abi.manifest import Manifest, parse_manifest, read_manifest
from plugin_abi.negotiation import judge
from plugin_abi.policy import locate, read_library
from plugin_abi.versions import AbiRange, AbiVersion
from tools.fuzz.hostile.libraries import changed_library, link, valid_libraries
from tools.fuzz.hostile.mutations import changed_json
from tools.fuzz.hostile.target import ACCEPTED, Target

_EXAMPLES: Final = Path(__file__).resolve().parents[3] / "manifests" / "examples"
_PLACE: Final = Path("/nowhere/90_hostile.json")
_HOST: Final = AbiRange(AbiVersion(1, 0), AbiVersion(1, 0))


@functools.cache
def _manifests() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(_EXAMPLES.glob("*.json")))


def _word(refusal: Refusal) -> str:
    # What is logged of it must be made, too.
    assert str(refusal)
    return refusal.code.name


def _take_manifest(data: bytes) -> str:
    result = parse_manifest(data, _PLACE)
    if isinstance(result, Refusal):
        return _word(result)
    unknown_fields_message(result)
    return ACCEPTED


# ---- Libraries ----

_READERS: Final[tuple[Callable[[ElfFile], Any], ...]] = (
    *(lambda elf: elf.segments, lambda elf: elf.sections, lambda elf: elf.needed, lambda elf: elf.soname),
    *(lambda elf: elf.rpath, lambda elf: elf.runpath, lambda elf: elf.exported, lambda elf: elf.version_needs),
    *(lambda elf: elf.version_definitions, lambda elf: elf.comments, lambda elf: elf.relocations),
    *(compilers_of, cxx11_abi_of, foreign_initializers),
)


def _take_library(data: bytes) -> str:
    defects = set()
    try:
        elf = ElfFile(data)
    except ElfError as error:
        return error.defect.value
    for reader in (*_READERS, lambda elf: list(faults(elf))):
        try:
            reader(elf)
        except ElfError as error:
            defects.add(error.defect.value)
    return "; ".join(sorted(defects)) or ACCEPTED


# ---- What a trial's child says, and verdicts ----


@functools.cache
def _manifest() -> Manifest:
    manifest = parse_manifest(_manifests()[0], _PLACE)
    assert isinstance(manifest, Manifest)
    return manifest


def _answers() -> list[bytes]:
    manifest, version = _manifest(), _HOST.min.number
    built = manifest.built_with
    info = {
        "name": manifest.name,
        "platform": manifest.platform,
        "version": manifest.version,
        "git_revision": "",
        "compiler": built.compiler,
        "glibc": built.glibc,
        "build_id": "",
        "python_abi": 1,
        "cxx11_abi": -1 if built.cxx11_abi is None else int(built.cxx11_abi),
    }
    args = {"version": version, "plugin_version_min": version, "plugin_version_max": version, "message": None}
    table = {"size": 1 << 12, "version": version, "empty": []}
    return [json.dumps({"status": 0, "args": args, "info": info, "table": table}).encode()]


def _take_answer(data: bytes) -> str:
    try:
        refusal = judge(trial._answer(data), _manifest(), _HOST, "a library")
    except trial._DAMAGED as error:
        return f"damaged: {type(error).__name__}"
    return ACCEPTED if refusal is None else _word(refusal)


def _verdicts() -> list[bytes]:
    refusal = Refusal(RefusalCode.ENTRY_CRASHED, "it crashed", "a library", "report it", "SIGSEGV")
    with tempfile.TemporaryDirectory() as folder:
        trial._keep(Path(folder), "bad", refusal)
        trial._keep(Path(folder), "good", None)
        return [(Path(folder) / f"{name}.json").read_bytes() for name in ("bad", "good")]


def _take_verdict(data: bytes) -> str:
    known, refusal = trial.read_verdict(data, "a library")
    if refusal is not None:
        _word(refusal)
    return ACCEPTED if known else "no verdict"


def _json_target(name: str, valid: Callable[[], Any], take: Callable[[bytes], str]) -> Target:
    kept = functools.cache(lambda: tuple(valid()))
    return Target(name, kept, lambda rng: changed_json(rng, rng.choice(kept())), take)


# ---- Files that are none ----

#: What may lie where a file is expected, by the name that an input gives it.
_THINGS: Final[dict[str, Callable[[Path], object]]] = {
    "nothing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "link to itself": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to(path.with_name("absent")),
    "link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "link to this process's memory": lambda path: path.symlink_to("/proc/self/mem"),
    "link to this process's messages": lambda path: path.symlink_to("/proc/kmsg"),
    "empty": lambda path: path.touch(),
    "sparse": lambda path: _sparse(path, b""),
    "sparse JSON": lambda path: _sparse(path, b"{"),
    "sparse library": lambda path: _sparse(path, valid_libraries()[0]),
    "a library": lambda path: path.write_bytes(valid_libraries()[0]),
    "text": lambda path: path.write_text("text"),
}
#: How the path to it is written.
_PATHS: Final[dict[str, Callable[[Path], Path]]] = {
    "plain": lambda path: path,
    "300 bytes": lambda path: path.with_name("x" * 300),
    "5000 bytes": lambda path: path.parent.joinpath(*["."] * 2, *["x" * 200] * 25),
    "a zero byte": lambda path: path.with_name("a\0b"),
    "no text": lambda path: path.with_name("\udcff"),
    "below a file": lambda path: path / "below",
    "up and down": lambda path: path.parent.joinpath(*[f"../{path.parent.name}"] * 300, path.name),
}


def _sparse(path: Path, start: bytes) -> None:
    path.write_bytes(start)
    os.truncate(path, 4 << 30)


def _as_manifest(path: Path) -> str:
    result = read_manifest(path)
    return _word(result) if isinstance(result, Refusal) else ACCEPTED


def _as_library(path: Path) -> str:
    linker = current_linker()
    for declared in (str(path), path.name):
        located = locate(replace(_manifest(), path=path.parent / "90.json", library_path=declared), linker)
        if isinstance(located, Refusal):
            _word(located)
    library = read_library(path, linker)
    return _word(library) if isinstance(library, Refusal) else ACCEPTED


def _as_dependency(path: Path) -> str:
    """The file beside a library that needs one of its name."""
    library = path.with_name("needs_it.so")
    library.write_bytes(_needs_a_file())
    result = read_library(library, current_linker())
    if isinstance(result, Refusal):
        return _word(result)
    missing = [name for name, _ in result.dependencies.missing if name == _THING]
    return "missing" if missing else ACCEPTED


@functools.cache
def _needs_a_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        link(Path(folder) / _THING, f"-Wl,-soname,{_THING}", "-DDEPENDENCY")
        target = Path(folder) / "needs_it.so"
        link(target, "-DDEPENDS", f"-L{folder}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-l:{_THING}")
        return target.read_bytes()


def _as_verdict(path: Path) -> str:
    known, _ = trial._recall(path.parent, path.name.removesuffix(".json"), "a library")
    return ACCEPTED if known else "no verdict"


_THING: Final = "thing.json"
_ROLES: Final[dict[str, Callable[[Path], str]]] = {
    "manifest": _as_manifest,
    "library": _as_library,
    "dependency": _as_dependency,
    "verdict": _as_verdict,
}


def file_input(thing: str, path: str, role: str) -> bytes:
    return json.dumps({"thing": thing, "path": path, "role": role}).encode()


def _make_file(rng: random.Random) -> bytes:
    role = rng.choice(list(_ROLES))
    # A manifest and a library are where somebody says; the others have names that the loader gives them.
    path = rng.choice(list(_PATHS)) if role in ("manifest", "library") and rng.randrange(2) else "plain"
    return file_input(rng.choice(list(_THINGS)), path, role)


def _take_file(data: bytes) -> str:
    asked = json.loads(data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _THING
        _THINGS[asked["thing"]](path)
        return _ROLES[asked["role"]](_PATHS[asked["path"]](path))


# ---- All of them ----

TARGETS: Final = (
    _json_target("manifest", _manifests, _take_manifest),
    Target("library", valid_libraries, changed_library, _take_library),
    _json_target("answer", _answers, _take_answer),
    _json_target("verdict", _verdicts, _take_verdict),
    Target("file", lambda: (file_input("a library", "plain", "library"),), _make_file, _take_file),
)
