"""The checks that a manifest and its library must pass before anything of the library runs: a Refusal or None each.

Fourth stage of the host side: after search, manifest and ELF reading; before the trial load and dlopen.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from plugin_abi.elf import ElfFile
from plugin_abi.elf_format import Defect, ElfError, machine_number
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.files import NotRegularError, OpenFile, absence, exists, real_path
from plugin_abi.frameworks import RunningFramework, compilers_of, cxx11_abi_of, detect
from plugin_abi.initializers import foreign_initializers
from plugin_abi.libraries import Linker, Resolution, UnusableLibrary, open_elf, resolve
from plugin_abi.linkage import faults
from plugin_abi.manifest import Binding, FrameworkRequirement, Manifest, PythonAbi
from plugin_abi.versions import AbiRange, AbiVersion, release_tuple

ENTRY_SYMBOL: Final = "flagos_plugin_entry"
HOST_ABI: Final = AbiRange(AbiVersion(1, 0), AbiVersion(1, 0))
INITIALIZERS_VARIABLE: Final = "FLAGOS_STATIC_INITIALIZERS"
#: Its hash is made at each start; what a backend has beyond code belongs into its resource_dir.
MAX_LIBRARY_BYTES: Final = 1 << 30

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
    """A library file that was opened once: hash and ELF facts are of that file, and it is what will be loaded."""

    path: Path
    file: OpenFile
    elf: ElfFile
    dependencies: Resolution

    @property
    def sha256(self) -> str:
        return self.file.sha256

    @property
    def files(self) -> tuple[OpenFile, ...]:
        """The library's file and those of the dependencies that are loaded with it, which are open too."""
        held = (dependency.elf.file for dependency in self.dependencies.first if dependency.elf is not None)
        return (self.file, *(file for file in held if isinstance(file, OpenFile)))

    def refuse_change(self) -> Refusal | None:
        """A refusal where one of the files was written to since it was opened: what was checked is not there now."""
        changed = next((file for file in self.files if not file.is_unchanged()), None)
        if changed is None:
            return None
        fact = f"{changed.path} was written to while it was being checked"
        cure = "start again when its installation has ended; install libraries by renaming them into place"
        return Refusal(RefusalCode.LIBRARY_CHANGED, fact, str(self.path), cure)


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
        try:
            found = linker.find(declared, machine_number(os.uname().machine), manifest.path.parent, (), ())
        except UnusableLibrary as error:
            cure = f"install the backend's library as {declared}"
            return Refusal(RefusalCode.LIBRARY_UNREADABLE, str(error), str(manifest.path), cure)
        path = found.path if found is not None else Path(declared)
    try:
        path.stat()
        return path
    except PermissionError as error:
        fact = f"library_path {declared!r} leads to {path}, which this user may not reach"
        cure = "make the library readable to this user"
        return Refusal(RefusalCode.LIBRARY_UNREADABLE, fact, str(manifest.path), cure, str(error), error)
    except (OSError, ValueError) as error:
        cause = "" if isinstance(error, FileNotFoundError) else str(error)
    fact = f"library_path {declared!r} leads to {path}, which {absence(path)}"
    cure = "install the backend's library there, or correct library_path"
    if manifest.library_is_bare:
        fact = f"the dynamic linker's folders have no library {declared!r}"
        if exists(manifest.path.parent / declared):
            cure = f"write library_path as './{declared}' to name the file beside the manifest"
    return Refusal(RefusalCode.LIBRARY_NOT_FOUND, fact, str(manifest.path), cure, cause)


def read_library(path: Path, linker: Linker) -> Library | Refusal:
    """Open a library once, for its ELF facts, its hash and the load."""

    def refuse(code: RefusalCode, fact: str, cure: str, cause: str = "", error: Exception | None = None) -> Refusal:
        return Refusal(code, fact, str(path), cure, cause, error)

    try:
        file = OpenFile(path)
        if file.size > MAX_LIBRARY_BYTES:
            fact = f"it has {file.size} bytes, more than {MAX_LIBRARY_BYTES}"
            return refuse(RefusalCode.LIBRARY_MALFORMED, fact, "install a complete build of the library, or strip it")
        elf = ElfFile(file)
        if elf.is_shared_library and elf.machine == os.uname().machine:
            return Library(path, file, elf, resolve(elf, path, linker))
        return Library(path, file, elf, Resolution({}, ()))
    except ElfError as error:
        cure = "install a complete build of the library for this machine"
        return refuse(_DEFECTS[error.defect], str(error), cure, error=error)
    except NotRegularError as error:
        return refuse(RefusalCode.LIBRARY_UNREADABLE, "it is not a regular file", "correct library_path", error=error)
    except (OSError, ValueError) as error:
        cure = "make the library readable to this user"
        return refuse(RefusalCode.LIBRARY_UNREADABLE, "the library cannot be read", cure, str(error), error)


# ---- The library against its manifest ------------------------------------------------------------------------------


def _check_resource_dir(case: _Case) -> Refusal | None:
    """A backend reads its other files from where it was installed: below the folder that holds the folder of its
    manifest, or that of its library."""
    declared, manifest = case.manifest.resource_dir, case.manifest.path
    if declared is None:
        return None
    real = Path(real_path(declared))
    trees = [Path(real_path(file)).parent for file in (manifest, case.library.path)]
    # The root is no installation's own.
    trees = [tree.parent if tree.parent != tree.parent.parent else tree for tree in trees]
    fact = f"its resource_dir {declared}"
    # Path.is_dir raises where this user may not look.
    if not os.path.isdir(real) or not os.access(real, os.R_OK | os.X_OK):  # noqa: PTH112
        fact += " is no folder that this user may read"
        cure = "install the backend's files there, or correct resource_dir"
    elif not any(real.is_relative_to(tree) for tree in trees):
        fact += f" leads to {real}, outside {' and '.join(map(str, dict.fromkeys(trees)))}"
        cure = "install the backend's files beside its library or its manifest"
    else:
        return None
    return Refusal(RefusalCode.RESOURCE_DIR_UNUSABLE, fact, str(manifest), cure)


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


def _check_linkage(case: _Case) -> Refusal | None:
    fault = next(faults(case.library.elf), None)
    return case.refuse(fault.code, fault.fact, fault.cure) if fault is not None else None


def _check_own_dependencies(case: _Case) -> Refusal | None:
    """What a backend brings along is held to the same rules as its library."""
    circular = case.library.dependencies.circular
    if circular:
        fact = f"{', '.join(circular)} need each other, so that none can be loaded before the others"
        return case.refuse(RefusalCode.UNCHECKED_LOAD, fact, "let their links form no circle")
    for dependency, elf in case.library.dependencies.own:
        try:
            fault = next(faults(elf), None)
        except ElfError as error:
            return case.refuse(_DEFECTS[error.defect], f"{dependency.path}: {error}", "install that library again")
        if fault is not None:
            return case.refuse(fault.code, f"{dependency.path}: {fault.fact}", fault.cure)
    return None


def load_time_code(elf: ElfFile, dependencies: Resolution) -> tuple[str, ...]:
    """What loading a library would run of it and of the dependencies that are its own, beyond the compiler's own."""
    own = ((d.name, name) for d, own in dependencies.own for name in foreign_initializers(own))
    return (*foreign_initializers(elf), *(f"{name} of {library}" for library, name in own))


def _check_initializers(case: _Case) -> Refusal | None:
    found = load_time_code(case.library.elf, case.library.dependencies)
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
    reasons = case.library.dependencies.reasons
    shown = ", ".join(
        f"{name} (needed by {owner.name}{'; ' + reasons[name] if name in reasons else ''})" for name, owner in missing
    )
    cure = "install what provides it, or add its folder to LD_LIBRARY_PATH before the process starts"
    return case.refuse(RefusalCode.DEPENDENCY_MISSING, f"the dynamic linker would not find {shown}", cure)


def _check_symbol_versions(case: _Case) -> Refusal | None:
    for need in case.library.elf.version_needs:
        path = case.library.dependencies.found.get(need.library)
        if path is None:
            continue
        try:
            provided = set(open_elf(path).version_definitions)
        except (OSError, ValueError) as error:
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
    _check_linkage,
    _check_sha256,
    _check_entry,
    _check_exports,
    _check_dependencies,
    _check_own_dependencies,
    _check_initializers,
    _check_compiler,
    _check_cxx11_abi,
    _check_symbol_versions,
    _check_resource_dir,
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
    except OSError as error:
        cure = "make the library readable to this user"
        return case.refuse(RefusalCode.LIBRARY_UNREADABLE, "the library cannot be read", cure, str(error))
