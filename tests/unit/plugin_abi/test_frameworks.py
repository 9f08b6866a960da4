"""Facts of installed frameworks, read without importing them, against what the frameworks say of themselves."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugin_abi import frameworks
from plugin_abi.frameworks import RunningFramework, detect, package_folder

ASK = {
    "torch": "import torch; print(json.dumps([torch.__version__, torch.version.git_version,"
    " torch.compiled_with_cxx11_abi()]))",
    "jaxlib": "import jaxlib.version as v; print(json.dumps([v.__version__, v._git_hash, None]))",
    "jax": "import jax.version as v; print(json.dumps([v.__version__, v._git_hash, None]))",
}


@pytest.mark.parametrize("name", ASK)
def test_facts_are_what_the_framework_says(name: str) -> None:
    """The framework itself is the judge, in a process of its own."""
    pytest.importorskip(name, reason=f"{name} is not installed, so there is nothing to compare with")
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {ASK[name]}"], capture_output=True, text=True, check=True
    )
    version, revision, cxx11_abi = json.loads(done.stdout)
    facts = detect(name)
    assert facts is not None and facts.version is not None
    assert facts.version.split("+")[0] == version.split("+")[0]
    assert facts.git_revision == revision
    if cxx11_abi is not None:
        assert facts.cxx11_abi == cxx11_abi


def test_detecting_imports_nothing() -> None:
    names = [*ASK, "numpy", "no_such_package"]
    program = (
        "import sys; from plugin_abi.frameworks import detect\n"
        f"facts = [detect(name) for name in {names!r}]\n"
        f"assert not set({names!r}) & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_package_that_is_not_known_here_still_has_a_version() -> None:
    assert detect("hypothesis") == RunningFramework(
        "hypothesis", importlib.metadata.version("hypothesis"), place=str(package_folder("hypothesis"))
    )
    assert detect("no_such_package") is None


def _package(folder: Path, version: str) -> None:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "torch" / "version.py").write_text(version)


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("git_version = 'abcdef0123456789'\n", "abcdef0123456789"),
        ('git_version: Optional[str] = "abcdef0123456789"\n', "abcdef0123456789"),
        ("git_version = None\n", None),
        ("git_version = 'Unknown'\n", None),
        ("x = \"git_version = 'abcdef0'\"\n", None),
        ("\xff\x00", None),
    ],
)
def test_a_git_revision_is_read_from_the_text(text: str, revision: str | None, tmp_path: Path) -> None:
    _package(tmp_path, text)
    program = (
        "from plugin_abi.frameworks import detect; f = detect('torch'); print(f.git_revision, f.compiler, f.place)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(frameworks.__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(revision), "None", str(tmp_path / "torch")]


def test_what_is_imported_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is loaded already tells its version; the installation may have changed since."""
    import types

    module = types.ModuleType("hypothesis_double")
    module.__version__ = "9.9"  # type: ignore[attr-defined]
    module.__path__ = [str(Path(__file__).parent)]
    monkeypatch.setitem(sys.modules, "hypothesis_double", module)
    facts = detect("hypothesis_double")
    assert facts is not None and (facts.version, facts.place) == ("9.9", str(Path(__file__).parent))


def test_a_subpackage_is_found_without_its_parents_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lone_parent" / "child").mkdir(parents=True)
    (tmp_path / "lone_parent" / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("lone_parent.child") == tmp_path / "lone_parent" / "child"
    assert package_folder("lone_parent.absent") is None and "lone_parent" not in sys.modules
