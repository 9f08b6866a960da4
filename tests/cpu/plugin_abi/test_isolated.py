"""A backend in a process of its own computes as one in this process, and whatever becomes of it is an error here."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu.native.harness import LOOP, add_one, get, program, put
from plugin_abi import isolation, loader
from plugin_abi.errors import FlagosStatusError, RefusalCode, StatusCode
from plugin_abi.host import Artifact, Context, ElementType, Executable, Memory
from support import isolation as isolated
from support import isolation_ring
from unit.plugin_abi.plugins import Plugins, Toolchain

SEGMENT_ELEMENTS = 300_000  # above what a message carries


@pytest.fixture(scope="module")
def backend() -> loader.Backend:
    accepted = loader.load(environment=isolated.environment()).accepted
    assert accepted is not None
    return accepted


@pytest.fixture(scope="module")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> loader.Backend:
    library = Toolchain(tmp_path_factory.mktemp("libraries")).build()
    backend = isolated.backend_of(isolated.light_command(library))
    assert isinstance(backend, loader.Backend), backend
    return backend


@pytest.fixture
def context(backend: loader.Backend) -> Iterator[Context]:
    with Context(backend) as context:
        yield context


def memory_of(context: Context) -> Memory:
    return context.addressable_devices[0].default_memory


def process_of(context: Context) -> int:
    number = context.devices[0].attributes["isolated_process_id"]
    assert isinstance(number, int)
    return number


def unavailable(error: FlagosStatusError) -> str:
    assert error.code == StatusCode.UNAVAILABLE, error
    return error.message


def test_the_library_is_in_no_map_of_this_process() -> None:
    code = (
        "from plugin_abi import loader; from plugin_abi.host import Context; result = loader.load()\n"
        "with Context(result.accepted) as context: print(context.platform_version != '')\n"
        "print('libflagos_backend' in open('/proc/self/maps').read())"
    )
    environment = {**os.environ, isolation.MODE_VARIABLE: "process"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\nFalse\n"), done.stderr


def test_a_program_runs_and_takes_what_is_donated(context: Context, rng: np.random.Generator) -> None:
    for elements in (1, 1000, SEGMENT_ELEMENTS):
        executable = Executable.compile(context, program(add_one(elements)))
        array = rng.standard_normal(elements).astype(np.float32)
        argument = put(memory_of(context), array)
        outputs, done = executable.execute([[argument]])
        done[0].wait(60)
        np.testing.assert_array_equal(get(outputs[0][0]), array + np.float32(1))
        assert argument.is_deleted
        kept = put(memory_of(context), array)
        again, _ = executable.execute([[kept]], non_donatable=[0])
        np.testing.assert_array_equal(get(again[0][0]), array + np.float32(1))
        np.testing.assert_array_equal(get(kept), array)


@pytest.mark.parametrize("elements", [0, 7, SEGMENT_ELEMENTS])
def test_contents_of_any_layout_come_back(context: Context, rng: np.random.Generator, elements: int) -> None:
    for dtype in (np.uint8, np.float64, np.complex128, np.bool_):
        array = rng.integers(0, 2, (2, elements, 2)).astype(dtype)
        for view in (array, array[::-1, :, ::-1], array.transpose(2, 1, 0), np.broadcast_to(array[:1], array.shape)):
            np.testing.assert_array_equal(get(put(memory_of(context), view)), view)


def test_large_contents_arrive_at_every_alignment_and_leave_nothing(context: Context, rng: np.random.Generator) -> None:
    memory, device = memory_of(context), context.addressable_devices[0]
    before = device.memory_stats().bytes_in_use
    data = np.frombuffer(rng.bytes(SEGMENT_ELEMENTS + 5), np.uint8)
    buffer = put(memory, data)
    address = np.empty(2 * len(data), np.uint8)
    for offset in (*range(34), 4064, 4095):
        start = -address.ctypes.data % 4096 + offset
        into = address[start : start + len(data)]
        buffer.to_host_async(into).wait(60)
        np.testing.assert_array_equal(into, data)
        assert bytes(buffer.read_raw(offset, len(data) - offset - 1)) == data[offset:-1].tobytes()
    buffer.close()
    assert isolated.comes_true(lambda: device.memory_stats().bytes_in_use == before)


def test_what_is_being_read_stays_although_its_buffer_goes(context: Context, rng: np.random.Generator) -> None:
    memory = memory_of(context)
    array = rng.standard_normal(SEGMENT_ELEMENTS).astype(np.float32)
    promise, into = memory.promise(array.shape, ElementType.F32), np.zeros_like(array)
    read = promise.to_host_async(into)
    assert not read.query()[0]
    promise.fulfill(put(memory, array))
    promise.close()
    read.wait(60)
    np.testing.assert_array_equal(into, array)


def test_what_a_device_has_done_is_known_once_it_is_synchronized(context: Context) -> None:
    executable = Executable.compile(context, program(LOOP))
    for _ in range(20):
        outputs, done = executable.execute([[put(memory_of(context), np.full((64, 64), 200, np.float32))]])
        context.devices[0].synchronize()
        assert done[0].query() == (True, None)
        assert outputs[0][0].ready_event().query() == (True, None)


def test_many_calls_without_a_reply_fill_the_ring_and_arrive(context: Context) -> None:
    memory = memory_of(context)
    device = context.addressable_devices[0]
    before = device.memory_stats().bytes_in_use
    buffers = [memory.allocate((1024,), ElementType.U8) for _ in range(4000)]
    assert device.memory_stats().bytes_in_use >= before + 4000 * 1024
    events = [context.create_event() for _ in range(4000)]
    events.clear()
    buffers.clear()
    assert isolated.comes_true(lambda: device.memory_stats().bytes_in_use <= before)


def test_raw_bytes_promises_and_copies(context: Context, rng: np.random.Generator) -> None:
    memory = memory_of(context)
    data = rng.bytes(SEGMENT_ELEMENTS)
    buffer = memory.allocate((len(data),), ElementType.U8)
    buffer.write_raw(data)
    assert bytes(buffer.read_raw(5, len(data) - 9)) == data[5:-4]
    promise = memory.promise((len(data),), ElementType.U8)
    copy = promise.copy_to(memory)
    assert not copy.ready_event().query()[0]
    promise.fulfill(buffer)
    assert bytes(copy.to_host()) == data
    gate = context.create_event()
    donated = buffer.donate(gate)
    assert not donated.ready_event().query()[0]
    gate.set(None)
    assert bytes(donated.to_host()) == data
    failed = memory.promise((1,), ElementType.U8, FlagosStatusError(StatusCode.DATA_LOSS, "it went away"))
    with pytest.raises(FlagosStatusError, match="it went away"):
        failed.to_host()


def test_a_serialized_executable_loads_in_the_next_process(backend: loader.Backend, rng: np.random.Generator) -> None:
    array = rng.standard_normal(5).astype(np.float32)
    with Context(backend) as first:
        text = Executable.compile(first, program(add_one(5))).artifact(Artifact.SERIALIZED)
    with Context(backend) as one, Context(backend) as other:  # at once, so that the second has a process of its own
        for context in (one, other):
            outputs, _ = Executable.load(context, text).execute([[put(memory_of(context), array)]])
            np.testing.assert_array_equal(get(outputs[0][0]), array + np.float32(1))


def test_what_is_not_isolated_is_refused_by_name(context: Context) -> None:
    memory = memory_of(context)
    buffer = put(memory, np.ones(3, np.float32))
    refusals: dict[str, Callable[[], object]] = {
        "buffer_pointer": buffer.pointer_address,
        "buffer_view": lambda: memory.view(0, (3,), ElementType.F32),
    }
    for name, refused in refusals.items():
        with pytest.raises(FlagosStatusError, match=name) as error:
            refused()
        assert error.value.code == StatusCode.UNIMPLEMENTED
        assert "FLAGOS_ISOLATION=none" in error.value.message


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_process_that_ends_fails_what_is_under_way_and_the_next_client_works(
    backend: loader.Backend, number: signal.Signals
) -> None:
    with Context(backend) as context:
        memory = memory_of(context)
        executable = Executable.compile(context, program(LOOP))
        buffer = put(memory, np.full((64, 64), 10_000, np.float32))
        outputs, done = executable.execute([[buffer]])
        promise = memory.promise((2,), ElementType.F32)
        heard: list[FlagosStatusError | None] = []
        promise.ready_event().on_ready(heard.append)
        process = process_of(context)
        os.kill(process, number)
        for wait in (lambda: done[0].wait(60), lambda: outputs[0][0].wait(60), lambda: promise.wait(60)):
            with pytest.raises(FlagosStatusError) as failed:
                wait()
            message = unavailable(failed.value)
            assert f"process {process} was ended by signal {int(number)}" in message
        for later in (buffer.to_host, lambda: put(memory, np.ones(2)), lambda: executable.execute([[buffer]])):
            with pytest.raises(FlagosStatusError) as failed:
                later()
            unavailable(failed.value)
        assert heard and heard[0] is not None and "signal" in heard[0].message
        buffer.delete()
    with Context(backend) as fresh:
        assert process_of(fresh) != process
        np.testing.assert_array_equal(get(put(memory_of(fresh), np.arange(3))), np.arange(3))


def test_a_process_that_ends_by_itself_gives_its_exit_status(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(7)"]
    assert "ended with exit status 7" in str(isolated.backend_of(command))
    assert "cannot be started" in str(isolated.backend_of([str(tmp_path / "nothing")]))
    silent = [sys.executable, "-c", "import time; time.sleep(100)"]
    assert "did not answer within 1 s, and was ended" in str(isolated.backend_of(silent, isolation.Patience(start=1.0)))


def test_kills_at_random_moments_are_errors_and_leave_nothing(
    minimal: loader.Backend, rng: np.random.Generator
) -> None:
    before = isolated.shared_memory()
    array = rng.standard_normal(SEGMENT_ELEMENTS).astype(np.float32)
    failures = 0
    for delay in rng.uniform(0, 0.02, 50):
        with Context(minimal) as context:
            killer = threading.Timer(delay, os.kill, (process_of(context), signal.SIGKILL))
            killer.start()
            failures += _work_until_it_fails(context, array)
            killer.join()
    assert failures == 50
    assert isolated.comes_true(lambda: isolated.shared_memory() <= before)
    assert isolated.comes_true(lambda: not any("FlagosServe" in _command(child) for child in isolated.children()))


def _work_until_it_fails(context: Context, array: np.ndarray) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            memory = memory_of(context)
            executable = Executable.compile(context, b"scale 2")
            small = put(memory, np.ones(4, np.float32))
            outputs, done = executable.execute([[small]])
            done[0].wait(60)
            np.testing.assert_array_equal(get(outputs[0][0]), np.full(4, 2, np.float32))
            np.testing.assert_array_equal(get(put(memory, array)), array)
        except FlagosStatusError as error:
            assert "was ended by signal 9" in unavailable(error)
            return 1
    raise AssertionError("no kill was noticed")


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


HOST = """
import os, signal, sys
from plugin_abi import loader
from plugin_abi.host import Context
context = Context(loader.load().accepted)
if sys.argv[1] == "fork" and os.fork() == 0:
    try:
        context.devices[0].memory_stats()
    except RuntimeError as error:
        print(error, file=sys.stderr)
    os.close(1)  # lives on with copies of the host's sockets
    signal.pause()
print(context.devices[0].attributes["isolated_process_id"], flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] != "exit" else sys.exit()
"""


@pytest.mark.parametrize("end", ["exit", "kill", "fork"])
def test_the_process_ends_with_its_host(end: str) -> None:
    environment = {**os.environ, isolation.MODE_VARIABLE: "process"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", HOST, end], env=environment, text=True, start_new_session=True, **pipes
    ) as host:
        assert host.stdout is not None and host.stdin is not None and host.stderr is not None
        process = int(host.stdout.readline())
        if end == "fork":
            assert "was forked from" in host.stderr.readline()
        host.stdin.close()
        host.wait(60)
        assert isolated.comes_true(lambda: isolated.has_ended(process))
        if end == "fork":
            os.killpg(host.pid, signal.SIGKILL)


# ---- The wire -------------------------------------------------------------------------------------------------------


def greeting(**fields: object) -> bytes:
    """What a child of a host of today says."""
    abi = dict.fromkeys(("version_min", "version_max", "version"), 1 << 16)
    known: dict[str, object] = {"wire_version": 5, **abi, "name": "hostile", "platform": "flagos"}
    return isolated.messages()["Hello"](**(known | fields)).SerializeToString()


ANSWERS = """
import socket, sys
events = socket.socket(fileno=int(sys.argv[2]))
events.recv(65536)
events.sendall(bytes.fromhex(sys.argv[1]))
events.recv(65536)
"""


def test_another_version_of_the_wire_is_refused_by_name_on_both_sides(minimal: loader.Backend) -> None:
    newer = isolated.frame(greeting(wire_version=6)).hex()
    why = str(isolated.backend_of([sys.executable, "-c", ANSWERS, newer]))
    assert "speaks version 6 of the wire, this host version 5; install both from one build" in why
    ours, theirs = socket.socketpair()
    command = [*isolated.light_command(Path(minimal.place)), str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child, ours:
        theirs.close()
        ours.sendall(isolated.frame(greeting(wire_version=1)))
        answer = isolated.messages()["Hello"].FromString(ours.recv(65536)[isolated.HEADER.size :])
        assert (answer.wire_version, answer.name) == (5, "")
        assert "the host speaks version 1 of the wire, the backend's process version 5" in answer.refusal
        assert child.wait(60) == 2


def _answers() -> dict[str, Any]:
    """Sound answers of a backend with one device, to every call that the fuzz test makes."""
    kinds = isolated.messages()
    context = kinds["Context"](platform_name=b"flagos", platform_version=b"1", addressable_devices=[0])
    context.devices.add(
        is_addressable=1, kind=b"hostile", debug_string=b"d", to_string=b"d", memories=[0], default_memory=1
    )
    context.memories.add(kind=b"device", debug_string=b"m", to_string=b"m", devices=[0])
    buffer = kinds["Buffer"](element_type=11, size_bytes=16, device=1, memory=1, dims=[4])
    executable = kinds["Executable"](
        name=b"p", fingerprint=b"f", num_replicas=1, num_partitions=1, devices=[0], device_assignment=[0],
        output_types=[11], output_dims=[4], output_ranks=[1], output_memory_kinds=[b"device"], sizes=[0] * 6,
        argument_memory_kinds=[b"device"], argument_aliases=[0], output_shardings=[b""],
    )  # fmt: skip
    cost = executable.cost_analysis.add(name=b"flops", kind=3)
    cost.double_value = 1 << 62
    reply = kinds["Reply"]
    replies = {
        1: reply(context=context), 3: reply(numbers=[1, 2, 3, 4, 5]), 8: reply(buffers=[buffer], ready=[1, 2, 3, 4]),
        13: reply(ready=range(1, 40)), 14: reply(ready=range(1, 40), data=bytes(16)), 22: reply(executable=executable),
        26: reply(buffers=[buffer], ready=range(1, 40), deleted=[1, 2]), 25: reply(data=b"text"),
    }  # fmt: skip
    done = kinds["Done"](event=3, data=bytes(16))
    done.error.code = 3
    return {
        "greeting": greeting().hex(),
        "support": str(Path(isolated.__file__).parent),
        "done": done.SerializeToString().hex(),
        "replies": {str(method): message.SerializeToString().hex() for method, message in replies.items()},
    }


def test_no_answer_of_a_process_harms_the_host(tmp_path: Path) -> None:
    counter = tmp_path / "seed"
    counter.write_text("0")
    command = [sys.executable, "-I", "-S", "-c", isolated.HOSTILE_CHILD, json.dumps(_answers()), str(counter)]
    backend = isolated.backend_of(command)
    assert isinstance(backend, loader.Backend), backend
    counter.write_text(str(random.SystemRandom().randrange(1, 10**9)))
    print("first seed", counter.read_text())
    codes = set()
    for _ in range(20):
        try:
            with Context(backend) as context:
                for _ in range(4):
                    _use(context)
        except FlagosStatusError as error:
            assert error.code != StatusCode.DEADLINE_EXCEEDED, "a call that never ends"
            codes.add(error.code)
        except LookupError:
            continue  # a context without devices, which a backend may have: memory_of() finds none
    assert StatusCode.UNAVAILABLE in codes


def _use(context: Context) -> None:
    memory = memory_of(context)
    context.addressable_devices[0].memory_stats()
    small, large = put(memory, np.ones(4, np.float32)), put(memory, np.ones(SEGMENT_ELEMENTS))
    executable = Executable.compile(context, b"program")
    executable.describe()
    outputs, done = executable.execute([[small]])
    for event in (done[0], outputs[0][0].ready_event(), large.ready_event()):
        _await(event.wait)
    into = np.empty(4, np.float32)
    _await(outputs[0][0].to_host_async(into).wait)


def _await(wait: Callable[[float], None]) -> None:
    """A hostile process may leave an event open for ever, as a backend may in this process; no longer than it lives."""
    try:
        wait(0.05)
    except FlagosStatusError as error:
        if error.code != StatusCode.DEADLINE_EXCEEDED:
            raise


#: Says that it has written memory where none is.
LIES_ABOUT_ADDRESSES = """
import array, ctypes, json, socket, struct, sys
answers = json.loads(sys.argv[1])
sys.path.append(answers["support"])
import isolation_ring
def frame(message): return struct.pack("=IIQ", 0x31474C46, len(message), 0) + message
def varint(number): return bytes((number >> shift & 127) | 128 for shift in range(0, 63, 7)) + b"\\0"
events, here = socket.socket(fileno=int(sys.argv[2])), ctypes.create_string_buffer(1)
events.recv(65536)
events.sendall(frame(bytes.fromhex(answers["greeting"]) + b"\\x78" + varint(ctypes.addressof(here))))
data, rights, _, _ = events.recvmsg(16, socket.CMSG_SPACE(4))
channel = isolation_ring.Channel.join(socket.socket(fileno=array.array("i", rights[0][2])[0]))
while True:
    message, sequence = channel.receive()
    channel.send(bytes.fromhex(answers["replies"][str(message[1])]), sequence)
"""


def test_an_address_where_nothing_is_ends_the_process_that_gave_it() -> None:
    answers, reply = _answers(), isolated.messages()["Reply"]
    context = reply.FromString(bytes.fromhex(answers["replies"]["1"]))
    context.context.devices[0].is_host_memory = True
    made = reply(address=8)
    made.buffers.add(element_type=6, size_bytes=1 << 20, device=1, memory=1, dims=[1 << 20], is_ready=True)
    answers["replies"] = {
        "1": context.SerializeToString().hex(), "9": made.SerializeToString().hex(),
        "14": reply(ready=range(1, 40), address=2**63).SerializeToString().hex(),
    }  # fmt: skip
    for first in ("9", "14"):
        if first == "14":  # no buffer can be written otherwise
            answers["replies"]["9"] = reply(error={"code": 12}).SerializeToString().hex()
            answers["replies"]["8"] = reply(buffers=made.buffers, ready=range(1, 40)).SerializeToString().hex()
        backend = isolated.backend_of([sys.executable, "-S", "-c", LIES_ABOUT_ADDRESSES, json.dumps(answers)])
        assert isinstance(backend, loader.Backend), backend
        with Context(backend) as client, pytest.raises(FlagosStatusError) as failed:
            put(memory_of(client), np.zeros(1 << 20, np.uint8)).to_host()
        assert "an address of memory that is not there" in unavailable(failed.value)


def test_no_message_of_a_host_hangs_the_process(minimal: loader.Backend, rng: np.random.Generator) -> None:
    call = isolated.messages()["Call"]
    sound = [
        call(method=1), call(method=8, memory=1, element_type=11, dims=[4], size=16, data=bytes(16), made=[7]),
        call(method=14, object=7, event=9, size=16), call(method=22, data=b"scale 2", made=[8]),
        call(method=26, object=8, num_devices=1, arguments=[7], made=[20], event=30),
        call(method=99), call(method=12, object=7),
    ]  # fmt: skip
    ends = set()
    for _ in range(20):
        ours, theirs = socket.socketpair()
        command = [*isolated.light_command(Path(minimal.place)), str(theirs.fileno())]
        errors = subprocess.PIPE
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=errors) as child, ours:
            theirs.close()
            ours.sendall(isolated.frame(greeting()))
            ours.recv(65536)
            channel, other = socket.socketpair()
            with channel:
                socket.send_fds(ours, [isolated.frame(b"")], [other.fileno()])
                other.close()
                _send_spoiled(
                    isolation_ring.Channel.open(channel), [message.SerializeToString() for message in sound], rng
                )
            ours.close()
            ends.add(child.wait(60))
    assert ends <= {0, 2}
    assert 2 in ends


def _send_spoiled(channel: isolation_ring.Channel, sound: list[bytes], rng: np.random.Generator) -> None:
    draw = random.Random(int(rng.integers(2**32)))
    at = draw.randrange(len(sound))
    with contextlib.suppress(EOFError, ConnectionError):  # it has ended
        for index, message in enumerate(sound):
            if index == at:
                print(channel.send_spoiled(draw.choice((message, call_of_too_many())), index, draw))
                channel.socket.shutdown(socket.SHUT_WR)
                while True:
                    channel.receive()
            channel.send(message, index)
            if message[1] != 12:  # buffer_destroy
                channel.receive()


def call_of_too_many() -> bytes:
    """A launch on more devices than there are, of things that there are not."""
    call = isolated.messages()["Call"]
    return call(method=26, object=2**63, num_devices=2**62, arguments=[-1], device=2**40).SerializeToString()


# ---- How users choose -----------------------------------------------------------------------------------------------


def test_a_mode_that_nobody_knows_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "libraries").mkdir()
    plugins = Plugins(Toolchain(tmp_path / "libraries"), tmp_path)
    plugins.add()
    result = loader.load(environment=plugins.environment(FLAGOS_ISOLATION="proces"))
    assert [refusal.code for refusal in result.refusals] == [RefusalCode.ISOLATION_UNAVAILABLE]
    assert "'proces', which is none of auto, none, process" in result.refusals[0].fact
    assert plugins.ran() == []


def test_a_manifest_asks_for_it_and_the_user_decides(tmp_path: Path) -> None:
    (tmp_path / "libraries").mkdir()
    plugins = Plugins(Toolchain(tmp_path / "libraries"), tmp_path)
    plugins.add(file_format_version="1.1.0", isolation="process")
    for mode, is_isolated in (("auto", True), ("process", True), ("none", False)):
        result = loader.load(environment=plugins.environment(FLAGOS_ISOLATION=mode))
        assert result.accepted is not None, result.refusals
        with Context(result.accepted) as context:
            assert (isolation.PROCESS_ATTRIBUTE in context.devices[0].attributes) == is_isolated


def test_jax_computes_trains_and_survives() -> None:
    code = """
import os, signal, jax, jax.numpy as jnp, numpy as np
device = jax.devices("flagos")[0]
assert jax.devices()[0].platform == "cpu"
step = jax.jit(lambda w, x: (w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), jnp.sum(x @ w)), donate_argnums=0)
w, x = np.ones((3, 2), np.float32), np.eye(3, dtype=np.float32)
on = jax.device_put((w, x), device)
new, total = step(*on)
np.testing.assert_allclose(np.asarray(new), w - 0.2 * w, rtol=1e-6)
assert on[0].is_deleted() and float(total) == 6
try:
    np.from_dlpack(on[1])
except BufferError as error:
    print("FLAGOS_ISOLATION=none" in str(error))
os.kill(device.isolated_process_id, signal.SIGKILL)
try:
    np.asarray(step(new, on[1])[0])
except (RuntimeError, ValueError) as error:
    print(str(error).split(".")[0].split("process ")[0], "signal 9" in str(error))
print(float(jnp.sum(jnp.ones(3))))
"""
    environment = {**os.environ, isolation.MODE_VARIABLE: "process"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True\nUNAVAILABLE: the backend's  True\n3.0\n", done.stderr


def test_pytorch_is_told_that_its_tensors_are_out_of_reach() -> None:
    code = """
import torch
compiled = torch.compile(lambda x: x + 1, backend="flagos")
for use in (lambda: compiled(torch.ones(3)), lambda: torch.ones(3, device="flagos")):
    try:
        use()
    except Exception as error:
        print("which does not reach the tensors of this one; set FLAGOS_ISOLATION=none" in str(error))
"""
    environment = {**os.environ, isolation.MODE_VARIABLE: "process", "FLAGOS_TORCH_DEVICE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True\nTrue\n", done.stderr
