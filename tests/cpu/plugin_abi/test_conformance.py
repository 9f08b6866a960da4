"""The backend's duties of plugin_abi/CONTRACT.md, asked through nothing but the header's calls.

Of the backend that is built here, or of the one whose manifest FLAGOS_TEST_DRIVER_FILES names.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from plugin_abi import cabi, loader
from plugin_abi.errors import FlagosStatusError, StatusCode
from plugin_abi.host import Api, Buffer, Context, ElementType, Executable, HostBufferSemantics, Memory
from plugin_abi.negotiation import EntryAnswer, call_entry, judge
from plugin_abi.versions import AbiRange, AbiVersion

F32 = ElementType.F32
V1_0 = AbiVersion(1, 0)


def _entry(backend: loader.Backend, host: AbiRange) -> tuple[EntryAnswer, Any]:
    ffi = cabi.ffi()
    library: Any = ffi.dlopen(backend.place)
    return call_entry(ffi, library.flagos_plugin_entry, host, ffi.NULL, 0)


def _code(call: Any, *arguments: Any) -> StatusCode:
    with pytest.raises(FlagosStatusError) as caught:
        call(*arguments)
    assert caught.value.message
    return caught.value.code


# ---- The entry ----


def test_the_backend_passes_every_check(backend: loader.Backend) -> None:
    assert backend.manifest is not None
    assert loader.check(backend.manifest.path) is None


def test_the_entry_answers_with_the_highest_common_version(backend: loader.Backend) -> None:
    host = AbiRange(V1_0, AbiVersion(1, 9))
    answer, _ = _entry(backend, host)
    assert answer.status == 0 and V1_0 <= answer.version <= AbiVersion(1, 9)
    assert answer.version == min(answer.plugin_range.max, AbiVersion(1, 9))
    assert judge(answer, None, host, "the entry") is None


@pytest.mark.parametrize("major", [0, 9])
def test_ranges_that_do_not_meet_give_the_plugins_own_range(backend: loader.Backend, major: int) -> None:
    answer, _ = _entry(backend, AbiRange(AbiVersion(major, 0), AbiVersion(major, 9)))
    assert answer.status == 1 and answer.message
    assert V1_0 in answer.plugin_range
    assert answer.plugin_info == backend.info


def test_the_entry_may_be_called_again(backend: loader.Backend) -> None:
    tables = {_entry(backend, AbiRange(V1_0, V1_0))[1] for _ in range(3)}
    assert tables == {backend.api}


def test_the_entry_does_no_work(backend: loader.Backend) -> None:
    """No thread, no open file, no interpreter and no further library: counted around the load and the call."""
    program = (
        "import ctypes, json, os, sys\n"
        "def state(): return [len(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd'))]\n"
        "def maps(): return {l.split()[-1] for l in open('/proc/self/maps') if '.so' in l}\n"
        "before = state(); library = ctypes.CDLL(sys.argv[1]); loaded = maps()\n"
        "args = (ctypes.c_uint64 * 64)(int(sys.argv[2]), 1 << 16 | 1 << 48)\n"
        "status = library.flagos_plugin_entry(args)\n"
        "print(json.dumps([status, before == state(), sorted(maps() - loaded)]))\n"
    )
    size = str(cabi.ffi().sizeof("FlagosEntryArgs"))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, backend.place, size], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [0, True, []]


# ---- Structs and errors ----


def test_no_field_beyond_struct_size_is_written(backend: loader.Backend, context: Context) -> None:
    """A host of an older header gives a shorter struct: what lies behind it is not the backend's."""
    api = Api(backend)
    layout = cabi.struct_layout(api.ffi, "FlagosContextDescribeArgs")
    end = layout.field("platform_version").offset
    args = api.new("FlagosContextDescribeArgs", context=context.pointer)
    whole = api.ffi.buffer(args)
    whole[end:] = b"\xaa" * (layout.size - end)
    args.struct_size = end
    api.call("context_describe", args)
    assert api.read_text(args.platform_name) == backend.platform
    assert bytes(whole)[end:] == b"\xaa" * (layout.size - end)


def test_unknown_trailing_fields_are_ignored(backend: loader.Backend, context: Context) -> None:
    """A host of a later header gives a longer struct."""
    api = Api(backend)
    size = api.ffi.sizeof("FlagosContextDescribeArgs")
    memory: Any = api.ffi.new("char[]", size + 64)
    api.ffi.buffer(memory)[size:] = b"\xaa" * 64
    args = api.ffi.cast("FlagosContextDescribeArgs*", memory)
    args.struct_size, args.context = size + 64, context.pointer
    api.call("context_describe", args)
    assert args.num_devices == len(context.devices)
    assert bytes(api.ffi.buffer(memory))[size:] == b"\xaa" * 64


def test_wrong_arguments_are_errors_with_code_and_message(memory: Memory) -> None:
    assert _code(memory.allocate, [-1], F32) is StatusCode.INVALID_ARGUMENT
    assert _code(memory.allocate, [1], ElementType.INVALID) is StatusCode.INVALID_ARGUMENT
    assert _code(memory.allocate, [2**62, 2**62], F32) in (StatusCode.INVALID_ARGUMENT, StatusCode.RESOURCE_EXHAUSTED)
    with memory.allocate([4], F32) as buffer:
        assert _code(buffer.bitcast, [3], F32) is StatusCode.INVALID_ARGUMENT
        assert _code(buffer.hold, -1) is StatusCode.INVALID_ARGUMENT


def test_malformed_programs_are_errors_and_harm_nothing(context: Context, rng: np.random.Generator) -> None:
    for size in (0, 1, 7, 100, 5000):
        assert _code(Executable.compile, context, rng.bytes(size)) in (
            StatusCode.INVALID_ARGUMENT,
            StatusCode.UNIMPLEMENTED,
        )
        assert isinstance(_code(Executable.load, context, rng.bytes(size)), StatusCode)
    with context.addressable_devices[0].default_memory.from_host(b"abc") as buffer:
        assert buffer.to_host() == b"abc"


def test_an_error_of_the_host_comes_back_as_it_went_in(context: Context) -> None:
    error = FlagosStatusError(StatusCode.DATA_LOSS, "größer\0 als gedacht")
    with context.create_event() as event:
        event.set(error)
        with pytest.raises(FlagosStatusError) as caught:
            event.wait()
    assert (caught.value.code, caught.value.message) == (error.code, error.message)


# ---- Events ----


def test_an_event_tells_each_listener_once(context: Context) -> None:
    seen: list[object] = []
    done = threading.Semaphore(0)

    def listen(error: FlagosStatusError | None) -> None:
        seen.append(error)
        done.release()

    event = context.create_event()
    for _ in range(3):
        event.on_ready(listen)
    assert event.query() == (False, None) and _code(event.wait, 0.0) is StatusCode.DEADLINE_EXCEEDED
    event.set()
    event.on_ready(listen)
    event.wait()
    for _ in range(4):
        assert done.acquire(timeout=10)
    assert seen == [None] * 4 and event.query() == (True, None)
    assert _code(event.set) is StatusCode.FAILED_PRECONDITION


def test_an_event_may_be_destroyed_before_its_listener_runs(context: Context, memory: Memory) -> None:
    called = threading.Event()
    promise = memory.promise([2], F32)
    ready = promise.ready_event()
    ready.on_ready(lambda _error: called.set())
    ready.close()
    assert not called.is_set()
    with memory.from_host(array.array("f", [1, 2])) as source:
        promise.fulfill(source)
    assert called.wait(10)


# ---- Buffers ----


def test_host_memory_is_the_hosts_again_after_the_call(memory: Memory) -> None:
    data = array.array("f", range(1000))
    with memory.from_host(data, semantics=HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL) as buffer:
        data[:] = array.array("f", [-1] * 1000)
        assert struct.unpack("1000f", buffer.to_host()) == tuple(range(1000))


def test_host_memory_may_be_read_until_its_event(memory: Memory) -> None:
    data = array.array("f", range(1000))
    buffer, done = memory.from_host_async(data, semantics=HostBufferSemantics.IMMUTABLE_UNTIL_TRANSFER)
    with buffer:
        done.wait()
        data[:] = array.array("f", [-1] * 1000)
        assert struct.unpack("1000f", buffer.to_host()) == tuple(range(1000))
    done.close()


def test_memory_that_is_aliased_stays_alive_until_the_backend_is_done(memory: Memory) -> None:
    """The host client keeps the object, whatever happens to the caller's own reference."""
    data = np.arange(4096, dtype=np.float32)
    expected, alive = data.tobytes(), weakref.ref(data)
    buffer = memory.from_host(data, semantics=HostBufferSemantics.IMMUTABLE_ZERO_COPY)
    with buffer.ready_event() as ready:
        ready.wait()
    if buffer.pointer_address() == data.__array_interface__["data"][0]:
        del data
        gc.collect()
        assert alive() is not None
    assert bytes(buffer.to_host()) == expected
    buffer.close()
    data = None  # type: ignore[assignment]
    memory.devices[0].synchronize()
    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() is None


@pytest.mark.parametrize("release_first", [True, False])
def test_a_view_is_released_once(context: Context, memory: Memory, release_first: bool) -> None:
    data = array.array("f", [1, 2])
    released = threading.Semaphore(0)
    view = memory.view(data.buffer_info()[0], (2,), F32, released.release)
    assert not released.acquire(timeout=0.02)
    if release_first:
        view.delete()
    view.close()
    context.addressable_devices[0].synchronize()
    assert released.acquire(timeout=10) and not released.acquire(timeout=0.05)


@pytest.mark.parametrize("dims", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
def test_strides_of_any_sign_and_shapes_of_any_size(
    memory: Memory, dims: tuple[int, ...], rng: np.random.Generator
) -> None:
    values = rng.standard_normal(tuple(2 * d for d in dims))
    for view in (values[tuple(slice(None, None, -2) for _ in dims)], values.T[tuple(slice(1, None, 2) for _ in dims)]):
        view = np.asarray(view)
        address = view.__array_interface__["data"][0]
        with memory.from_host(address, view.shape, ElementType.F64, byte_strides=view.strides) as buffer:
            assert bytes(buffer.to_host()) == view.tobytes()
            back = np.zeros(view.shape)
            with buffer.to_host_async(back.reshape(-1).view(np.uint8), byte_strides=back.strides) as done:
                done.wait()
            np.testing.assert_array_equal(back, view)


def test_raw_ranges_outside_the_buffer_are_refused(memory: Memory) -> None:
    with memory.from_host(b"abcdef") as buffer:
        assert buffer.read_raw(2, 3) == b"cde" and buffer.read_raw(6, 0) == b""
        for offset, size in ((-1, 2), (5, 2), (7, 0)):
            assert _code(buffer.read_raw, offset, size) in (StatusCode.OUT_OF_RANGE, StatusCode.INVALID_ARGUMENT)
        with memory.allocate([4], ElementType.U8) as target:
            target.write_raw(b"wxyz")
            assert target.to_host() == b"wxyz"
            assert _code(target.write_raw, b"z", 4) in (StatusCode.OUT_OF_RANGE, StatusCode.INVALID_ARGUMENT)


def test_a_deleted_buffer_is_refused_by_name_and_deleting_again_is_fine(memory: Memory) -> None:
    with memory.from_host(b"abc") as buffer:
        buffer.delete()
        buffer.delete()
        assert buffer.is_deleted
        with pytest.raises(FlagosStatusError, match="deleted"):
            buffer.to_host()


def test_enqueued_work_still_sees_a_buffer_that_is_deleted_and_destroyed(memory: Memory) -> None:
    promise = memory.promise([3], ElementType.U8)
    copied = promise.copy_to(memory)
    with memory.from_host(b"abc") as source:
        promise.fulfill(source)
    promise.delete()
    promise.close()
    assert copied.to_host() == b"abc"
    copied.close()


def test_calls_return_before_the_work_that_they_wait_for(memory: Memory) -> None:
    """A copy of what is only promised: the call is back, the copy is not ready, later it is."""
    promise = memory.promise([3], ElementType.U8)
    copied = promise.copy_to(memory)
    with copied.ready_event() as ready:
        assert ready.query() == (False, None)
        with memory.from_host(b"xyz") as source:
            promise.fulfill(source)
        ready.wait(10)
    assert copied.to_host() == b"xyz"


def test_a_failure_reaches_what_depends_on_it(memory: Memory) -> None:
    failed = memory.promise([3], ElementType.U8, FlagosStatusError(StatusCode.DATA_LOSS, "lost in transfer"))
    with failed, failed.copy_to(memory) as copied, pytest.raises(FlagosStatusError, match="lost in transfer") as caught:
        copied.to_host()
    assert caught.value.code is StatusCode.DATA_LOSS


def test_a_held_buffer_keeps_its_storage(memory: Memory) -> None:
    with memory.from_host(b"abcd") as buffer:
        address = buffer.pointer_address()
        buffer.hold(+1)
        buffer.delete()
        assert ctypes.string_at(address, 4) == b"abcd"
        buffer.hold(-1)


def test_donation_moves_the_contents_and_waits_for_the_dependency(context: Context, memory: Memory) -> None:
    with (
        memory.from_host(b"abcd") as buffer,
        context.create_event() as dependency,
        buffer.donate(dependency) as donated,
    ):
        assert buffer.is_deleted
        with donated.ready_event() as ready:
            assert ready.query() == (False, None)
            dependency.set()
            ready.wait(10)
        assert donated.to_host() == b"abcd"


def test_descriptions_live_as_long_as_what_they_describe(backend: loader.Backend, memory: Memory) -> None:
    api = Api(backend)
    with memory.allocate([2, 3], F32) as buffer:
        args = api.call("buffer_describe", api.new("FlagosBufferDescribeArgs", buffer=buffer.pointer))
        for _ in range(100):
            memory.allocate([7, 7], F32).close()
        assert api.read_list(args.dims, args.rank) == [2, 3]


def test_what_is_destroyed_gives_its_memory_back(context: Context, memory: Memory) -> None:
    device = context.addressable_devices[0]
    device.synchronize()
    before = device.memory_stats()
    if before.bytes_in_use < 0:
        pytest.skip("the device does not know how many bytes are in use")
    with memory.allocate([1 << 20], F32):
        assert device.memory_stats().bytes_in_use >= before.bytes_in_use + (4 << 20)
    for _ in range(50):
        memory.allocate([1 << 20], F32).close()
    device.synchronize()
    after = device.memory_stats()
    assert (after.bytes_in_use, after.num_allocations) == (before.bytes_in_use, before.num_allocations)


def test_any_function_from_any_thread(context: Context, memory: Memory) -> None:
    """Eight threads make, copy, read, delete and destroy on the same handles."""
    failures: list[BaseException] = []
    shared = memory.from_host(array.array("i", range(100)))
    expected = bytes(array.array("i", range(100)))

    def work(number: int) -> None:
        try:
            for _ in range(50):
                mine: Buffer = memory.from_host(array.array("i", [number] * 64))
                with mine, shared.copy_to(memory) as copied, mine.copy_to(memory) as other:
                    assert bytes(copied.to_host()) == expected == bytes(shared.to_host())
                    mine.delete()
                    assert set(array.array("i", bytes(other.to_host()))) == {number}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    shared.close()
