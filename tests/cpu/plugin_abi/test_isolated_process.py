"""A backend's own process is watched: one that hangs or stops is ended, its last lines are told, and it has nothing
that the host did not mean for it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cpu.native.harness import get, put
from plugin_abi import isolation, loader
from plugin_abi.errors import FlagosStatusError, Refusal, RefusalCode, StatusCode
from plugin_abi.host import Context, ElementType, Executable
from support import isolation as isolated
from unit.plugin_abi.plugins import Toolchain


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Toolchain(tmp_path_factory.mktemp("libraries")).build_hostile()


def backend_of(library: Path, environment: list[str] | None = None, **patience: float) -> loader.Backend:
    command = isolated.light_command(library)
    backend = isolated.backend_of(command, isolation.Patience(**patience), environment)
    assert isinstance(backend, loader.Backend), backend
    return backend


@pytest.fixture(scope="module")
def impatient(hostile: Path) -> loader.Backend:
    return backend_of(hostile, silence=2.0, hang=1.5)


def test_a_call_without_an_answer_ends_the_process(impatient: loader.Backend) -> None:
    with Context(impatient) as context:
        began = time.monotonic()
        message = isolated.came_of(context, "hang")
        assert time.monotonic() - began < 60
        assert "did not answer a call within 1.5 s, the limit that FLAGOS_ISOLATION_TIMEOUT" in message
        with pytest.raises(FlagosStatusError, match="did not answer a call") as later:
            put(context.devices[0].default_memory, np.ones(3))
        assert later.value.code == StatusCode.UNAVAILABLE
    with Context(impatient) as fresh:
        assert isolated.came_of(fresh, "thread") == "thread: done"


def test_a_process_that_is_stopped_gives_no_sign_of_life(hostile: Path) -> None:
    """Without a limit for calls, too: nobody waits for what is dead."""
    with Context(backend_of(hostile, silence=2.0)) as context:
        assert "gave no sign of life for 2 s" in isolated.came_of(context, "stop")
        assert isolated.comes_true(lambda: isolated.has_ended(isolated.process_of(context)))


#: Answers calls as argv[1] says (JSON: replies by method, in hexadecimal), gives signs of life, and completes nothing.
PROCRASTINATOR = """
import array, json, socket, struct, sys, threading, time
answers = json.loads(sys.argv[1])
sys.path.append(answers["support"])
import isolation_ring
header = struct.Struct("=IIQ")
def frame(message, sequence=0): return header.pack(0x31474C46, len(message), sequence) + message
read = isolation_ring.read_exactly
def serve(end):
    channel = isolation_ring.Channel.join(end)
    while True:
        message, sequence = channel.receive()
        method = str(message[1])
        if method not in ("6", "12", "24"): channel.send(bytes.fromhex(answers.get(method, "")), sequence)
def live():
    while True:
        time.sleep(0.3)
        events.sendall(frame(b""))
events = socket.socket(fileno=int(sys.argv[2]))
read(events, header.unpack(read(events, header.size))[1])
events.sendall(frame(bytes.fromhex(answers["greeting"])))
threading.Thread(target=live, daemon=True).start()
while True:
    data, rights, _, _ = events.recvmsg(header.size, socket.CMSG_SPACE(4))
    for _, _, number in rights:
        channel = socket.socket(fileno=array.array("i", number)[0])
        threading.Thread(target=serve, args=(channel,), daemon=True).start()
    if not data: break
"""


def procrastinator() -> loader.Backend:
    kinds = isolated.messages()
    abi = dict.fromkeys(("version_min", "version_max", "version"), 1 << 16)
    context = kinds["Context"](platform_name=b"flagos", platform_version=b"1", addressable_devices=[0])
    context.devices.add(
        is_addressable=1, kind=b"slow", debug_string=b"d", to_string=b"d", memories=[0], default_memory=1
    )
    context.memories.add(kind=b"device", debug_string=b"m", to_string=b"m", devices=[0])
    buffer = kinds["Reply"](buffers=[kinds["Buffer"](element_type=11, size_bytes=16, device=1, memory=1, dims=[4])])
    replies = {"1": kinds["Reply"](context=context), "9": buffer, "10": buffer}
    answers = {method: reply.SerializeToString().hex() for method, reply in replies.items()}
    answers["support"] = str(Path(isolated.__file__).parent)
    answers["greeting"] = (
        kinds["Hello"](wire_version=5, **abi, name="slow", platform="flagos").SerializeToString().hex()
    )
    command = [sys.executable, "-I", "-S", "-c", PROCRASTINATOR, json.dumps(answers)]
    backend = isolated.backend_of(command, isolation.Patience(silence=2.0, hang=1.0))
    assert isinstance(backend, loader.Backend), backend
    return backend


def test_what_waits_for_the_host_is_no_hang_and_what_waits_for_nothing_is_one() -> None:
    with Context(procrastinator()) as context:
        memory = context.devices[0].default_memory
        time.sleep(3)  # idle: nothing is owed
        promise = memory.promise((4,), ElementType.F32)
        pending = memory.allocate((4,), ElementType.F32).ready_event()
        time.sleep(3)
        assert not pending.query()[0]
        gate = context.create_event()
        promise.fulfill(memory.allocate((4,), ElementType.F32))
        time.sleep(2)
        assert not pending.query()[0]
        gate.set(None)
        with pytest.raises(
            FlagosStatusError, match="completed no launch and no transfer within 1 s, the limit"
        ) as error:
            pending.wait(60)
        assert error.value.code == StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("name", "value"), [("FLAGOS_ISOLATION_TIMEOUT", "soon"), ("FLAGOS_ISOLATION_SILENCE", "-1")])
def test_a_limit_that_is_none_is_a_refusal(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A backend that is there already keeps the limits that it began with.
    monkeypatch.setattr(loader._state, "isolated", {})
    result = loader.load(environment=isolated.environment(**{name: value}))
    refusal = result.refusals[0]
    assert isinstance(refusal, Refusal) and refusal.code is RefusalCode.ISOLATION_UNAVAILABLE
    assert name in refusal.fact and value in refusal.fact


def test_the_last_lines_are_in_the_error(hostile: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Context(backend_of(hostile)) as context:
        message = isolated.came_of(context, "say chip on fire")
    assert "was ended by signal 6" in message
    assert 'It wrote last: "first line | chip on fire\\x1b[31m".' in message
    assert "chip on fire" in capfd.readouterr().err
    noisy = ["python3", "-c", "import sys; sys.stderr.write('x' * 100_000 + 'end'); sys.exit(5)"]
    why = str(isolated.backend_of(noisy))
    assert "ended with exit status 5" in why and 'xxxend"' in why and len(why) < 1200


CHILD_FACTS = """
import os, resource, signal, sys
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
status = open("/proc/self/status").read()
def of(name): return status.split(name + ":")[1].split()[0]
mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
sys.stderr.write(repr((files[:4], len(files), of("NoNewPrivs"), resource.getrlimit(resource.RLIMIT_CORE), len(mask),
                       os.getpgid(0) == os.getpid(), sorted(n for n in os.environ if n.startswith("SECRET_")))))
sys.exit(5)
"""


def test_the_process_has_nothing_that_was_not_meant_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("SECRET_SHARED", "x")
    inherited = os.dup(0)
    os.set_inheritable(inherited, True)
    patterns = ["PATH", "LD_*", "SECRET_SH*", "HOME"]
    for environment, secrets in ((None, ["SECRET_SHARED", "SECRET_TOKEN"]), (patterns, ["SECRET_SHARED"])):
        why = str(isolated.backend_of(["python3", "-c", CHILD_FACTS], environment=environment))
        assert repr(([0, 1, 2, 3], 5, "1", (0, 0), 0, True, secrets)) in why
    os.close(inherited)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_what_the_process_has_started_ends_with_it(hostile: Path, end: signal.Signals) -> None:
    """A program that it runs, for as long as its rights are its user's."""
    command = isolated.light_command(hostile)
    command[4] = "import subprocess\nsleeping = subprocess.Popen(['sleep', '1000'])\n" + command[4]
    backend = isolated.backend_of(command, isolation.Patience(silence=2.0))
    assert isinstance(backend, loader.Backend), backend
    with Context(backend) as context:
        process = isolated.process_of(context)
        (started,) = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        os.kill(process, end)

        def fails() -> bool:
            try:
                context.devices[0].memory_stats()
            except FlagosStatusError:
                return True
            return False

        assert isolated.comes_true(fails)  # a signal takes its time
        assert isolated.comes_true(lambda: isolated.has_ended(started))


def test_the_process_outlives_the_thread_that_made_its_client(hostile: Path) -> None:
    made: list[Context] = []
    thread = threading.Thread(target=lambda: made.append(Context(backend_of(hostile))))
    thread.start()
    thread.join()
    time.sleep(0.5)
    with made[0] as context:
        assert isolated.came_of(context, "thread") == "thread: done"


def test_a_compiled_program_still_runs(hostile: Path) -> None:
    with Context(backend_of(hostile)) as context:
        buffer = put(context.devices[0].default_memory, np.ones(4, np.float32))
        outputs, _ = Executable.compile(context, b"scale 3").execute([[buffer]])
        np.testing.assert_array_equal(get(outputs[0][0]), np.full(4, 3, np.float32))
