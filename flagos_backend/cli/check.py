"""Say whether a manifest or a library would be accepted, and why not.

A library alone is compared with what it states itself: a refusal then is one that no manifest can repair.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path

from plugin_abi import loader, rights, trial
from plugin_abi.elf_format import ElfError
from plugin_abi.errors import Refusal, RefusalCode, printable
from plugin_abi.frameworks import compilers_of, cxx11_abi_of
from plugin_abi.libraries import current_linker
from plugin_abi.manifest import BuiltWith, Isolation, Manifest, PythonAbi, PythonRequirement, read_manifest
from plugin_abi.policy import HOST_ABI, Library, Policy, examine, read_library

_ELF_MAGIC = b"\x7fELF"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="MANIFEST|LIBRARY")


def run(options: argparse.Namespace) -> int:
    path: Path = options.path
    refusal = check_library(path) if _is_library(path) else _check_manifest(path)
    print(f"{path}: accepted" if refusal is None else f"{path}: refused\n  {refusal}")
    return 0 if refusal is None else 1


def _check_manifest(path: Path) -> Refusal | None:
    manifest = read_manifest(path)
    if isinstance(manifest, Manifest) and manifest.unknown_fields:
        print(loader.unknown_fields_message(manifest))
    refusal = loader.check(path)
    if isinstance(manifest, Manifest) and refusal is None and manifest.isolation is Isolation.PROCESS:
        print("\n".join(_process_of(manifest)))
    return refusal


def _process_of(manifest: Manifest) -> list[str]:
    """What its own process asks for, and what holds for it here."""
    asked = manifest.isolated
    limits = [f"{name} {value}" for name, value in asdict(asked.limits).items() if value is not None]
    needs = ", ".join(need.value for need in asked.needs) or "nothing"
    lines = [f"in a process of its own, which needs {needs}", *(["limits: " + ", ".join(limits)] if limits else [])]
    denied = ", ".join(trial.denied(manifest.path))
    lines += [f"in its trial it was denied: {denied}"] if denied else []
    return [f"  {line}" for line in (*lines, *rights.describe(os.environ))]


def _is_library(path: Path) -> bool:
    if path.suffix == ".json":
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_ELF_MAGIC)) == _ELF_MAGIC or ".so" in path.suffixes
    except OSError:
        return ".so" in path.suffixes


def check_library(path: Path) -> Refusal | None:
    """Every check of the loader that needs no code of the library, against the library's own facts; prints those."""
    linker = current_linker()
    library = read_library(path, linker)
    if isinstance(library, Refusal):
        return library
    try:
        manifest = _manifest_of(library)
        print(f"{path}: {library.elf.machine}, {', '.join(compilers_of(library.elf)) or 'no known compiler'}")
        print(f"  sha256    {library.sha256}")
        print(f"  exports   {printable(', '.join(sorted(library.elf.exported))) or 'nothing'}")
        print(f"  needs     {printable(', '.join(library.elf.needed)) or 'nothing'}")
    except ElfError as error:
        cure = "install a complete build of the library"
        return Refusal(RefusalCode.LIBRARY_MALFORMED, str(error), str(path), cure, exception=error)
    outcome = examine(manifest, Policy(linker=linker))
    return outcome if isinstance(outcome, Refusal) else None


def _manifest_of(library: Library) -> Manifest:
    """The manifest that agrees with everything the library's file states."""
    built_with = BuiltWith(
        compiler=next(iter(compilers_of(library.elf)), ""),
        cxx11_abi=cxx11_abi_of(library.elf),
        glibc="",
        python=PythonRequirement(PythonAbi.NONE),
    )
    path = library.path.resolve()
    return Manifest(
        path=path,
        format_version="1.0.0",
        name=path.stem,
        platform=loader.DEFAULT_PLATFORM,
        version="",
        library_path=str(path),
        library_arch=library.elf.machine,
        abi_version=HOST_ABI,
        built_with=built_with,
    )
