"""The checks that a manifest and its library must pass before anything of the library runs: a Refusal or None each.

Fourth stage of the host side: after search, manifest and ELF reading; before the trial load and dlopen.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from plugin_abi.elf import Defect, ElfError, ElfFile, machine_number
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.frameworks import RunningFramework, compilers_of, cxx11_abi_of, detect
from plugin_abi.initializers import foreign_initializers
from plugin_abi.libraries import Linker, Resolution, open_elf, resolve
from plugin_abi.manifest import Binding, FrameworkRequirement, Manifest, PythonAbi, absence
from plugin_abi.versions import AbiRange, AbiVersion, release_tuple

ENTRY_SYMBOL: Final = "flagos_plugin_entry"
HOST_ABI: Final = AbiRange(AbiVersion(1, 0), AbiVersion(1, 0))
INITIALIZERS_VARIABLE: Final = "FLAGOS_STATIC_INITIALIZERS"
MAX_LIBRARY_BYTES: Final = 4 << 30

_DEFECTS: Final = {
    Defect.NOT_ELF: RefusalCode.LIBRARY_NOT_ELF,
    Defect.TRUNCATED: RefusalCode.LIBRARY_TRUNCATED,
    Defect.MALFORMED: RefusalCode.LIBRARY_MALFORMED,
    Defect.NOT_64_LITTLE: RefusalCode.WRONG_ARCHITECTURE,
}
_GLIBC_VERSION: Final = re.compile(r"GLIBC_([0-9]+(?:\.[0-9]+)*)")
_REBUILD: Final = "build the library and its manifest together again"


class StaticInitializers(Enum):
    """Whether code of a library may run at dlopen, before its entry: as its manifest declares, or never."""

    DECLARED = "declared"
    NEVER = "never"


@dataclass(frozen=True)
class Policy:
    """What the host is and what it allows; the defaults are this process."""

    linker: Linker
    abi: AbiRange = HOST_ABI
    machine: str = field(default_factory=lambda: os.uname().machine)
    python_version: str = field(default_factory=platform.python_version)
    static_initializers: StaticInitializers = StaticInitializers.DECLARED
    #: What front ends know of the frameworks they serve; for all others detect() reads it from the installation.
    frameworks: tuple[RunningFramework, ...] = ()

    def framework(self, name: str) -> RunningFramework | None:
        return next((known for known in self.frameworks if known.name == name), None) or detect(name)


def static_initializers_policy(variables: Mapping[str, str]) -> StaticInitializers:
    """What FLAGOS_STATIC_INITIALIZERS says; anything but a known word is the stricter one."""
    value = variables.get(INITIALIZERS_VARIABLE, StaticInitializers.DECLARED.value).strip().lower()
    return StaticInitializers.DECLARED if value == StaticInitializers.DECLARED.value else StaticInitializers.NEVER


@dataclass(frozen=True)
class Library:
    """A library file that was read once; hash and ELF facts are of the same bytes."""

    path: Path
    elf: ElfFile
    sha256: str
    dependencies: Resolution


@dataclass(frozen=True)
class _Case:
    """What every check looks at."""

    manifest: Manifest
    library: Library
    policy: Policy

    def refuse(self, code: RefusalCode, fact: str, cure: str, cause: str = "") -> Refusal:
        return Refusal(code, fact, str(self.library.path), cure, cause)


# ---- Before the library is read ------------------------------------------------------------------------------------


def check_abi_range(manifest: Manifest, host: AbiRange) -> Refusal | None:
    """The ranges of host and backend must meet."""
    declared = manifest.abi_version
    return refuse_abi(declared, host, str(manifest.path))


def refuse_abi(declared: AbiRange, host: AbiRange, place: str, cause: str = "") -> Refusal | None:
    """A refusal where the two ranges do not meet."""
    fact = f"the backend speaks plugin ABI {declared}, this host speaks {host}"
    if declared.max < host.min:
        return Refusal(RefusalCode.ABI_TOO_OLD, fact, place, "install a newer build of the backend", cause)
    if declared.min > host.max:
        cure = "install a newer flagos, or an older build of the backend"
        return Refusal(RefusalCode.ABI_TOO_NEW, fact, place, cure, cause)
    return None


def locate(manifest: Manifest, linker: Linker) -> Path | Refusal:
    """The library file of a manifest: bare names as the dynamic linker finds them, relative ones from the manifest."""
    declared = manifest.library_path
    if not manifest.library_is_bare:
        path = manifest.path.parent / declared
    else:
        found = linker.find(declared, machine_number(os.uname().machine), manifest.path.parent, (), ())
        path = found if found is not None else Path(declared)
    try:
        if path.exists():
            return path
        cause = ""
    except OSError as error:
        cause = str(error)
    fact = f"library_path {declared!r} leads to {path}, which {absence(path)}"
    cure = "install the backend's library there, or correct library_path"
    if manifest.library_is_bare:
        fact = f"the dynamic linker's folders have no library {declared!r}"
        if (manifest.path.parent / declared).exists():
            cure = f"write library_path as './{declared}' to name the file beside the manifest"
    return Refusal(RefusalCode.LIBRARY_NOT_FOUND, fact, str(manifest.path), cure, cause)


def read_library(path: Path, linker: Linker) -> Library | Refusal:
    """Read a library's bytes once, for its hash and its ELF facts."""

    def refuse(code: RefusalCode, fact: str, cure: str, cause: str = "", error: Exception | None = None) -> Refusal:
        return Refusal(code, fact, str(path), cure, cause, error)

    try:
        if not path.is_file():
            return refuse(RefusalCode.LIBRARY_UNREADABLE, "it is not a regular file", "correct library_path")
        if path.stat().st_size > MAX_LIBRARY_BYTES:
            return refuse(RefusalCode.LIBRARY_MALFORMED, f"it has more than {MAX_LIBRARY_BYTES} bytes", _REBUILD)
        data = path.read_bytes()
    except OSError as error:
        cure = "make the library readable to this user"
        return refuse(RefusalCode.LIBRARY_UNREADABLE, "the library cannot be read", cure, str(error), error)
    try:
        elf = ElfFile(data)
        sha256 = hashlib.sha256(data).hexdigest()
        if elf.is_shared_library and elf.machine == os.uname().machine:
            return Library(path, elf, sha256, resolve(elf, path, linker))
        return Library(path, elf, sha256, Resolution({}, ()))
    except ElfError as error:
        cure = "install a complete build of the library for this machine"
        return refuse(_DEFECTS[error.defect], str(error), cure, error=error)


# ---- The library against its manifest ------------------------------------------------------------------------------


def _check_kind(case: _Case) -> Refusal | None:
    if case.library.elf.is_shared_library:
        return None
    fact = f"it is an ELF file of type {case.library.elf.type}, not a shared library"
    return case.refuse(RefusalCode.LIBRARY_NOT_SHARED, fact, "link it with -shared")


def _check_architecture(case: _Case) -> Refusal | None:
    built, declared, here = case.library.elf.machine, case.manifest.library_arch, case.policy.machine
    if built == declared == here:
        return None
    fact = f"the library is for {built}, its manifest says {declared}, this process is {here}"
    return case.refuse(RefusalCode.WRONG_ARCHITECTURE, fact, f"install the backend's build for {here}")


def _check_sha256(case: _Case) -> Refusal | None:
    declared = case.manifest.sha256
    if declared is None or declared == case.library.sha256:
        return None
    fact = f"its SHA-256 is {case.library.sha256}, the manifest says {declared}"
    return case.refuse(RefusalCode.SHA256_MISMATCH, fact, "install the backend again: library or manifest was changed")


def _check_entry(case: _Case) -> Refusal | None:
    if ENTRY_SYMBOL in case.library.elf.exported:
        return None
    return case.refuse(
        RefusalCode.ENTRY_MISSING,
        f"it does not export {ENTRY_SYMBOL}",
        f"export {ENTRY_SYMBOL} with C linkage and default visibility",
    )


def _check_exports(case: _Case) -> Refusal | None:
    extra = sorted(set(case.library.elf.exported) - {ENTRY_SYMBOL})
    if not extra:
        return None
    shown = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
    return case.refuse(
        RefusalCode.EXTRA_EXPORTS,
        f"besides {ENTRY_SYMBOL} it exports {shown}",
        f"link it with a version script: {{ global: {ENTRY_SYMBOL}; local: *; }};",
    )


def _check_initializers(case: _Case) -> Refusal | None:
    found = foreign_initializers(case.library.elf)
    declared = case.manifest.static_initializers
    allowed = declared if case.policy.static_initializers is StaticInitializers.DECLARED else 0
    if len(found) <= allowed:
        return None
    shown = ", ".join(found[:3]) + ("" if len(found) <= 3 else ", …")
    cure = "remove the static constructors, or declare their number as static_initializers in the manifest"
    if len(found) <= declared:
        cure = f"unset {INITIALIZERS_VARIABLE}, or set it to {StaticInitializers.DECLARED.value}"
    fact = f"loading it would run {len(found)} static initializers ({shown}); {allowed} are allowed"
    return case.refuse(RefusalCode.STATIC_INITIALIZER, fact, cure)


def _check_compiler(case: _Case) -> Refusal | None:
    declared, found = case.manifest.built_with.compiler, compilers_of(case.library.elf)
    if declared in found:
        return None
    fact = f"its .comment names {', '.join(found) or 'no known compiler'}, the manifest says {declared}"
    return case.refuse(RefusalCode.COMPILER_MISMATCH, fact, _REBUILD)


def _abi_name(value: bool | None) -> str:
    return {True: "the C++11 ABI", False: "the old ABI", None: "no C++"}[value]


def _check_cxx11_abi(case: _Case) -> Refusal | None:
    declared, found = case.manifest.built_with.cxx11_abi, cxx11_abi_of(case.library.elf)
    if found is None or found == declared:
        return None
    fact = f"its symbols are of {_abi_name(found)} (_GLIBCXX_USE_CXX11_ABI={int(found)}), the manifest says "
    return case.refuse(RefusalCode.CXX11_ABI_MISMATCH, fact + _abi_name(declared), _REBUILD)


def _check_dependencies(case: _Case) -> Refusal | None:
    missing = case.library.dependencies.missing
    if not missing:
        return None
    shown = ", ".join(f"{name} (needed by {owner.name})" for name, owner in missing)
    cure = "install what provides it, or add its folder to LD_LIBRARY_PATH before the process starts"
    return case.refuse(RefusalCode.DEPENDENCY_MISSING, f"the dynamic linker would not find {shown}", cure)


def _check_symbol_versions(case: _Case) -> Refusal | None:
    for need in case.library.elf.version_needs:
        path = case.library.dependencies.found.get(need.library)
        if path is None:
            continue
        try:
            provided = set(open_elf(path).version_definitions)
        except (OSError, ElfError) as error:
            return case.refuse(
                RefusalCode.DEPENDENCY_MISSING, f"{path} cannot be read", "install that library again", str(error)
            )
        absent = sorted(set(need.versions) - provided, key=lambda name: release_tuple(name.rpartition("_")[2]))
        if absent:
            return _refuse_version(case, need.library, path, absent[-1], provided)
    return None


def _refuse_version(case: _Case, library: str, path: Path, absent: str, provided: Iterable[str]) -> Refusal:
    family = absent.rpartition("_")[0]
    versions = [name for name in provided if name.rpartition("_")[0] == family]
    newest = max(versions, key=lambda name: release_tuple(name.rpartition("_")[2]), default="none")
    fact = f"it needs {absent} of {library}; {path} provides up to {newest}"
    if _GLIBC_VERSION.fullmatch(absent):
        cure = f"install a build of the backend for {newest.replace('_', ' ')} or older, or a newer system"
        return case.refuse(RefusalCode.GLIBC_TOO_OLD, fact, cure)
    return case.refuse(RefusalCode.SYMBOL_VERSION_MISSING, fact, f"install a newer {library}")


# ---- The running process against the manifest ----------------------------------------------------------------------


def _check_python(case: _Case) -> Refusal | None:
    requirement = case.manifest.built_with.python
    if requirement.abi is PythonAbi.NONE or requirement.version is None:
        return None
    if case.policy.python_version in requirement.version:
        return None
    fact = f"this is Python {case.policy.python_version}, the backend runs on {requirement.version}"
    return case.refuse(RefusalCode.PYTHON_VERSION, fact, "use one of those Python versions")


def _check_frameworks(case: _Case) -> Refusal | None:
    for requirement in case.manifest.built_with.frameworks:
        running = case.policy.framework(requirement.name)
        if running is None:
            if not requirement.required:
                continue
            fact = f"the backend needs {requirement.name}, which is not installed"
            return case.refuse(RefusalCode.FRAMEWORK_MISSING, fact, f"install {requirement.name}")
        refusal = _check_framework(case, requirement, running)
        if refusal is not None:
            return refusal
    return None


def _check_framework(case: _Case, needed: FrameworkRequirement, running: RunningFramework) -> Refusal | None:
    name, place = needed.name, running.place or "this process"
    if not _revision_fits(needed, running):
        wanted = " or ".join(
            ([f"a version {needed.version}"] if needed.version is not None else [])
            + ([f"git revision {', '.join(needed.git_revision)}"] if needed.git_revision else [])
        )
        fact = (
            f"the running {name} is version {running.version or 'unknown'}, git revision "
            f"{running.git_revision or 'unknown'} ({place}); the backend was built for {wanted}"
        )
        return case.refuse(RefusalCode.FRAMEWORK_REVISION, fact, f"install a matching {name} or build of the backend")
    reason = " and links against its C++" if needed.binding is Binding.CXX else ""
    if needed.compiler is not None and needed.compiler != running.compiler:
        built = running.compiler or "a compiler that is not known"
        fact = f"the running {name} ({place}) was built with {built}; the backend wants {needed.compiler}{reason}"
        return case.refuse(RefusalCode.FRAMEWORK_COMPILER, fact, f"build the backend with the compiler of {name}")
    if needed.cxx11_abi is not None and needed.cxx11_abi != running.cxx11_abi:
        fact = (
            f"the running {name} ({place}) uses {_abi_name(running.cxx11_abi)}; "
            f"the backend wants {_abi_name(needed.cxx11_abi)}{reason}"
        )
        cure = f"build the backend with the _GLIBCXX_USE_CXX11_ABI of {name}"
        return case.refuse(RefusalCode.FRAMEWORK_CXX11_ABI, fact, cure)
    return None


def _revision_fits(needed: FrameworkRequirement, running: RunningFramework) -> bool:
    if needed.version is None and not needed.git_revision:
        return True
    if needed.version is not None and running.version is not None and running.version in needed.version:
        return True
    actual = running.git_revision
    return actual is not None and any(actual.startswith(wanted) for wanted in needed.git_revision)


# ---- All of them ---------------------------------------------------------------------------------------------------

#: In the order in which a person would want to hear of them: what it is, whether it is intact, what it would do,
#: whether it fits this machine, whether it fits these frameworks.
_CHECKS: Final[tuple[Callable[[_Case], Refusal | None], ...]] = (
    _check_architecture,
    _check_kind,
    _check_sha256,
    _check_entry,
    _check_exports,
    _check_initializers,
    _check_compiler,
    _check_cxx11_abi,
    _check_dependencies,
    _check_symbol_versions,
    _check_python,
    _check_frameworks,
)


def examine(manifest: Manifest, policy: Policy) -> Library | Refusal:
    """All checks that need no code of the library to run. Never raises for what the files contain."""
    refusal = check_abi_range(manifest, policy.abi)
    if refusal is not None:
        return refusal
    path = locate(manifest, policy.linker)
    if isinstance(path, Refusal):
        return path
    library = read_library(path, policy.linker)
    if isinstance(library, Refusal):
        return library
    case = _Case(manifest, library, policy)
    try:
        return next(filter(None, (check(case) for check in _CHECKS)), library)
    except ElfError as error:
        return case.refuse(_DEFECTS[error.defect], str(error), "install a complete build of the library")
