"""The script that describes a built library: what it writes is valid, true and accepted."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugin_abi import loader
from plugin_abi.manifest import Manifest, read_manifest
from unit.plugin_abi.load_time import own_library
from unit.plugin_abi.plugins import GIT_REVISION, Plugins, Toolchain

SCRIPT = Path(__file__).parents[3] / "manifests" / "write_manifest.py"


def _facts(toolchain: Toolchain) -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "git_revision": GIT_REVISION,
        "compiler": toolchain.compiler,
        "glibc": toolchain.glibc,
        "cxx11_abi": 1,
        "build_id": "a test",
    }


def _write(folder: Path, library: Path, facts: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "facts.json").write_text(json.dumps(facts))
    output = folder / "manifests" / "50_flagos.json"
    arguments = ["--facts", str(folder / "facts.json"), "--library", str(library), "--output", str(output), *more]
    # Isolated and without site-packages: a build has nothing but the standard library.
    return subprocess.run([sys.executable, "-I", "-S", str(SCRIPT), *arguments], capture_output=True, text=True)


def _library(plugins: Plugins, *flags: str) -> Path:
    built = plugins.toolchain.build(flags=flags, name="flagos", cxx11_abi=1, python_abi=1)
    library = plugins.folder / "lib" / "libflagos_backend.so"
    library.parent.mkdir()
    library.write_bytes(built.read_bytes())
    return library


def test_what_it_writes_is_true_and_accepted(plugins: Plugins) -> None:
    library = _library(plugins)
    done = _write(plugins.folder, library, _facts(plugins.toolchain))
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(plugins.folder / "manifests" / "50_flagos.json")
    assert isinstance(manifest, Manifest)
    assert manifest.library_path == "../lib/libflagos_backend.so"
    assert manifest.sha256 == hashlib.sha256(library.read_bytes()).hexdigest()
    assert (manifest.library_arch, manifest.static_initializers) == ("x86_64", 0)
    assert manifest.built_with.git_revision == GIT_REVISION
    assert {framework.name for framework in manifest.built_with.frameworks} == {"torch", "jax", "jaxlib"}
    environment = plugins.environment(FLAGOS_DRIVER_FILES=str(manifest.path))
    assert loader.check(manifest.path, environment=environment) is None


def test_a_library_beside_its_manifest_is_found(plugins: Plugins) -> None:
    library = _library(plugins)
    library = library.rename(plugins.folder / "libflagos_backend.so")
    output = plugins.folder / "50_flagos.json"
    assert _write(plugins.folder, library, _facts(plugins.toolchain), "--output", str(output)).returncode == 0
    assert loader.check(output, environment=plugins.environment(FLAGOS_DRIVER_FILES=str(output))) is None


def test_a_tree_without_a_revision_states_none(plugins: Plugins) -> None:
    assert _write(plugins.folder, _library(plugins), _facts(plugins.toolchain) | {"git_revision": ""}).returncode == 0
    manifest = read_manifest(plugins.folder / "manifests" / "50_flagos.json")
    assert isinstance(manifest, Manifest) and manifest.built_with.git_revision is None


def test_static_initializers_are_counted_and_declared(plugins: Plugins) -> None:
    assert _write(plugins.folder, _library(plugins, "-DMINIMAL_CONSTRUCTOR"), _facts(plugins.toolchain)).returncode == 0
    manifest = read_manifest(plugins.folder / "manifests" / "50_flagos.json")
    assert isinstance(manifest, Manifest) and manifest.static_initializers == 1


def test_code_of_own_dependencies_counts_where_they_are_found(plugins: Plugins) -> None:
    dependency = own_library(plugins, "described", "-Wl,-init=at_load_value")
    link = (f"-L{dependency.parent}", "-Wl,--no-as-needed", f"-l:{dependency.name}", "-Wl,-rpath,$ORIGIN")
    library = _library(plugins, *link)
    shutil.copy(dependency, library.parent)
    assert _write(plugins.folder, library, _facts(plugins.toolchain)).returncode == 0
    manifest = read_manifest(plugins.folder / "manifests" / "50_flagos.json")
    assert isinstance(manifest, Manifest) and manifest.static_initializers == 1
    assert loader.check(manifest.path, environment=plugins.environment()) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compiler": "GCC"}, "built_with.compiler"),
        ({"version": ""}, "version"),
        ({"glibc": "new"}, "built_with.glibc"),
    ],
)
def test_facts_that_make_no_manifest_stop_the_build(changes: dict[str, str], says: str, plugins: Plugins) -> None:
    done = _write(plugins.folder, _library(plugins), _facts(plugins.toolchain) | changes)
    assert done.returncode != 0 and says in done.stderr
    assert not (plugins.folder / "manifests").exists()


def test_a_library_that_is_none_stops_the_build(plugins: Plugins) -> None:
    library = plugins.folder / "text.so"
    library.write_text("text")
    done = _write(plugins.folder, library, _facts(plugins.toolchain))
    assert done.returncode != 0 and "text.so is no library" in done.stderr


def test_a_template_with_an_unknown_variable_stops_the_build(plugins: Plugins) -> None:
    template = plugins.folder / "template.json.in"
    template.write_text('{"name": "@NAME@"}')
    done = _write(plugins.folder, _library(plugins), _facts(plugins.toolchain), "--template", str(template))
    assert done.returncode != 0 and "@NAME@" in done.stderr and "SHA256" in done.stderr
