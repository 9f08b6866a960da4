"""Builds real backends with the system's compiler, sound or with the defects that a test asks for, and manifests."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugin_abi.search import SearchEnvironment

FIXTURES = Path(__file__).parent / "fixtures"
SAMPLE = Path(__file__).parents[3] / "tools" / "sample_backend" / "src"
#: The minimal backend: the sample's device and buffers with a program of its own, and an entry that has the defects.
MINIMAL = ("objects.c", "device.c", "buffer.c", "minimal_program.c", "minimal_entry.c")
INCLUDE = Path(__file__).parents[3] / "plugin_abi" / "include"
MARKER_VARIABLE = "FLAGOS_TEST_MARKER"
GIT_REVISION = "0123456789abcdef0123456789abcdef01234567"


def source_path(name: str) -> Path:
    """Where a source of the fixtures or of the sample backend lies."""
    fixture = FIXTURES / name
    return fixture if fixture.exists() else SAMPLE / name


def _version_of(compiler: str) -> str:
    done = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@dataclass
class Toolchain:
    """The system's C compiler, with a cache of what it has compiled."""

    folder: Path
    version: str = field(default_factory=lambda: _version_of("gcc"))
    glibc: str = field(default_factory=lambda: platform.libc_ver()[1])

    @property
    def compiler(self) -> str:
        return f"gcc {self.version}"

    def build(
        self,
        sources: tuple[str, ...] = MINIMAL,
        flags: tuple[str, ...] = (),
        **defines: str | int,
    ) -> Path:
        """A shared library of sources of the fixtures or the sample; defines are given by their names in lower case,
        without SAMPLE_, strings quoted."""
        defines = {"name": "minimal", "git_revision": GIT_REVISION, **defines}
        defines = {"compiler": self.compiler, "glibc": self.glibc, **defines}
        key = hashlib.sha256(repr((sources, flags, sorted(defines.items()))).encode()).hexdigest()[:16]
        library = self.folder / key / "libminimal.so"
        if library.exists():
            return library
        library.parent.mkdir(parents=True)
        quoted = [
            f"-DSAMPLE_{name.upper()}=" + (f'"{value}"' if isinstance(value, str) else str(value))
            for name, value in defines.items()
        ]
        linker = "g++" if any(source.endswith(".cc") for source in sources) else "gcc"
        objects = []
        for source in sources:
            target = library.parent / f"{source}.o"
            compiler = ["g++", "-std=c++17"] if source.endswith(".cc") else ["gcc", "-std=c11"]
            options = ["-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-fvisibility=hidden", f"-I{INCLUDE}"]
            options += [f"-I{FIXTURES}", f"-I{SAMPLE}", '-DSAMPLE_KIND="minimal"', *quoted]
            options += [flag for flag in flags if not flag.startswith(("-Wl,", "-l", "-L"))]
            files = ["-c", str(source_path(source)), "-o", str(target)]
            subprocess.run([*compiler, *options, *files], check=True)
            objects.append(str(target))
        link_flags = [flag for flag in flags if not flag.startswith("-D")]
        subprocess.run([linker, "-shared", *objects, "-o", str(library), *link_flags], check=True)
        return library

    def build_hostile(self) -> Path:
        """The minimal backend that also does what a program "try DEED" asks for."""
        return self.build((*MINIMAL, "hostile_deeds.c"), hostile=1)


def manifest_fields(toolchain: Toolchain) -> dict[str, Any]:
    """The fields of the manifest that fits the minimal backend as it is compiled without defines."""
    return {
        "file_format_version": "1.0.0",
        "name": "minimal",
        "platform": "flagos",
        "version": "0.1.0",
        "library_path": "./libminimal.so",
        "library_arch": os.uname().machine,
        "abi_version": {"min": "1.0", "max": "1.0"},
        "built_with": {
            "git_revision": GIT_REVISION,
            "compiler": toolchain.compiler,
            "cxx11_abi": None,
            "glibc": toolchain.glibc,
            "python": {"abi": "none"},
        },
    }


@dataclass(frozen=True)
class Plugins:
    """Puts plugins into folders of a test, each with its own copy of a library."""

    toolchain: Toolchain
    folder: Path

    @property
    def marker(self) -> Path:
        """Written by any code of a plugin that runs: one line, what and in which process."""
        return self.folder / "marker"

    def ran(self) -> list[tuple[str, int]]:
        """What ran of the plugins so far, each with its process."""
        if not self.marker.exists():
            return []
        return [(what, int(process)) for what, process in map(str.split, self.marker.read_text().splitlines())]

    def fields(self, **changes: Any) -> dict[str, Any]:
        """The manifest's fields with changes; `built_with__glibc` means the field glibc inside built_with."""
        fields = copy.deepcopy(manifest_fields(self.toolchain))
        for path, value in changes.items():
            *parents, name = path.split("__")
            place = fields
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = value
        return fields

    def add(
        self, name: str = "50_minimal", library: Path | bytes | None = None, folder: str = "backend.d", **changes: Any
    ) -> Path:
        """Write one plugin: NAME.json and lib-NAME.so in a folder. Gives the manifest's path."""
        place = self.folder / folder
        place.mkdir(parents=True, exist_ok=True)
        target = place / f"lib-{name}.so"
        if isinstance(library, bytes):
            target.write_bytes(library)
        else:
            shutil.copy(self.toolchain.build() if library is None else library, target)
        path = place / f"{name}.json"
        path.write_text(json.dumps(self.fields(**{"library_path": f"./{target.name}", **changes})))
        return path

    def environment(self, **variables: str) -> SearchEnvironment:
        """A search that sees this test's folders alone: variables, user, package and system folders."""
        return SearchEnvironment(
            variables={
                "FLAGOS_DRIVER_FILES": str(self.folder / "backend.d"),
                "HOME": str(self.folder / "home"),
                **variables,
            },
            privileged=False,
            package_folders=lambda: (self.folder / "package" / "manifests",),
            system_folders=(self.folder / "etc", self.folder / "usr"),
        )
