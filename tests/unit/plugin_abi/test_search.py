"""Where manifests are looked for, in which order, and what the user's variables do to that."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from plugin_abi import loader, search
from plugin_abi.errors import RefusalCode
from plugin_abi.search import FoundManifest, Origin, SearchEnvironment, find_manifests


@pytest.fixture
def environment(tmp_path: Path) -> SearchEnvironment:
    return SearchEnvironment(
        variables={"HOME": str(tmp_path / "home")},
        privileged=False,
        package_folders=lambda: (tmp_path / "package",),
        system_folders=(tmp_path / "etc", tmp_path / "usr"),
    )


def _with(environment: SearchEnvironment, **variables: str) -> SearchEnvironment:
    return replace(environment, variables={**environment.variables, **variables})


def _put(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")


def _found(environment: SearchEnvironment) -> list[str]:
    return [f"{found.path.parent.name}/{found.path.name}" for found in find_manifests(environment).manifests]


def _refusals(environment: SearchEnvironment) -> dict[str, RefusalCode]:
    found = find_manifests(environment).manifests
    return {item.path.name: item.refusal.code for item in found if item.refusal is not None}


def test_the_places_in_order(environment: SearchEnvironment, tmp_path: Path) -> None:
    added, user = tmp_path / "added", tmp_path / "home/.config/flagos/backend.d"
    _put(*(folder / "m.json" for folder in (tmp_path / "usr", tmp_path / "etc", tmp_path / "package", user, added)))
    places = find_manifests(_with(environment, FLAGOS_ADD_DRIVER_FILES=str(added))).places
    assert [(place.path, place.origin) for place in places] == [
        (added, Origin.ADDED),
        (user, Origin.USER),
        (tmp_path / "package", Origin.PACKAGE),
        (tmp_path / "etc", Origin.SYSTEM),
        (tmp_path / "usr", Origin.SYSTEM),
    ]
    found = _found(_with(environment, FLAGOS_ADD_DRIVER_FILES=str(added)))
    assert found == ["added/m.json", "backend.d/m.json", "package/m.json", "etc/m.json", "usr/m.json"]


def test_the_replacing_variable_leaves_nothing_else(environment: SearchEnvironment, tmp_path: Path) -> None:
    _put(tmp_path / "etc/a.json", tmp_path / "mine/b.json", tmp_path / "added/c.json")
    mine = f"{tmp_path / 'mine'}:"
    assert _found(_with(environment, FLAGOS_DRIVER_FILES=mine, FLAGOS_ADD_DRIVER_FILES="added")) == ["mine/b.json"]


def test_variables_name_files_and_folders(environment: SearchEnvironment, tmp_path: Path) -> None:
    _put(
        tmp_path / "folder/z.json", tmp_path / "folder/a.json", tmp_path / "folder/notes.txt", tmp_path / "one.manifest"
    )
    listed = f"{tmp_path / 'one.manifest'}:{tmp_path / 'folder'}"
    found = _found(_with(environment, FLAGOS_DRIVER_FILES=listed))
    assert found == [f"{tmp_path.name}/one.manifest", "folder/a.json", "folder/z.json"]


def test_a_file_that_is_named_but_missing_is_refused(environment: SearchEnvironment, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    for variable in ("FLAGOS_DRIVER_FILES", "FLAGOS_ADD_DRIVER_FILES"):
        result = loader.load(environment=_with(environment, **{variable: missing}))
        assert [refusal.code for refusal in result.refusals] == [RefusalCode.MANIFEST_NOT_FOUND]
        assert result.refusals[0].place == missing


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 2000 + "m.json", "loop.json"], ids=["long", "deep", "loop"])
def test_a_place_that_cannot_be_is_a_refusal_of_its_own(
    name: str, environment: SearchEnvironment, tmp_path: Path
) -> None:
    _put(tmp_path / "etc/a.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    result = loader.load(environment=_with(environment, FLAGOS_ADD_DRIVER_FILES=str(tmp_path / name)))
    codes = [refusal.code for refusal in result.refusals if refusal.place.startswith(str(tmp_path / name[:5]))]
    assert codes in ([RefusalCode.MANIFEST_UNREADABLE], [RefusalCode.MANIFEST_NOT_FOUND])
    assert [refusal.code for refusal in result.refusals][1:] == [RefusalCode.MANIFEST_MISSING_FIELD]


def test_a_folder_that_cannot_be_listed_is_refused(
    environment: SearchEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(search.os, "scandir", refuse)
    assert _refusals(environment) == {"etc": RefusalCode.MANIFEST_UNREADABLE}


def test_files_are_sorted_by_name(environment: SearchEnvironment, tmp_path: Path) -> None:
    _put(*(tmp_path / "etc" / name for name in ("50_b.json", "9_c.json", "10_a.json", "50_B.json")))
    assert _found(environment) == ["etc/10_a.json", "etc/50_B.json", "etc/50_b.json", "etc/9_c.json"]


def test_the_user_folder_follows_xdg(environment: SearchEnvironment, tmp_path: Path) -> None:
    _put(tmp_path / "xdg/flagos/backend.d/a.json")
    assert _found(_with(environment, XDG_CONFIG_HOME=str(tmp_path / "xdg"))) == ["backend.d/a.json"]
    assert _found(_with(environment, XDG_CONFIG_HOME="relative")) == []


def test_one_real_file_counts_once(
    environment: SearchEnvironment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _put(tmp_path / "etc/50_a.json")
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/10_link.json").symlink_to(tmp_path / "etc/50_a.json")
    caplog.set_level("INFO", logger="flagos.loader")
    assert _found(environment) == ["etc/50_a.json"]
    assert any("duplicate" in message and "10_link.json" in message for message in caplog.messages)


def test_disabling_comes_before_selecting(environment: SearchEnvironment, tmp_path: Path) -> None:
    _put(*(tmp_path / "etc" / f"{name}.json" for name in ("a", "ab", "b", "c")))
    chosen = _with(environment, FLAGOS_DRIVERS_DISABLE=" a.json , x*", FLAGOS_DRIVERS_SELECT="a*,[b]*")
    assert _refusals(chosen) == {"a.json": RefusalCode.DISABLED, "c.json": RefusalCode.NOT_SELECTED}
    everything = _with(environment, FLAGOS_DRIVERS_DISABLE="*")
    assert set(_refusals(everything).values()) == {RefusalCode.DISABLED}
    assert _refusals(_with(environment, FLAGOS_DRIVERS_DISABLE=" , ", FLAGOS_DRIVERS_SELECT="")) == {}


def test_a_privileged_process_follows_no_path_of_its_user(
    environment: SearchEnvironment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _put(tmp_path / "mine/a.json", tmp_path / "home/.config/flagos/backend.d/b.json", tmp_path / "etc/c.json")
    mine = str(tmp_path / "mine")
    privileged = replace(
        _with(environment, FLAGOS_DRIVER_FILES=mine, FLAGOS_ADD_DRIVER_FILES=mine, XDG_CONFIG_HOME=mine),
        privileged=True,
    )
    assert _found(privileged) == ["etc/c.json"]
    assert "FLAGOS_DRIVER_FILES is ignored" in caplog.text
    # Globs name no paths: they still choose.
    disabled = replace(privileged, variables={**privileged.variables, "FLAGOS_DRIVERS_DISABLE": "c*"})
    assert _refusals(disabled) == {"c.json": RefusalCode.DISABLED}


def test_a_process_of_other_effective_rights_is_privileged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not search.is_privileged()
    search.is_privileged.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    try:
        assert search.is_privileged()
    finally:
        search.is_privileged.cache_clear()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a program run with another effective user")
def test_a_real_setuid_start_is_privileged() -> None:
    program = (
        "import os; os.setreuid(65534, 0); os.setregid(-1, -1)\n"
        "from plugin_abi import search; print(search.is_privileged(), search.SearchEnvironment.current().privileged)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


# ---- Installed packages ----


def test_packages_are_found_through_entry_points_and_never_imported(tmp_path: Path) -> None:
    """A package that announces itself and would end the process on import; its manifests are found all the same."""
    package = tmp_path / "vendor_backend"
    _put(package / "manifests/50_vendor.json")
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    info = tmp_path / "vendor_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagos.manifests]\nvendor = vendor_backend\nlost = no_such_package\n")
    program = "from plugin_abi import search; print(*search.package_manifest_folders(), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": f"{Path(search.__file__).parents[1]}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert str(package / "manifests") in done.stdout.splitlines()


def test_a_source_tree_finds_its_own_backend() -> None:
    folders = search.package_manifest_folders()
    assert Path(search.__file__).resolve().parents[1] / "flagos_backend" / "manifests" in folders


def test_the_default_system_folders() -> None:
    folders = SearchEnvironment.current().system_folders
    assert folders == (Path("/etc/flagos/backend.d"), Path("/usr/share/flagos/backend.d"))


def test_found_manifests_are_values() -> None:
    assert FoundManifest(Path("a"), Origin.USER) == FoundManifest(Path("a"), Origin.USER)
