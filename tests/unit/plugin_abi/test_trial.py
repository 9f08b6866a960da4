"""The trial load: what it survives, what it leaves behind, and when a verdict is kept."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from plugin_abi import cache, loader, trial
from plugin_abi.errors import Refusal, RefusalCode
from unit.plugin_abi.defects import CRASH, HANG
from unit.plugin_abi.plugins import Plugins


def _children(plugins: Plugins) -> int:
    return len([process for _, process in plugins.ran() if process != os.getpid()])


def _check(plugins: Plugins, manifest: Path, **variables: str) -> Refusal | None:
    return loader.check(manifest, environment=plugins.environment(**variables))


def test_a_good_verdict_is_kept_for_the_same_library(plugins: Plugins) -> None:
    manifest = plugins.add()
    assert _check(plugins, manifest) is None and _check(plugins, manifest) is None
    assert _children(plugins) == 1


def test_a_changed_library_is_tried_again(plugins: Plugins) -> None:
    manifest = plugins.add()
    _check(plugins, manifest)
    with (manifest.parent / "lib-50_minimal.so").open("ab") as library:
        library.write(b"\0")
    _check(plugins, manifest)
    assert _children(plugins) == 2


def test_a_changed_manifest_is_tried_again(plugins: Plugins) -> None:
    manifest = plugins.add()
    assert _check(plugins, manifest) is None
    plugins.add(version="0.2.0")
    refusal = _check(plugins, manifest)
    assert refusal is not None and refusal.code is RefusalCode.INFO_MISMATCH


def test_a_verdict_of_other_rules_is_none(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = plugins.add()
    assert _check(plugins, manifest) is None
    monkeypatch.setattr(trial, "_rules", lambda: "those of a later version")
    assert _check(plugins, manifest) is None
    assert _children(plugins) == 2


def test_a_bad_verdict_is_kept_for_a_while(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = plugins.add("crash", plugins.toolchain.build(flags=(CRASH,)))
    first, second = _check(plugins, manifest), _check(plugins, manifest)
    assert first is not None and second is not None
    assert first.code is second.code is RefusalCode.ENTRY_CRASHED
    assert "FLAGOS_TRIAL_LOAD=1" in second.cure and _children(plugins) == 1
    later = time.time() + trial.BAD_VERDICT_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    _check(plugins, manifest)
    assert _children(plugins) == 2


def test_the_user_has_a_library_always_tried_or_never(plugins: Plugins) -> None:
    manifest = plugins.add()
    for _ in range(2):
        assert _check(plugins, manifest, FLAGOS_TRIAL_LOAD="1") is None
    assert _children(plugins) == 2
    assert _check(plugins, manifest, FLAGOS_TRIAL_LOAD="0") is None
    assert _children(plugins) == 2


def _runs(process: int) -> bool:
    """Whether a process runs still; one that is dead and not yet reaped by who inherited it does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_hang_ends_with_everything_that_the_child_started(plugins: Plugins) -> None:
    """The entry forks before it hangs: the child's own child goes with it."""
    library = plugins.toolchain.build(flags=(HANG.replace("for", 'if(fork()==0)minimal_mark("grandchild");for'),))
    manifest = plugins.add("hang", library)
    refusal = _check(plugins, manifest, FLAGOS_TRIAL_TIMEOUT="2")
    assert refusal is not None and refusal.code is RefusalCode.ENTRY_HANGS
    assert {what for what, _ in plugins.ran()} == {"entry", "grandchild"}
    # The signal is sent before the verdict; on a busy machine a process may still be on its way out when it is read.
    deadline = time.monotonic() + 30
    while alive := [process for _, process in plugins.ran() if _runs(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


def test_a_hang_in_a_static_initializer_is_seen_too(plugins: Plugins) -> None:
    library = plugins.toolchain.build(flags=("-DMINIMAL_CONSTRUCTOR", "-DAT_LOAD=for(;;)pause();"))
    manifest = plugins.add("hang", library, static_initializers=1)
    refusal = _check(plugins, manifest, FLAGOS_TRIAL_TIMEOUT="0.5")
    assert refusal is not None and refusal.code is RefusalCode.ENTRY_HANGS


def test_what_a_plugin_prints_does_not_pass_for_its_answer(plugins: Plugins) -> None:
    noise = '-DBEFORE_NEGOTIATION=puts("{\\"status\\":0}");fflush(stdout);'
    manifest = plugins.add("noise", plugins.toolchain.build(flags=(noise,)))
    assert _check(plugins, manifest) is None


def test_without_a_python_program_there_is_no_trial_and_no_load(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A C program that embeds Python calls itself sys.executable; it must not be started as if it were Python."""
    manifest = plugins.add()
    monkeypatch.setattr(sys, "executable", "/bin/true")
    monkeypatch.setattr(sys, "exec_prefix", str(plugins.folder))
    monkeypatch.setattr(sys, "base_exec_prefix", str(plugins.folder))
    refusal = _check(plugins, manifest)
    assert refusal is not None and refusal.code is RefusalCode.TRIAL_UNAVAILABLE
    assert "FLAGOS_TRIAL_LOAD=0" in refusal.cure


def test_an_embedding_program_finds_the_python_of_its_installation(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = plugins.add()
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert _check(plugins, manifest) is None
    assert _children(plugins) == 1


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_may_enter_keeps_no_verdicts(plugins: Plugins, mode: int) -> None:
    folder = plugins.folder / "home" / ".cache" / "flagos" / "loader"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    manifest = plugins.add()
    for _ in range(2):
        assert _check(plugins, manifest) is None
    assert _children(plugins) == 2 and list(folder.iterdir()) == []


def test_a_folder_that_is_a_link_keeps_no_verdicts(plugins: Plugins) -> None:
    target = plugins.folder / "elsewhere"
    target.mkdir(mode=0o700)
    folder = plugins.folder / "home" / ".cache" / "flagos" / "loader"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(target)
    assert _check(plugins, plugins.add()) is None
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"good": "yes"}', '{"good": false, "time": "x"}', "\xff"])
def test_a_damaged_verdict_is_no_verdict(plugins: Plugins, content: str) -> None:
    manifest = plugins.add()
    _check(plugins, manifest)
    (verdict,) = (plugins.folder / "home" / ".cache" / "flagos" / "loader").iterdir()
    verdict.write_bytes(content.encode("latin-1"))
    assert _check(plugins, manifest) is None
    assert _children(plugins) == 2


def test_a_privileged_process_keeps_no_verdicts() -> None:
    assert cache.cache_folder({"HOME": "/nonexistent"}, privileged=True) is None
    assert cache.cache_folder({"HOME": "relative"}, privileged=False) is None


@pytest.mark.parametrize(
    ("value", "seconds"), [("", 20.0), ("5", 5.0), ("0.5", 0.5), ("0", 20.0), ("-1", 20.0), ("nan", 20.0), ("x", 20.0)]
)
def test_the_timeout_is_what_the_variable_says_if_it_makes_sense(value: str, seconds: float) -> None:
    assert trial.trial_timeout({"FLAGOS_TRIAL_TIMEOUT": value}) == seconds
