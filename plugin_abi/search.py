"""Where manifests are looked for, in which order, and which of them the user's variables take out again.

First stage of the host side. Names and semantics of the variables follow the Vulkan loader's, with the prefix FLAGOS_.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fnmatch
import functools
import importlib.metadata
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plugin_abi.errors import Refusal, RefusalCode, printable
from plugin_abi.files import real_path
from plugin_abi.frameworks import package_folder
from plugin_abi.log import logger

FILES_VARIABLE: Final = "FLAGOS_DRIVER_FILES"
ADD_FILES_VARIABLE: Final = "FLAGOS_ADD_DRIVER_FILES"
SELECT_VARIABLE: Final = "FLAGOS_DRIVERS_SELECT"
DISABLE_VARIABLE: Final = "FLAGOS_DRIVERS_DISABLE"
ENTRY_POINT_GROUP: Final = "flagos.manifests"
_FOLDER: Final = Path("flagos/backend.d")
_SYSTEM_FOLDERS: Final = (Path("/etc") / _FOLDER, Path("/usr/share") / _FOLDER)
_AT_SECURE: Final = 23


class Origin(enum.Enum):
    """What led to a manifest."""

    REPLACED = FILES_VARIABLE
    ADDED = ADD_FILES_VARIABLE
    USER = "the user's configuration"
    PACKAGE = "an installed package"
    SYSTEM = "the system"
    ARGUMENT = "an argument"


@dataclass(frozen=True)
class Place:
    """A file or folder that is looked at."""

    path: Path
    origin: Origin


@dataclass(frozen=True)
class FoundManifest:
    """A manifest file that the search came upon; `refusal` says why it is left out, before it is even read."""

    path: Path
    origin: Origin
    refusal: Refusal | None = None


@dataclass(frozen=True)
class SearchResult:
    """The places that were looked at and the manifest files in them, both in order."""

    places: tuple[Place, ...]
    manifests: tuple[FoundManifest, ...]


@functools.cache
def is_privileged() -> bool:
    """Whether this process runs with rights that its user does not have: then no path variable of his is followed."""
    if os.getuid() != os.geteuid() or os.getgid() != os.getegid():
        return True
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return False
    getauxval.restype = ctypes.c_ulong
    getauxval.argtypes = (ctypes.c_ulong,)
    return bool(getauxval(_AT_SECURE))


@functools.cache
def package_manifest_folders() -> tuple[Path, ...]:
    """The folders `manifests` of packages that announce one (entry points flagos.manifests), found without imports.

    An entry point's value is the package's name. A source tree that is used in place announces nothing: its backend
    package is the sibling of this one.
    """
    folders = [*_announced_folders(), Path(__file__).parents[1] / "flagos_backend"]
    return tuple(dict.fromkeys(Path(os.path.realpath(folder / "manifests")) for folder in folders))


def _announced_folders() -> list[Path]:
    """What one package's metadata contains, or an import hook does with it, keeps no other from being found."""
    folders = []
    try:
        entries = sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: (e.name, e.value))
    except Exception as error:
        logger.warning("the packages that bring manifests cannot be listed: %s", printable(repr(error)))
        return []
    for entry in entries:
        try:
            folder = package_folder(entry.value)
        except Exception as error:
            logger.warning("the package %s cannot be found: %s", *map(printable, (entry.value, repr(error))))
            continue
        if folder is not None:
            folders.append(folder)
    return folders


@dataclass(frozen=True)
class SearchEnvironment:
    """What the search depends on besides the files: a value, so that a search can be told apart from its process."""

    variables: Mapping[str, str]
    privileged: bool
    package_folders: Callable[[], tuple[Path, ...]] = package_manifest_folders
    system_folders: tuple[Path, ...] = _SYSTEM_FOLDERS

    @classmethod
    def current(cls) -> SearchEnvironment:
        return cls(dict(os.environ), is_privileged())

    def path_variable(self, name: str) -> str:
        """A variable that names paths; empty in a privileged process."""
        value = self.variables.get(name, "")
        if value and self.privileged:
            logger.warning("%s is ignored: this process has rights that its user has not", name)
            return ""
        return value


def _listed(value: str, origin: Origin) -> list[Place]:
    return [Place(Path(entry), origin) for entry in value.split(os.pathsep) if entry]


def _user_folder(environment: SearchEnvironment) -> list[Place]:
    if environment.privileged:
        return []
    configured = environment.variables.get("XDG_CONFIG_HOME", "")
    home = environment.variables.get("HOME", "")
    # The XDG specification: a relative path there is invalid and is to be ignored.
    if configured.startswith("/"):
        return [Place(Path(configured) / _FOLDER, Origin.USER)]
    return [Place(Path(home) / ".config" / _FOLDER, Origin.USER)] if home.startswith("/") else []


def places(environment: SearchEnvironment) -> tuple[Place, ...]:
    """The files and folders to look at, first ones first."""
    replaced = environment.path_variable(FILES_VARIABLE)
    if replaced:
        if environment.variables.get(ADD_FILES_VARIABLE):
            logger.info("%s is ignored: %s is set", ADD_FILES_VARIABLE, FILES_VARIABLE)
        return tuple(_listed(replaced, Origin.REPLACED))
    return (
        *_listed(environment.path_variable(ADD_FILES_VARIABLE), Origin.ADDED),
        *_user_folder(environment),
        *(Place(folder, Origin.PACKAGE) for folder in environment.package_folders()),
        *(Place(folder, Origin.SYSTEM) for folder in environment.system_folders),
    )


def _files(place: Place) -> list[FoundManifest]:
    """The manifests of one place: a folder's *.json sorted by name, or the file itself, even when it is missing."""
    try:
        if not stat.S_ISDIR(place.path.stat().st_mode):
            return [FoundManifest(place.path, place.origin)]
        with os.scandir(place.path) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(".json"))
        return [FoundManifest(place.path / name, place.origin) for name in names]
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            named = place.origin in (Origin.REPLACED, Origin.ADDED)
            return [FoundManifest(place.path, place.origin)] if named else []
        cure = "make it readable to this user, or take it out of the search"
        fact = "the file or folder cannot be looked at"
        refusal = Refusal(RefusalCode.MANIFEST_UNREADABLE, fact, str(place.path), cure, str(error), error)
        return [FoundManifest(place.path, place.origin, refusal)]


def _globs(environment: SearchEnvironment, name: str) -> tuple[str, ...]:
    return tuple(glob.strip() for glob in environment.variables.get(name, "").split(",") if glob.strip())


def _chosen(found: FoundManifest, disabled: tuple[str, ...], selected: tuple[str, ...]) -> FoundManifest:
    """Apply the user's choice; disabling comes first."""
    name, place = found.path.name, str(found.path)
    glob = next((glob for glob in disabled if fnmatch.fnmatchcase(name, glob)), None)
    if glob is not None:
        fact = f"{DISABLE_VARIABLE} disables {name} with {glob!r}"
        refusal = Refusal(RefusalCode.DISABLED, fact, place, f"change or unset {DISABLE_VARIABLE}")
        return FoundManifest(found.path, found.origin, refusal)
    if selected and not any(fnmatch.fnmatchcase(name, glob) for glob in selected):
        fact = f"{SELECT_VARIABLE} selects {', '.join(selected)}, which leaves out {name}"
        refusal = Refusal(RefusalCode.NOT_SELECTED, fact, place, f"change or unset {SELECT_VARIABLE}")
        return FoundManifest(found.path, found.origin, refusal)
    return found


def find_manifests(environment: SearchEnvironment) -> SearchResult:
    """Look in every place. A file that is reached twice (by its real path) counts once, where it was found first."""
    disabled, selected = _globs(environment, DISABLE_VARIABLE), _globs(environment, SELECT_VARIABLE)
    looked = places(environment)
    seen: dict[str, Path] = {}
    manifests = []
    for place in looked:
        files = _files(place)
        logger.info("search: %s (%s): %d manifests", printable(str(place.path)), place.origin.value, len(files))
        for found in files:
            real = real_path(found.path)
            if real in seen:
                pair = printable(str(found.path)), printable(str(seen[real]))
                logger.info("duplicate: %s is %s, which was found before", *pair)
                continue
            seen[real] = found.path
            manifests.append(found if found.refusal is not None else _chosen(found, disabled, selected))
    return SearchResult(looked, tuple(manifests))
