"""The loader with sound plugins: which one is taken, what it gives, and what the front ends are told."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from plugin_abi import cabi, loader
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.frameworks import RunningFramework
from plugin_abi.host import Context
from plugin_abi.versions import AbiVersion
from unit.plugin_abi.plugins import GIT_REVISION, MINIMAL, Plugins


def _accepted(result: loader.LoadResult) -> str:
    assert result.accepted is not None and result.accepted.manifest is not None
    return result.accepted.manifest.path.stem


def test_a_sound_backend_is_accepted_with_its_facts(plugins: Plugins) -> None:
    manifest = plugins.add(priority=7, options={"num_threads": 4})
    result = loader.load(environment=plugins.environment())
    backend = result.accepted
    assert result.refusals == () and backend is not None and backend.manifest is not None
    assert backend.manifest.path == manifest
    assert (backend.platform, backend.priority, backend.version) == ("flagos", 7, AbiVersion(1, 0))
    assert (backend.info.name, backend.info.git_revision) == ("minimal", GIT_REVISION)
    assert backend.options == {"num_threads": 4}
    assert backend.address == int(cabi.ffi().cast("uintptr_t", backend.api)) != 0
    assert loader.last_result() is result


def test_the_library_is_tried_in_a_child_before_it_enters_the_host(plugins: Plugins) -> None:
    plugins.add()
    loader.load(environment=plugins.environment())
    first, second = plugins.ran()
    assert first[0] == second[0] == "entry"
    assert first[1] != os.getpid() == second[1]


def test_the_same_library_is_not_loaded_twice(plugins: Plugins) -> None:
    plugins.add()
    first = loader.load(environment=plugins.environment()).accepted
    second = loader.load(environment=plugins.environment()).accepted
    assert first is second is not None


def test_the_library_is_local_to_its_handle_and_never_unloaded(plugins: Plugins) -> None:
    manifest = plugins.add()
    loader.load(environment=plugins.environment())
    library = manifest.parent / "lib-50_minimal.so"
    assert not hasattr(ctypes.CDLL(None), "flagos_plugin_entry")
    handle = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    dlclose = ctypes.CDLL(None).dlclose
    dlclose.argtypes = (ctypes.c_void_p,)
    for _ in range(4):
        dlclose(handle._handle)
    assert str(library) in Path("/proc/self/maps").read_text()


def test_the_backend_is_given_its_resources(plugins: Plugins) -> None:
    """As an option of its context, by the real path; the minimal backend shows its options as attributes."""
    (plugins.folder / "share").mkdir()
    (plugins.folder / "linked").symlink_to("share")
    plugins.add(resource_dir="../linked", options={"resource_dir": "elsewhere", "num_threads": 4})
    backend = loader.load(environment=plugins.environment()).accepted
    assert backend is not None
    assert backend.options == {"resource_dir": str(plugins.folder / "share"), "num_threads": 4}
    with Context(backend) as context:
        assert context.devices[0].attributes["resource_dir"] == str(plugins.folder / "share")


def test_resources_may_lie_beside_the_library(plugins: Plugins) -> None:
    """The manifest may be in a folder of the system and the library elsewhere."""
    vendor = plugins.folder / "opt" / "vendor"
    (vendor / "share").mkdir(parents=True)
    library = plugins.add(folder="opt/vendor/lib").parent / "lib-50_minimal.so"
    manifest = plugins.add(folder="etc", library_path=str(library), resource_dir=str(vendor / "share"))
    assert loader.check(manifest, environment=plugins.environment()) is None


def test_a_misspelt_field_is_one_line_of_information(plugins: Plugins, caplog: pytest.LogCaptureFixture) -> None:
    manifest = plugins.add(sha265="0" * 64, resource_dri="..")
    caplog.set_level(logging.INFO, logger="flagos.loader")
    assert loader.load(environment=plugins.environment()).accepted is not None
    line = f"manifest {manifest}: nobody reads sha265 (did you mean sha256?), resource_dri (did you mean resource_dir?)"
    assert [message for message in caplog.messages if "nobody reads" in message] == [line]


# ---- Which one ----


def test_the_highest_priority_is_taken_and_the_others_stay_out_of_the_process(plugins: Plugins) -> None:
    plugins.add("10_low", priority=1)
    plugins.add("50_high", priority=9)
    result = loader.load(environment=plugins.environment())
    assert _accepted(result) == "50_high"
    assert [manifest.path.stem for manifest in result.standby] == ["10_low"]
    assert "lib-10_low.so" not in Path("/proc/self/maps").read_text()


def test_equal_priorities_keep_the_order_of_file_names(plugins: Plugins) -> None:
    plugins.add("20_second")
    plugins.add("10_first")
    assert _accepted(loader.load(environment=plugins.environment())) == "10_first"


def test_a_refused_favourite_leaves_its_place_to_the_next(plugins: Plugins) -> None:
    plugins.add("10_favourite", priority=9, sha256="0" * 64)
    plugins.add("50_next")
    result = loader.load(environment=plugins.environment())
    assert _accepted(result) == "50_next"
    assert [refusal.code for refusal in result.refusals] == [RefusalCode.SHA256_MISMATCH]


def test_two_manifests_for_one_library_the_second_is_refused(
    plugins: Plugins, warnings_logged: pytest.LogCaptureFixture
) -> None:
    first = plugins.add("10_first")
    second = first.with_name("20_second.json")
    second.write_text(first.read_text())
    (first.parent / "alias.so").symlink_to(first.parent / "lib-10_first.so")
    third = plugins.add("30_third", library_path="./alias.so")
    result = loader.load(environment=plugins.environment())
    assert _accepted(result) == "10_first"
    assert [refusal.code for refusal in result.refusals] == [RefusalCode.DUPLICATE_LIBRARY] * 2
    assert [refusal.place for refusal in result.refusals] == [str(second), str(third)]
    assert all(str(first) in refusal.fact for refusal in result.refusals)
    assert len(warnings_logged.records) == 2


def test_manifests_of_other_platforms_are_left_alone(
    plugins: Plugins, warnings_logged: pytest.LogCaptureFixture
) -> None:
    plugins.add("10_other", plugins.toolchain.build(platform="other"), platform="other")
    plugins.add("50_flagos")
    assert _accepted(loader.load(environment=plugins.environment())) == "50_flagos"
    assert _accepted(loader.load("other", environment=plugins.environment())) == "10_other"
    assert warnings_logged.records == []


def test_the_user_disables_and_selects_without_a_warning(
    plugins: Plugins, warnings_logged: pytest.LogCaptureFixture
) -> None:
    for name in ("10_first", "20_second", "30_third"):
        plugins.add(name)
    environment = plugins.environment(FLAGOS_DRIVERS_DISABLE="10_*", FLAGOS_DRIVERS_SELECT="[13]0_*")
    result = loader.load(environment=environment)
    assert _accepted(result) == "30_third"
    assert [refusal.code for refusal in result.refusals] == [RefusalCode.DISABLED, RefusalCode.NOT_SELECTED]
    assert warnings_logged.records == []


# ---- Declared static initializers, matching frameworks: what looks like a defect and is none ----


def test_declared_static_initializers_are_allowed(plugins: Plugins) -> None:
    library = plugins.toolchain.build(flags=("-DMINIMAL_CONSTRUCTOR",))
    plugins.add("declared", library, static_initializers=1)
    assert _accepted(loader.load(environment=plugins.environment())) == "declared"


def test_the_glibc_of_the_build_is_no_requirement(plugins: Plugins) -> None:
    """What a library needs is in its symbol versions: one that was compiled with a newer glibc may load on an older."""
    newer = "2.999"
    plugins.add("newer", plugins.toolchain.build(glibc=newer), built_with__glibc=newer)
    assert _accepted(loader.load(environment=plugins.environment())) == "newer"


def test_a_stripped_library_has_no_static_initializers_of_its_own(plugins: Plugins) -> None:
    plugins.add("stripped", plugins.toolchain.build(flags=("-Wl,-s",)))
    environment = plugins.environment(FLAGOS_STATIC_INITIALIZERS="never")
    assert _accepted(loader.load(environment=environment)) == "stripped"


def test_a_plugin_of_the_cxx11_abi_is_accepted(plugins: Plugins) -> None:
    sources = (*MINIMAL, "cxx_strings.cc")
    plugins.add("cxx", plugins.toolchain.build(sources, cxx11_abi=1), built_with__cxx11_abi=True)
    assert _accepted(loader.load(environment=plugins.environment())) == "cxx"


JAXLIB = RunningFramework("jaxlib", "0.10.2", "1" * 40, "clang 18.1.8", True)


@pytest.mark.parametrize(
    "requirement",
    [
        {},
        {"version": ">=0.10,<0.13"},
        {"git_revision": "1" * 40},
        {"git_revision": ["2" * 40, "1" * 12]},
        {"version": ">=0.11", "git_revision": "1" * 40},
        {"version": ">=0.10", "git_revision": "2" * 40},
        {"compiler": "clang 18.1.8", "cxx11_abi": True},
    ],
    ids=str,
)
def test_a_plain_c_backend_fits_a_framework_of_another_compiler(
    requirement: dict[str, object], plugins: Plugins
) -> None:
    plugins.add("fits", built_with__framework={"jaxlib": requirement})
    result = loader.load(frameworks=(JAXLIB,), environment=plugins.environment())
    assert _accepted(result) == "fits", result.refusals


def test_a_backend_that_links_a_frameworks_cxx_fits_one_of_its_own_toolchain(plugins: Plugins) -> None:
    same = RunningFramework("jaxlib", "0.10.2", "1" * 40, plugins.toolchain.compiler, True)
    framework = {"jaxlib": {"binding": "cxx", "cxx11_abi": True}}
    plugins.add("fits", built_with__framework=framework)
    assert _accepted(loader.load(frameworks=(same,), environment=plugins.environment())) == "fits"


def test_a_framework_that_is_not_there_and_not_required_is_not_compared(plugins: Plugins) -> None:
    plugins.add("fits", built_with__framework={"no_such_framework": {"version": ">=9"}})
    assert _accepted(loader.load(environment=plugins.environment())) == "fits"


def test_a_bare_library_name_is_found_as_the_dynamic_linker_finds_it(plugins: Plugins) -> None:
    """In a process whose LD_LIBRARY_PATH names the folder when it starts."""
    manifest = plugins.add("bare", library_path="lib-bare.so")
    program = "from plugin_abi import loader; print(loader.load().accepted.place)"
    variables = plugins.environment().variables | {"LD_LIBRARY_PATH": str(manifest.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(manifest.parent / "lib-bare.so")
    refusal = loader.check(manifest, environment=plugins.environment())
    assert refusal is not None and refusal.code is RefusalCode.LIBRARY_NOT_FOUND


# ---- Native registration ----


def test_a_backend_that_is_built_into_the_process_registers_its_entry(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader._state, "native", [])
    library = ctypes.CDLL(str(plugins.toolchain.build(platform="built_in")))
    address = ctypes.cast(library.flagos_plugin_entry, ctypes.c_void_p).value
    assert address is not None
    backend = loader.register_native(address, place="this test")
    assert isinstance(backend, loader.Backend) and backend.manifest is None and backend.options == {}
    manifest = plugins.add("50_file", plugins.toolchain.build(platform="built_in"), platform="built_in")
    assert loader.load("built_in", environment=plugins.environment()).accepted is backend
    manifest.write_text(manifest.read_text().replace('"platform"', '"priority": 1, "platform"'))
    assert _accepted(loader.load("built_in", environment=plugins.environment())) == "50_file"


def test_a_native_backend_that_does_not_fit_is_a_refusal(plugins: Plugins) -> None:
    library = ctypes.CDLL(str(plugins.toolchain.build(min_minor=5, max_minor=6)))
    address = ctypes.cast(library.flagos_plugin_entry, ctypes.c_void_p).value
    assert address is not None
    refusal = loader.register_native(address)
    assert isinstance(refusal, Refusal) and refusal.code is RefusalCode.ABI_TOO_NEW


# ---- What is told ----


def test_without_any_manifest_the_message_says_where_it_looked(plugins: Plugins) -> None:
    (plugins.folder / "backend.d").mkdir()
    assert loader.load(environment=plugins.environment()).accepted is None
    message = loader.no_such_device_message()
    assert str(plugins.folder / "backend.d") in message and "FLAGOS_DRIVER_FILES" in message


def test_before_any_load_the_message_says_so() -> None:
    assert "not looked for yet" in loader.no_such_device_message("never_loaded")
    assert loader.last_result("never_loaded") is None


def test_the_backends_own_log_lines_reach_the_loggers(plugins: Plugins, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="flagos.loader")
    plugins.add()
    loader.load(environment=plugins.environment())
    line = "flagos.loader.backend", logging.DEBUG, "backend: the minimal backend was negotiated with"
    assert line in caplog.record_tuples


@pytest.mark.parametrize(("level", "shown"), [("", False), ("2", False), ("3", True), ("9", True), ("all", False)])
def test_a_number_shows_the_backends_lines_up_to_a_level(level: str, shown: bool, plugins: Plugins) -> None:
    """The minimal backend's is one of level 3. Lines of the loader are another variable's."""
    plugins.add("50_good")
    program = "from plugin_abi import loader; loader.load()"
    variables = {**os.environ, **plugins.environment(FLAGOS_TRIAL_LOAD="0").variables, "FLAGOS_DEBUG": level}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["flagos backend: the minimal backend was negotiated with"] * shown


@pytest.mark.parametrize(
    ("levels", "expected"),
    [("warn", {"WARNING"}), ("info", {"INFO"}), ("error", set()), ("warn, info", {"WARNING", "INFO"})],
)
def test_the_debug_variable_chooses_what_goes_to_stderr(levels: str, expected: set[str], plugins: Plugins) -> None:
    plugins.add("10_bad", sha256="0" * 64)
    plugins.add("50_good")
    program = "from plugin_abi import loader; loader.load()"
    variables = plugins.environment().variables | {"FLAGOS_LOADER_DEBUG": levels}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert {line.split()[2].rstrip(":") for line in done.stderr.splitlines()} == expected


def test_a_host_ends_well_after_its_backend_was_given_a_log_callback(plugins: Plugins) -> None:
    """At the end the loader negotiates once more, without a callback: no line can reach a dead interpreter."""
    plugins.add()
    program = "from plugin_abi import loader; loader.load()"
    variables = {**os.environ, **plugins.environment(FLAGOS_TRIAL_LOAD="0").variables}
    subprocess.run([sys.executable, "-c", program], env=variables, check=True)
    assert [what for what, _ in plugins.ran()] == ["entry", "entry"]


def test_nothing_of_the_host_side_imports_a_framework_or_the_backend(plugins: Plugins) -> None:
    plugins.add(built_with__framework={name: {"version": ">=0"} for name in ("torch", "jax", "jaxlib")})
    program = (
        "import sys, plugin_abi.host, plugin_abi.loader as l; assert l.load().accepted; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'jax', 'jaxlib', 'numpy', 'flagos_backend')])"
    )
    variables = {**os.environ, **plugins.environment().variables}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- For flagos doctor and flagos check ----


def test_check_accepts_without_loading(plugins: Plugins) -> None:
    manifest = plugins.add()
    assert loader.check(manifest, environment=plugins.environment()) is None
    assert os.getpid() not in {process for _, process in plugins.ran()}


def test_search_tells_places_manifests_and_why_each_is_left_out(plugins: Plugins) -> None:
    plugins.add("10_off")
    good = plugins.add("20_good")
    (good.parent / "30_bad.json").write_text("{")
    searched, candidates = loader.search(plugins.environment(FLAGOS_DRIVERS_DISABLE="10_*"))
    assert [place.path for place in searched.places] == [good.parent]
    assert [candidate.refusal and candidate.refusal.code for candidate in candidates] == [
        RefusalCode.DISABLED,
        None,
        RefusalCode.MANIFEST_NOT_JSON,
    ]
    assert candidates[1].library == good.parent / "lib-20_good.so"
    assert plugins.ran() == []


def test_the_kept_verdicts_are_the_users_alone(plugins: Plugins) -> None:
    plugins.add()
    loader.load(environment=plugins.environment())
    folder = plugins.folder / "home" / ".cache" / "flagos" / "loader"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(folder.iterdir())) == 1
