"""The trial load: what it survives, what it leaves behind, and when a verdict is kept."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plugin_abi import cache, loader, trial
from plugin_abi.errors import Refusal, RefusalCode
from unit.plugin_abi.defects import CRASH, HANG
from unit.plugin_abi.load_time import own_library, with_own
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


def test_a_check_tries_also_where_a_load_would_not(plugins: Plugins) -> None:
    """What only the entry tells is part of the answer, and the library stays out of this process."""
    bad = plugins.add("40_bad", plugins.toolchain.build(version="9.9.9"))
    refusal = _check(plugins, bad, FLAGOS_TRIAL_LOAD="0")
    result = loader.load(environment=plugins.environment(FLAGOS_TRIAL_LOAD="0"))
    assert refusal is not None and [r.code for r in result.refusals] == [refusal.code] == [RefusalCode.INFO_MISMATCH]
    assert _children(plugins) == 1


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


ESCAPES = {
    "a daemon": 'if(fork()==0){setsid();if(fork()==0){minimal_mark("escaped");for(;;)pause();}_exit(0);}',
    "deaf to signals": "if(fork()==0){setsid();signal(SIGTERM,SIG_IGN);signal(SIGHUP,SIG_IGN);"
    'minimal_mark("escaped");for(;;)pause();}',
    "a chain": 'for(int i=0;i<4;++i){if(fork()!=0)break;setsid();minimal_mark("escaped");if(i==3)for(;;)pause();}'
    "if(getsid(0)==getpid())for(;;)pause();",
}


@pytest.mark.parametrize("ends", ["", "_exit(0);", "for(;;)pause();"], ids=["answers", "exits", "hangs"])
@pytest.mark.parametrize("escape", ESCAPES)
def test_a_trial_ends_with_processes_that_leave_its_session(escape: str, ends: str, plugins: Plugins) -> None:
    """However the child itself ends; nothing of it is left when the verdict is there, and the host inherits nobody."""
    wait = "usleep(100000);"
    code = f"-DBEFORE_NEGOTIATION=static int once;if(!once){{once=1;{ESCAPES[escape]}{wait}{ends}}}"
    flags = ("-D_DEFAULT_SOURCE", "-include", "signal.h", code)
    manifest = plugins.add("escapes", plugins.toolchain.build(flags=flags))
    refusal = _check(plugins, manifest, FLAGOS_TRIAL_TIMEOUT="1" if ends.startswith("for") else "20")
    codes = {"": None, "_exit(0);": RefusalCode.ENTRY_CRASHED}
    assert (refusal.code if refusal else None) is codes.get(ends, RefusalCode.ENTRY_HANGS), refusal
    escaped = [process for what, process in plugins.ran() if what == "escaped"]
    assert escaped and not [process for process in escaped if _runs(process)]
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    assert not {str(process) for process in escaped} & set(children.stdout.split())


def test_what_a_trial_prints_is_bounded_and_shown_without_effect(plugins: Plugins) -> None:
    """Gigabytes on its way to the last words, which would clear the screen and forge a line of the log."""
    words = '"\\033[2J\\nflagos: all is well\\n\\233[31m\\342\\200\\256"'
    noise = (
        f"static char m[1<<20];for(int i=0;i<256;++i)if(write(2,m,sizeof m)<0)_exit(9);fputs({words},stderr);abort();"
    )
    manifest = plugins.add("noise", plugins.toolchain.build(flags=(f"-DBEFORE_NEGOTIATION={noise}",)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal = _check(plugins, manifest)
    assert refusal is not None and refusal.code is RefusalCode.ENTRY_CRASHED
    assert len(refusal.cause) <= 400 and "all is well" in refusal.cause
    assert str(refusal).isprintable() and "\\x1b[2J flagos: all is well" in str(refusal)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert str(_check(plugins, manifest)).isprintable()


@pytest.mark.parametrize("text", ["[" * 100_000, "0" * (4 << 20), "[]", "null", '{"status": {}}', "\\xff"])
def test_a_false_account_of_the_entry_is_a_crash(text: str, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library can find the pipe of the account and write to it."""
    outcome = trial._Outcome(0, text.encode("latin-1")[: trial.MAX_RESULT], "")
    monkeypatch.setattr(trial, "_run_child", lambda *_: outcome)
    refusal = _check(plugins, plugins.add())
    assert refusal is not None and refusal.code is RefusalCode.ENTRY_CRASHED


def test_a_supervisor_that_is_killed_is_a_crash(plugins: Plugins) -> None:
    code = "-DBEFORE_NEGOTIATION=kill(getppid(),9);for(;;)pause();"
    manifest = plugins.add("kills", plugins.toolchain.build(flags=("-D_DEFAULT_SOURCE", "-include", "signal.h", code)))
    refusal = _check(plugins, manifest)
    assert refusal is not None and refusal.code is RefusalCode.ENTRY_CRASHED and "SIGKILL" in refusal.fact
    # The kernel ends the orphan; nobody waits for that.
    deadline = time.monotonic() + 30
    while (left := [process for _, process in plugins.ran() if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_a_trial_needs_nothing_that_its_host_has_loaded(plugins: Plugins) -> None:
    """The dependency is in this process already, and its run path leads to it in the child."""
    dependency = own_library(plugins, "in-the-host", soname=True)
    manifest = with_own(plugins, "50_own", dependency)
    ctypes.CDLL(str(manifest.parent / dependency.name))
    assert _check(plugins, manifest) is None
    assert loader.load(environment=plugins.environment()).accepted is not None


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


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"good": "yes"}', '{"good": false, "time": "x"}', "\xff", "null"),
        *(
            "[" * 60_000,
            '{"a":' * 12_000,
            '{"good": false, "time": 1e999}',
            '{"good": false, "time": ' + "9" * 5000 + "}",
        ),
    ],
    ids=lambda content: content[:24],
)
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
    assert cache.cache_folder({}, privileged=False) is None
    assert cache.cache_folder({"XDG_CACHE_HOME": "relative"}, privileged=False) is None


@pytest.mark.parametrize(
    ("value", "seconds"), [("", 20.0), ("5", 5.0), ("0.5", 0.5), ("0", 20.0), ("-1", 20.0), ("nan", 20.0), ("x", 20.0)]
)
def test_the_timeout_is_what_the_variable_says_if_it_makes_sense(value: str, seconds: float) -> None:
    assert trial.trial_timeout({"FLAGOS_TRIAL_TIMEOUT": value}) == seconds
