"""What a hostile backend tries in a process of its own fails, by what the kernel of this machine offers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu.native.harness import get, put
from flagos_backend.cli.devices import describe_devices
from flagos_backend.cli.main import main
from plugin_abi import isolation, landlock, loader, rights, seccomp, trial
from plugin_abi.errors import RefusalCode
from plugin_abi.host import Context, Executable
from plugin_abi.rights import Limits, Offer, SettingError
from support import isolation as isolated
from unit.plugin_abi.plugins import Plugins, Toolchain

LIMITS = {"memory_bytes": 400 << 20, "open_files": 100}


@dataclass(frozen=True)
class Place:
    """A hostile backend's plugin, beside the home of its user."""

    plugins: Plugins
    home: Path
    cache: Path

    def load(self, variables: dict[str, str] | None = None, **isolated_fields: Any) -> loader.LoadResult:
        """A backend that no test has loaded: a loader keeps those that it accepted."""
        number = len(list(self.plugins.folder.glob("*.d")))
        self.plugins.add(
            library=self.plugins.toolchain.build_hostile(), folder=f"{number}.d",
            file_format_version="1.1.0", isolation="process", isolated=isolated_fields,
        )  # fmt: skip
        folder = str(self.plugins.folder / f"{number}.d")
        given = {"HOME": str(self.home), "FLAGOS_DRIVER_FILES": folder, **(variables or {})}
        return loader.load(environment=self.plugins.environment(**given))

    def context(self, variables: dict[str, str] | None = None, **isolated_fields: Any) -> Context:
        result = self.load(variables, **isolated_fields)
        assert result.accepted is not None, result.refusals
        return Context(result.accepted)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("rights")
    (folder / "libraries").mkdir()
    home = folder / "home"
    home.mkdir()
    (home / "secret").write_text("x")
    return Place(Plugins(Toolchain(folder / "libraries"), folder), home, home / ".cache" / "flagos")


@pytest.fixture(params=["landlock and seccomp", "landlock", "seccomp", "nothing"])
def offer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """What the kernel offers, and less of it."""
    if "landlock" in request.param and landlock.version() < 6:
        pytest.skip(f"Landlock is {landlock.version()} here, not 6: {landlock.absence() or 'an older kernel'}")
    if "seccomp" in request.param and seccomp.absence():
        pytest.skip(seccomp.absence())
    offered = Offer(landlock.version() if "landlock" in request.param else 0, "seccomp" in request.param)
    monkeypatch.setattr(rights.Offer, "current", lambda: offered)
    return offered


#: Each deed, and what alone would be enough to deny it. `{host}` is this process, `{home}` a folder with a secret.
DEEDS = {
    "read {home}/secret": "landlock",
    "list {home}": "landlock",
    "write {home}/made": "landlock",
    "remove {home}/made": "landlock",
    "write {home}/../made": "landlock",
    "read /proc/{host}/environ": "landlock",
    "chmod {home}/secret": "seccomp",
    "socket": "seccomp",
    "unix_socket": "seccomp",
    "fork": "seccomp",
    "run /bin/true": "landlock seccomp",
    "new_user": "seccomp",
    "ptrace {other}": "landlock seccomp",
    "peek {other}": "landlock seccomp",
    "signal {host}": "landlock seccomp",
    "signal_thread {host}": "landlock seccomp",
    "signal_by_file {host}": "landlock seccomp",
    "limit_of {other}": "seccomp",
    "keyring": "seccomp",
    "bpf": "seccomp",
    "ring": "seccomp",
    "mount": "seccomp",
    "type": "seccomp",
    "memory 2000": "limits",
    "files 200": "limits",
    "variable SECRET_TOKEN": "environment",
}
#: What fails for a reason of its own, too: for who is not root, or has neither terminal nor session.
NEEDS_MORE = {"mount", "bpf", "keyring", "type", "peek {other}", "new_user", "ring", "ptrace {other}"}


#: What of the deeds above the filter denies by itself, each of which is reported.
REPORTED = (
    *("chmod", "socket", "clone", "unshare", "ptrace", "process_vm_readv", "kill", "tkill", "pidfd_send_signal"),
    *("prlimit64", "keyctl", "bpf", "io_uring_setup", "mount", "ioctl"),
)


@pytest.fixture
def other() -> Iterator[int]:
    """A process of the same user."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


def test_what_a_hostile_backend_tries_fails(
    place: Place, offer: Offer, other: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    capfd.readouterr()
    held = {"limits", "environment"}
    held |= {"landlock"} if offer.landlock else set()
    held |= {"seccomp"} if offer.seccomp else set()
    with place.context(limits=LIMITS) as context:
        assert isolated.came_of(context, "read /etc/hostname") in ("read: done", "read: No such file or directory")
        for form, holders in DEEDS.items():
            deed = form.format(home=place.home, host=os.getpid(), other=other)
            answer = isolated.came_of(context, deed)
            if held & set(holders.split()):
                assert answer != f"{deed.split()[0]}: done", (deed, offer)
            elif form not in NEEDS_MORE:
                # Then it is the kernel's offer that the test saw denied above.
                assert answer == f"{deed.split()[0]}: done", (deed, offer)
        assert context.devices[0].attributes[isolation.PROCESS_ATTRIBUTE]
        buffer = put(context.devices[0].default_memory, np.ones(4, np.float32))
        outputs, _ = Executable.compile(context, b"scale 3").execute([[buffer]])
        np.testing.assert_array_equal(get(outputs[0][0]), np.full(4, 3, np.float32))
        process = isolated.process_of(context)
    reports = [line for line in capfd.readouterr().err.splitlines() if line.startswith("flagos: the backend's process")]
    denied = {name: f"flagos: the backend's process {process} was denied {name}" for name in REPORTED}
    for name, line in denied.items():
        assert (reports.count(line) == 1) == offer.seccomp, (name, reports)


@pytest.mark.parametrize("offer", ["landlock and seccomp"], indirect=True)
def test_a_backend_may_what_its_manifest_needs_and_no_more(place: Place, offer: Offer, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    with place.context(needs=["exec"]) as context:
        assert isolated.came_of(context, "run /bin/true") == "run: done"
        # A program of the user's, one that the backend has made, and what a program might do that the backend may not.
        assert isolated.came_of(context, f"run {program}") == "run: Permission denied"
        assert isolated.came_of(context, f"write {place.cache}/made") == "write: done"
        (place.cache / "made").chmod(0o755)
        assert isolated.came_of(context, f"run {place.cache}/made") == "run: Permission denied"
        for deed in ("socket", f"signal {os.getpid()}", f"signal -{os.getpgid(0)}"):
            assert isolated.came_of(context, deed).endswith("Operation not permitted")
        assert isolated.came_of(context, f"list {place.home}") == "list: Permission denied"
    with place.context(needs=["network"]) as context:
        assert isolated.came_of(context, "socket") == "socket: done"
        assert isolated.came_of(context, "exec /bin/true") == "exec: Operation not permitted"
    with place.context({rights.NEEDS_VARIABLE: "network"}) as context:
        assert isolated.came_of(context, "socket") == "socket: done"
        assert isolated.came_of(context, "exec /bin/true") == "exec: Operation not permitted"


@pytest.mark.parametrize("offer", ["nothing", "landlock and seccomp"], indirect=True)
def test_who_wants_all_or_nothing_is_told(place: Place, offer: Offer) -> None:
    result = place.load({rights.RIGHTS_VARIABLE: "required"})
    if offer.seccomp:
        assert result.accepted is not None, result.refusals
        return
    (refusal,) = result.refusals
    assert refusal.code is RefusalCode.ISOLATION_UNAVAILABLE
    assert "no Landlock" in refusal.fact and "no seccomp" in refusal.fact
    described = "\n".join(rights.describe({rights.RIGHTS_VARIABLE: "required"}))
    assert "not here: files of the user" in described and "required refuses it" in described


def test_the_user_may_give_his_own_rights_and_bounds(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    variables = {rights.RIGHTS_VARIABLE: "user", rights.LIMITS_VARIABLE: "open_files=64"}
    with place.context(variables, limits={"open_files": 1000}) as context:
        for deed in (f"read {place.home}/secret", "socket", "run /bin/true", "variable SECRET_TOKEN"):
            assert isolated.came_of(context, deed) == f"{deed.split()[0]}: done"
        assert isolated.came_of(context, "files 80") == "files: Too many open files"


#: Ends the trial load where it succeeds, which a trial reports.
TRIES_AT_ENTRY = {
    "landlock": 'if(open("{home}/secret",O_RDONLY)>=0)abort();',
    "seccomp": "if(socket(AF_INET,SOCK_STREAM,0)>=0)abort();",
    "environment": 'if(getenv("SECRET_TOKEN"))abort();',
}


@pytest.mark.parametrize("offer", ["landlock and seccomp"], indirect=True)
@pytest.mark.parametrize("deed", TRIES_AT_ENTRY)
def test_a_trial_has_the_rights_of_the_process_that_follows(
    place: Place, offer: Offer, deed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a library's entry, which `flagos check` calls in no process but that of the trial."""
    monkeypatch.setenv("SECRET_TOKEN", "x")
    includes = [word for name in ("fcntl", "stdlib", "sys/socket") for word in ("-include", f"{name}.h")]
    code = "-DBEFORE_NEGOTIATION=" + TRIES_AT_ENTRY[deed].replace("{home}", str(place.home))
    plugins = Plugins(place.plugins.toolchain, place.plugins.folder / deed)
    path = plugins.add(
        library=plugins.toolchain.build(flags=("-D_DEFAULT_SOURCE", *includes, code)),
        file_format_version="1.1.0", isolation="process",
    )  # fmt: skip
    given = {"HOME": str(place.home)}
    assert loader.check(path, environment=plugins.environment(**given)) is None
    assert trial.denied(path) == (("socket",) if deed == "seccomp" else ())
    for name, value in ((rights.RIGHTS_VARIABLE, "user"), (isolation.MODE_VARIABLE, "none")):
        refusal = loader.check(path, environment=plugins.environment(**given, **{name: value}))
        assert refusal is not None and refusal.code is RefusalCode.ENTRY_CRASHED, (name, refusal)


@pytest.mark.parametrize("offer", ["landlock and seccomp"], indirect=True)
def test_the_tools_say_what_a_backend_was_denied_at_its_start(place: Place, offer: Offer) -> None:
    code = "-DBEFORE_NEGOTIATION=socket(AF_INET,SOCK_STREAM,0);"
    plugins = Plugins(place.plugins.toolchain, place.plugins.folder / "at its start")
    library = plugins.toolchain.build(flags=("-D_DEFAULT_SOURCE", "-include", "sys/socket.h", code))
    plugins.add(library=library, file_format_version="1.1.0", isolation="process")
    result = loader.load(environment=plugins.environment(HOME=str(place.home)))
    assert result.accepted is not None, result.refusals
    with Context(result.accepted) as context:
        assert context.devices[0].attributes[isolation.DENIED_ATTRIBUTE] == "socket"
        told = f"in a process of its own ({isolated.process_of(context)}), which was denied socket"
        assert describe_devices(context)[-1] == told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((rights.RIGHTS_VARIABLE, value) for value in ("none", "leest")),
        *((rights.LIMITS_VARIABLE, value) for value in ("memory=1G", "memory_bytes", "open_files=-3", "open_files=1Q")),
        *((rights.NEEDS_VARIABLE, value) for value in ("networks", "exec network")),
    ],
)
def test_settings_that_nobody_knows_are_refusals(place: Place, name: str, value: str) -> None:
    (refusal,) = place.load({name: value}).refusals
    assert refusal.code is RefusalCode.ISOLATION_UNAVAILABLE
    assert name in refusal.fact and value in refusal.fact
    assert name in rights.describe({name: value})[0]


def test_the_tools_say_what_holds(place: Place, offer: Offer, capsys: pytest.CaptureFixture[str]) -> None:
    path = place.plugins.add(
        library=place.plugins.toolchain.build_hostile(), folder=f"check {offer.landlock} {offer.seccomp}",
        file_format_version="1.1.0", isolation="process", isolated={"needs": ["network"], "limits": LIMITS},
    )  # fmt: skip
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "in a process of its own, which needs network\n" in out
    assert "limits: memory_bytes 419430400, open_files 100\n" in out
    assert ("(seccomp)" in out, "no seccomp" in out) == (offer.seccomp, not offer.seccomp)
    assert ("(Landlock" in out, "no Landlock" in out) == (offer.landlock > 0, offer.landlock == 0)


def test_limits_are_the_smaller_of_the_two() -> None:
    of_user = rights.user_limits({rights.LIMITS_VARIABLE: "memory_bytes=2G, open_files=80 ,cpu_seconds=60"})
    assert of_user == Limits(memory_bytes=2 << 30, open_files=80, cpu_seconds=60)
    both = Limits(memory_bytes=1 << 30, open_files=100, file_bytes=5).within(of_user)
    assert both == Limits(memory_bytes=1 << 30, open_files=80, cpu_seconds=60, file_bytes=5)
    with pytest.raises(SettingError):
        rights.user_limits({rights.LIMITS_VARIABLE: "memory_bytes=²"})


def test_no_rule_opens_the_home(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python imports from it, or the library lies in it: then only that file."""
    monkeypatch.setattr(sys, "path", [str(place.home), *sys.path])
    library = place.home / "lib.so"
    library.touch()
    variables = {
        "HOME": str(place.home),
        "LD_LIBRARY_PATH": f"{place.home}:/",
        "FLAGOS_DUMP_TO": str(place.home.parent),
    }
    decided = rights.rights_of(rights.Asked(), [library], place.home, variables, privileged=False)
    assert decided is not None
    opened = {Path(path) for path in (*decided.readable, *decided.writable)}
    assert library in opened
    assert not opened & {place.home, *place.home.parents}
    assert decided.writable == (str(place.cache),)


def test_a_filter_denies_with_a_reason_and_no_other_machine_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = seccomp.filter_program(1234, 1, programs=False, network=False)
    assert len(strict) % 8 == 0 and len(strict) // 8 < 4096  # the kernel's bound
    assert len(seccomp.filter_program(1234, 1, programs=True, network=True)) < len(strict)
    uname = os.uname()
    other = os.uname_result((*uname[:4], "riscv64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    assert "riscv64" in seccomp.absence()
