"""Every defect has its refusal, is found before code of the plugin runs in the host, and spoils nothing beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from plugin_abi import loader
from plugin_abi.errors import Refusal, RefusalCode
from unit.plugin_abi.defects import DEFECTS, NAME, Defect
from unit.plugin_abi.plugins import Plugins

CASES = [pytest.param(defect, id=name) for name, defect in DEFECTS.items()]


def _load(plugins: Plugins, defect: Defect) -> loader.LoadResult:
    return loader.load(frameworks=defect.frameworks, environment=plugins.environment(**defect.variables))


@pytest.mark.parametrize("defect", CASES)
def test_the_refusal_names_fact_place_and_cure(defect: Defect, plugins: Plugins) -> None:
    manifest = defect.make(plugins)
    result = _load(plugins, defect)
    assert result.accepted is None
    (refusal,) = result.refusals
    assert refusal.code is defect.code, refusal
    for part in defect.parts:
        assert part in str(refusal)
    assert refusal.fact and refusal.cure
    assert str(manifest.parent) in refusal.place


@pytest.mark.parametrize("defect", CASES)
def test_no_code_of_a_refused_plugin_runs_in_the_host(defect: Defect, plugins: Plugins) -> None:
    defect.make(plugins)
    _load(plugins, defect)
    assert os.getpid() not in {process for _, process in plugins.ran()}
    assert bool(plugins.ran()) == defect.runs_in_child
    assert NAME not in open("/proc/self/maps").read()  # noqa: PTH123 SIM115


@pytest.mark.parametrize("defect", CASES)
def test_the_sound_plugin_beside_it_is_accepted(defect: Defect, plugins: Plugins) -> None:
    defect.make(plugins)
    sound = plugins.add("50_sound")
    result = _load(plugins, defect)
    assert result.accepted is not None and result.accepted.manifest is not None
    assert result.accepted.manifest.path == sound
    assert [refusal.code for refusal in result.refusals] == [defect.code]


@pytest.mark.parametrize("defect", CASES)
def test_each_refused_manifest_gives_one_warning_and_the_reason_to_who_names_the_device(
    defect: Defect, plugins: Plugins, warnings_logged: pytest.LogCaptureFixture
) -> None:
    manifest = defect.make(plugins)
    result = _load(plugins, defect)
    (record,) = warnings_logged.records
    (refusal,) = result.refusals
    assert record.levelname == "WARNING" and "\n" not in record.getMessage()
    assert str(manifest) in record.getMessage()
    message = loader.no_such_device_message("flagos")
    assert message.startswith("no such device flagos.") and str(refusal) in message


def test_front_ends_that_load_one_after_the_other_warn_once(
    plugins: Plugins, warnings_logged: pytest.LogCaptureFixture
) -> None:
    # A verdict that is kept has another text the second time.
    defect = DEFECTS["entry that crashes"]
    manifest = defect.make(plugins)
    first, second = _load(plugins, defect), _load(plugins, defect)
    assert [refusal.code for refusal in second.refusals] == [defect.code]
    assert len(warnings_logged.records) == len(first.warnings) == len(second.warnings) == 1
    manifest.write_text("{")
    _load(plugins, defect)
    assert "MANIFEST_NOT_JSON" in warnings_logged.records[1].getMessage()


@pytest.mark.parametrize("defect", CASES)
def test_check_finds_the_same(defect: Defect, plugins: Plugins) -> None:
    manifest = defect.make(plugins)
    refusal = loader.check(manifest, defect.frameworks, plugins.environment(**defect.variables))
    assert refusal is not None and refusal.code is defect.code


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dependency missing", "libminimal_gone.so: cannot open shared object file"),
        ("glibc too new", "version `GLIBC_2.9.9' not found"),
        ("libstdc++ too new", "version `GLIBCXX_3.9.99' not found"),
        ("library not ELF", "invalid ELF header"),
        ("library of another architecture", "cannot open shared object file"),
        # The linker maps what the file has not: touching it is a bus error, which no host survives.
        ("library truncated", ""),
    ],
)
def test_the_dynamic_linker_agrees(name: str, says: str, plugins: Plugins) -> None:
    """An independent judge, in a child: what is refused because it would not load does not load."""
    manifest = DEFECTS[name].make(plugins)
    library = str(manifest.parent / json.loads(manifest.read_text())["library_path"])
    done = subprocess.run(
        [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library], capture_output=True, text=True
    )
    assert done.returncode != 0 and says in done.stderr


def test_every_code_of_a_refusal_has_its_defect() -> None:
    elsewhere = {
        RefusalCode.MANIFEST_NOT_FOUND: "test_search.py",
        RefusalCode.DISABLED: "test_search.py",
        RefusalCode.NOT_SELECTED: "test_search.py",
        RefusalCode.DUPLICATE_LIBRARY: "test_loader.py",
        RefusalCode.TRIAL_UNAVAILABLE: "test_trial.py",
        RefusalCode.ISOLATION_UNAVAILABLE: "cpu/plugin_abi/test_isolated.py",
        RefusalCode.CHECK_FAILED: "test_isolation.py",
        RefusalCode.EXECUTABLE_STACK: "test_load_time.py",
        RefusalCode.WRITABLE_CODE: "test_load_time.py",
        RefusalCode.UNCHECKED_LOAD: "test_load_time.py",
        RefusalCode.LIBRARY_CHANGED: "test_what_is_loaded.py",
    }
    assert {defect.code for defect in DEFECTS.values()} | set(elsewhere) == set(RefusalCode)


def test_jax_starts_beside_all_defects_at_once(plugins: Plugins) -> None:
    """A fresh process meets every defective plugin: it refuses them all, takes the sound one, and JAX computes."""
    here = [d for d in DEFECTS.values() if not d.frameworks and "FLAGOS_STATIC_INITIALIZERS" not in d.variables]
    folders = [defect.make(Plugins(plugins.toolchain, plugins.folder / str(n))).parent for n, defect in enumerate(here)]
    sound = plugins.add("sound", priority=-1)
    program = (
        "from plugin_abi import loader\n"
        "result = loader.load()\n"
        "print(result.accepted.manifest.path, *(refusal.code.name for refusal in result.refusals))\n"
        "import jax\n"
        "print(jax.default_backend(), jax.jit(lambda x: x + 1)(41))\n"
    )
    files = ":".join(map(str, [*folders, sound]))
    variables = {**plugins.environment(FLAGOS_DRIVER_FILES=files).variables, "FLAGOS_TRIAL_TIMEOUT": "5"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, computed = done.stdout.splitlines()
    accepted, *codes = loaded.split()
    assert accepted == str(sound)
    assert sorted(codes) == sorted(defect.code.name for defect in here)
    assert computed == "cpu 42"
    assert len([line for line in done.stderr.splitlines() if line.startswith("manifest ")]) == len(here)


def test_a_refusal_prints_as_one_line_with_number_and_name() -> None:
    refusal = Refusal(RefusalCode.LIBRARY_NOT_ELF, "fact", "place", "cure", "cause")
    assert str(refusal) == "FLAGOS-1202 LIBRARY_NOT_ELF: fact (in place). Cause: cause. Cure: cure."
