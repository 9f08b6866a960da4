"""What a build states about itself: a revision only where the tree equals it, and what the compiler itself says."""

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def build_facts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_facts", ROOT / "tools" / "build_facts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-C", str(folder), "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(command, env=os.environ | identity, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one committed file."""
    folder = tmp_path / "tree"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.cc").write_text("int a;\n")
    git(folder, "add", "a.cc")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_tree_has_its_revision(build_facts: ModuleType, tree: Path) -> None:
    (tree / "untracked").touch()
    assert build_facts.git_revision(tree) == git(tree, "rev-parse", "HEAD")


def test_a_modified_tree_equals_no_revision(build_facts: ModuleType, tree: Path) -> None:
    (tree / "a.cc").write_text("int b;\n")
    assert build_facts.git_revision(tree) == ""


def test_a_repository_around_the_tree_says_nothing(build_facts: ModuleType, tree: Path) -> None:
    inner = tree / "unpacked"
    inner.mkdir()
    assert build_facts.git_revision(inner) == ""


def test_a_source_archive_keeps_its_revision(build_facts: ModuleType, tree: Path) -> None:
    unpacked = tree / "unpacked"
    unpacked.mkdir()
    recorded = build_facts.git_revision(tree)
    (unpacked / build_facts.RECORDED_REVISION).write_text(recorded + "\n")
    assert len(recorded) == 40
    assert build_facts.git_revision(unpacked) == recorded


def test_without_git_there_is_no_revision(build_facts: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert build_facts.git_revision(tree) == ""


def test_compiler_facts_are_the_compilers_own(build_facts: ModuleType) -> None:
    facts = build_facts.compiler_facts("c++")
    dumped = subprocess.run(["c++", "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=True)
    assert facts["compiler"].split()[0] in ("gcc", "clang")
    assert facts["compiler"].split()[1] == dumped.stdout.strip()
    assert facts["glibc"] == os.confstr("CS_GNU_LIBC_VERSION").removeprefix("glibc ")
    assert facts["cxx11_abi"] in (0, 1)


def test_the_header_is_what_the_compiler_sees(build_facts: ModuleType, tmp_path: Path) -> None:
    facts = build_facts.build_facts(ROOT, "c++", "Release", "address,undefined")
    (tmp_path / "facts.h").write_text(build_facts.render_header(facts))
    source = '#include "facts.h"\nFLAGOS_BUILD_VERSION FLAGOS_BUILD_ID FLAGOS_BUILD_CXX11_ABI'
    command = ["c++", "-E", "-P", "-x", "c++", "-I", str(tmp_path), "-"]
    seen = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout.strip()
    assert seen == f'"{facts["version"]}" "{facts["build_id"]}" {facts["cxx11_abi"]}'
    assert "Release+address+undefined" in facts["build_id"]


def test_unchanged_facts_leave_the_file_alone(build_facts: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "facts.h"
    build_facts.write_if_changed(path, "one")
    os.utime(path, (1, 1))
    build_facts.write_if_changed(path, "one")
    assert path.stat().st_mtime == 1
    build_facts.write_if_changed(path, "two")
    assert path.read_text() == "two"


def test_the_build_id_follows_the_native_sources(build_facts: ModuleType, tmp_path: Path) -> None:
    native = tmp_path / "flagos_backend" / "native"
    native.mkdir(parents=True)
    (native / "entry.cc").write_text("int a;")
    before = build_facts.source_digest(tmp_path)
    (native / "notes.md").write_text("no source")
    assert build_facts.source_digest(tmp_path) == before
    (native / "entry.cc").write_text("int b;")
    assert build_facts.source_digest(tmp_path) != before
